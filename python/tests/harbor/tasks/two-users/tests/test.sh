#!/bin/bash
# The agent had a network; who judges has none.
if [ "$(cat /srv/shop/total)" = 12 ] && [ "$(cat /srv/shop/who)" = games ] && [ "$(id -un)" = root ] &&
    [ "$(cat /srv/shop/page)" = "the page of the host" ] &&
    ! timeout 20 python3 -c 'import os, urllib.request
urllib.request.urlopen(os.environ["PAGE"], timeout=10)' 2> /dev/null; then
    echo 1
else
    echo 0
fi > /logs/verifier/reward.txt
