#!/bin/bash
set -euo pipefail
cat > /app/stats.py <<'EOF'
def median(numbers):
    ordered = sorted(numbers)
    half = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[half]
    return (ordered[half - 1] + ordered[half]) / 2
EOF
