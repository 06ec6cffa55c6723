#!/bin/bash
python3 - <<'EOF'
import os
import urllib.request

with urllib.request.urlopen(os.environ["PAGE"], timeout=60) as page:
    open("/app/page", "wb").write(page.read())
try:
    urllib.request.urlopen("http://example.org/", timeout=20)
    told = "reached"
except OSError:
    told = "refused"
open("/app/other", "w").write(told)
EOF
