#!/bin/sh
# iperf3 between two nodes: the first one serves, the other one sends to it. Arguments go to the sender.
# dilocox exec two-sites-1gbps --node north-0 --node south-0 -- sh docs/examples/iperf3.sh -t 5
set -eu
port=5201
if [ "$RANK" = 0 ]; then
  exec timeout 60 iperf3 -s -1 -p $port
fi
tries=0
until iperf3 -c "$MASTER_ADDR" -p $port --connect-timeout 2000 "$@"; do
  tries=$((tries + 1))
  [ $tries -lt 20 ] || exit 1
  sleep 0.2 # the server is not up yet
done
