#!/bin/bash
if [ "$(cat /app/page)" = "the page of the host" ] && [ "$(cat /app/other)" = refused ]; then
    echo 1
else
    echo 0
fi > /logs/verifier/reward.txt
