#!/usr/bin/env bash
# Stop the processes that start.sh started, and wait until they have ended. Their ids are in the files DIR/logs/*.pid.
#   examples/flower/stop.sh [DIR]
set -euo pipefail
. "$(dirname "$0")/processes.sh"
dir=${1:-federation}
[ -d "$dir/logs" ] || { echo "stop.sh: there is no federation in $dir" >&2; exit 2; }

stop() { # FILE…: end these processes and wait for them
  local file number tenths
  for file in "$@"; do
    number=$(process_of "$file") && kill "$number" 2> /dev/null || true
  done
  for file in "$@"; do
    [ -f "$file" ] || continue
    for ((tenths = 0; tenths < 300; tenths++)); do
      process_of "$file" > /dev/null || break
      sleep 0.1
    done
    if number=$(process_of "$file") && kill -9 "$number" 2> /dev/null; then
      echo "killed $(basename "$file" .pid), which did not end by itself in 30 seconds"
    else
      echo "stopped $(basename "$file" .pid)"
    fi
    rm "$file"
  done
}
# Nodes first, so that they can sign off: the SuperLink then accepts them again at once.
stop "$dir"/logs/site-*.pid
stop "$dir"/logs/superlink.pid
