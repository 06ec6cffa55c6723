#!/bin/bash
if [ -f /report/devices ] && [ ! -s /report/devices ] && [ "$(cat /report/reached)" = no ]; then
    echo 1
else
    echo 0
fi > /logs/verifier/reward.txt
