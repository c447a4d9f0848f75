#!/bin/bash
# Run demo on 1 node of 1 processor rank. Written by: shardwise launch --on torchrun
# Start it on every node, first node first:  HEAD=first-node bash node.sh NODE_NUMBER   (0)
# A node that died may be started again with the same line: it rejoins, and the run goes on from its checkpoint.
# When the first node dies, which keeps the rendezvous, start all of them again.
# All nodes must see this folder, the run folder, the model and the data under the same paths. The rendezvous has
# no login: use a private network.
set -euo pipefail
node=${1:?node number, 0}
head=${HEAD:?name or address of the first node}
port=${PORT:-29400}
cd /project
exec /venv/bin/python -m shardwise.launch.wrapper \
  --recipe /project/runs/launches/demo/recipe.yaml \
  --name demo \
  --owner demo \
  --attempt demo \
  --node-rank "$node" \
  -- \
  torchrun \
  --nnodes=1 \
  --nproc-per-node=1 \
  --rdzv-backend=c10d \
  --rdzv-endpoint="$head:$port" \
  --rdzv-id=demo \
  --rdzv-conf=is_host=$((node == 0)),join_timeout=1800,read_timeout=1800 \
  --max-restarts=3 \
  --shutdown-timeout=120 \
  -m shardwise.launch.rank /project/runs/demo
