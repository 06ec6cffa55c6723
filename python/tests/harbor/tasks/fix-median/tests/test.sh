#!/bin/bash
cd /app
python3 -m unittest && python3 - <<'EOF'
from stats import median

given = [9, 1, 5]
assert median(given) == 5 and given == [9, 1, 5], given
assert median([1]) == 1 and median([2, 1]) == 1.5
EOF
if [ $? -eq 0 ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
