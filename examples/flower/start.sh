#!/usr/bin/env bash
# Start a federation of four nodes on this machine: TLS, authenticated nodes, nothing reachable from outside.
#   examples/flower/start.sh [DIR]      (default: federation; stop it with examples/flower/stop.sh [DIR])
# It ends when all nodes are connected, or says what failed: 1 if a process ended, 2 if something is missing.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
dir=${1:-federation}
port=${PORT:-8000}
node=${NODE:-fedalign flower node} # or NODE=flower-supernode: the same, but every message starts a new Python process
export FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1
. "$here/processes.sh"

fail() { # CODE TEXT [LOG]: say why, with the end of a log, and stop what was started
  echo "start.sh: $2" >&2
  [ -z "${3:-}" ] || { echo "the end of $3:" >&2; tail -n 5 "$3" >&2; }
  [ "$1" = 2 ] || "$here/stop.sh" "$dir" >&2
  exit "$1"
}
for command in python fedalign flwr flower-superlink; do
  command -v "$command" > /dev/null || fail 2 "there is no $command: pip install 'fedalign[flower]', and activate its environment"
done
mkdir -p "$dir/logs"
dir=$(cd "$dir" && pwd)
export FLWR_HOME=$dir/flwr
for file in "$dir"/logs/*.pid; do
  if [ -f "$file" ] && process_of "$file" > /dev/null; then
    fail 2 "$(basename "$file" .pid) of $dir still runs (process $(cat "$file")): run $here/stop.sh $dir first"
  fi
done
if python - "$port" 2> /dev/null <<'PYTHON'; then fail 2 "port $port is in use: stop what uses it, or choose another, as in PORT=9100 $0 $dir"; fi
import socket, sys
socket.create_connection(("127.0.0.1", int(sys.argv[1])), timeout=2).close()
PYTHON

printf '%s\n' keys/ flwr/ logs/ out/ 'state.db*' > "$dir/.gitignore" # keys and tokens do not belong in git
python "$here/keys.py" "$dir/keys" --nodes site-0,site-1,site-2,site-3
if [ ! -f "$dir/roster.toml" ]; then
  for k in 0 1; do fedalign flower roster add "$dir/keys/site-$k.pub" --priority --roster "$dir/roster.toml" > /dev/null; done
  for k in 2 3; do fedalign flower roster add "$dir/keys/site-$k.pub" --roster "$dir/roster.toml" > /dev/null; done
fi
[ -d "$dir/my-federation" ] || fedalign flower new "$dir/my-federation" > /dev/null
mkdir -p "$FLWR_HOME"
cat > "$FLWR_HOME/config.toml" <<CONFIG
[superlink]
default = "here"

[superlink.here]
address = "127.0.0.1:$port"
root-certificates = "$dir/keys/ca.crt"
CONFIG

start() { # NAME COMMAND…
  local name=$1
  shift
  nohup "$@" > "$dir/logs/$name.log" 2>&1 &
  echo $! > "$dir/logs/$name.pid"
}
runs() { process_of "$dir/logs/$1.pid" > /dev/null; }
node_number() { echo "${1#site-}"; }
start_node() { # NAME
  local k
  k=$(node_number "$1")
  # shellcheck disable=SC2086
  start "$1" $node --superlink "127.0.0.1:$port" --root-certificates "$dir/keys/ca.crt" \
    --auth-supernode-private-key "$dir/keys/$1" --host 127.0.0.1 --port $((port + 1 + k)) \
    --node-config "partition-id=$k log=\"$dir/logs/$1.jsonl\""
}

start superlink flower-superlink --host 127.0.0.1 --port "$port" --database "$dir/state.db" \
  --ssl-certfile "$dir/keys/server.crt" --ssl-keyfile "$dir/keys/server.key" --ssl-ca-certfile "$dir/keys/ca.crt" \
  --enable-supernode-auth --disable-runtime-dependency-installation
until=$((SECONDS + 120))
until flwr supernode list here > "$dir/logs/list.log" 2>&1; do
  runs superlink || fail 1 "the SuperLink ended" "$dir/logs/superlink.log"
  [ $SECONDS -lt $until ] || fail 1 "the SuperLink does not answer on port $port" "$dir/logs/superlink.log"
  sleep 1
done
for k in 0 1 2 3; do
  flwr supernode register "$dir/keys/site-$k.pub" here > "$dir/logs/register-$k.log" 2>&1 ||
    grep -qi already "$dir/logs/register-$k.log" || fail 1 "site-$k cannot be registered" "$dir/logs/register-$k.log"
  start_node "site-$k"
done
until=$((SECONDS + 180))
for k in 0 1 2 3; do
  name=site-$k
  said=
  until grep -q "SuperNode ID" "$dir/logs/$name.log"; do
    if ! runs "$name"; then
      grep -qi "already\|412\|failed to activate" "$dir/logs/$name.log" || fail 1 "$name ended" "$dir/logs/$name.log"
      # A node that was killed counts as connected for a while, and the SuperLink accepts no second one.
      [ -n "$said" ] || echo "waiting for $name's earlier connection to expire, a minute at most"
      said=yes
      sleep 5
      start_node "$name"
    fi
    [ $SECONDS -lt $until ] || fail 1 "$name is not connected" "$dir/logs/$name.log"
    sleep 0.5
  done
done
echo "The federation runs: a SuperLink on port $port and four nodes; logs are in $dir/logs. Now:"
echo "  export FLWR_HOME=$FLWR_HOME FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1"
echo "  flwr run $dir/my-federation here --stream --run-config 'roster=\"$dir/roster.toml\" out=\"$dir/out\"'"
