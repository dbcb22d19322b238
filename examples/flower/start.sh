#!/usr/bin/env bash
# Start a federation of four nodes on this machine: TLS, authenticated nodes, nothing reachable from outside.
#   examples/flower/start.sh [DIR]      (default: federation; stop it with examples/flower/stop.sh [DIR])
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
dir=${1:-federation}
port=${PORT:-8000}
node=${NODE:-fedalign flower node} # or NODE=flower-supernode: the same, but every message starts a new Python process
export FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1
mkdir -p "$dir/logs"
dir=$(cd "$dir" && pwd)
export FLWR_HOME=$dir/flwr

if [ ! -f "$dir/keys/ca.crt" ]; then
  python "$here/keys.py" "$dir/keys" --nodes site-0,site-1,site-2,site-3
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

start superlink flower-superlink --host 127.0.0.1 --port "$port" --database "$dir/state.db" \
  --ssl-certfile "$dir/keys/server.crt" --ssl-keyfile "$dir/keys/server.key" --ssl-ca-certfile "$dir/keys/ca.crt" \
  --enable-supernode-auth --disable-runtime-dependency-installation
for _ in $(seq 60); do
  if flwr supernode list here > /dev/null 2>&1; then break; fi
  sleep 1
done
for k in 0 1 2 3; do
  flwr supernode register "$dir/keys/site-$k.pub" here > "$dir/logs/register-$k.log" 2>&1 || grep -qi already "$dir/logs/register-$k.log"
  start "site-$k" $node --superlink "127.0.0.1:$port" --root-certificates "$dir/keys/ca.crt" \
    --auth-supernode-private-key "$dir/keys/site-$k" --host 127.0.0.1 --port $((port + 1 + k)) \
    --node-config "partition-id=$k log=\"$dir/logs/site-$k.jsonl\""
done
echo "The federation runs; logs are in $dir/logs. Now:"
echo "  export FLWR_HOME=$FLWR_HOME"
echo "  flwr run $dir/my-federation here --stream --run-config 'roster=\"$dir/roster.toml\" out=\"$dir/out\"'"
