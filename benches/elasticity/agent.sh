#!/bin/sh
# What an agent does to a Python project, in a cell: unpack, build, test, look, edit, test again.
#
#   agent.sh PROJECTS PAUSE
#
# PROJECTS holds archives/click-*.tar.gz and tools/ (pytest); after each step there is a pause of
# so many seconds, in which an agent waits for its model.
set -eu
projects=$1 pause=$2
export PYTHONPATH=src:$projects/tools HOME=/root
export GIT_AUTHOR_NAME=agent GIT_AUTHOR_EMAIL=agent@cell GIT_COMMITTER_NAME=agent GIT_COMMITTER_EMAIL=agent@cell

step() {
    "$@" > /var/tmp/log 2>&1 || { cat /var/tmp/log >&2; exit 1; }
    sleep "$pause"
}

tests() { python3 -m pytest -q -p no:cacheprovider; }

unpack() {
    tar -xzf "$projects"/archives/click-*.tar.gz
    cd click-*
    git init -q && git add -A && git commit -qm start
}

build() {
    python3 -m compileall -q src tests
    git archive --format=zip -o /var/tmp/click.zip HEAD
}

look() {
    grep -rn 'def ' src tests
    git log --stat
}

edit() {
    printf '\n\ndef test_added():\n    assert click.echo("added") is None\n' >> tests/test_basic.py
    sed -i 's/^import os$/import os  # edited/' src/click/*.py
    git diff
}

keep() { git add -A && git commit -qm edited && git gc -q; }

cd "$(mktemp -d -p /var/tmp)"
step unpack
step build
step tests
step look
step edit
step tests
step keep
