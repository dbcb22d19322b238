#!/usr/bin/env bash
# Stop the processes that start.sh started. Their ids are in the files DIR/logs/*.pid.
#   examples/flower/stop.sh [DIR]
set -euo pipefail
dir=${1:-federation}
for file in "$dir"/logs/site-*.pid "$dir"/logs/superlink.pid; do
  [ -f "$file" ] || continue
  if kill "$(cat "$file")" 2> /dev/null; then echo "stopped $(basename "$file" .pid)"; fi
  rm "$file"
done
