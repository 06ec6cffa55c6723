#!/bin/bash
sed -n 's/^ *\([^ :]*\):.*/\1/p' /proc/net/dev | grep -vx lo > /report/devices
timeout 10 bash -c ': > /dev/tcp/1.1.1.1/80' 2> /dev/null && echo yes > /report/reached || echo no > /report/reached
