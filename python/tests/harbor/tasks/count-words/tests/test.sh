#!/bin/bash
printf '120 the\n80 sat\n40 and\n' | cmp - /srv/here/top.txt && reward=1 || reward=0
echo $reward > /logs/verifier/reward.txt
