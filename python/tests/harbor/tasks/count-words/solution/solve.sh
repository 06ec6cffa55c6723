#!/bin/bash
set -euo pipefail
tr -s ' ' '\n' < "$TEXT" | sort | uniq -c | sort -k1,1nr -k2 | head -n 3 | awk '{print $1, $2}' > top.txt
