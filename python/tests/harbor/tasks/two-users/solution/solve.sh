#!/bin/bash
set -euo pipefail
awk -F, 'NR > 1 { sum += $2 } END { print sum }' prices.csv > total
id -un > who
python3 -c 'import os, urllib.request
print(urllib.request.urlopen(os.environ["PAGE"], timeout=60).read().decode(), end="")' > page
