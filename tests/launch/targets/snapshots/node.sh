#!/bin/bash
# Run demo on 2 nodes of 8 x H100-80GB. Written by: shardwise launch --on torchrun
# Start it on every node, first node first:  HEAD=first-node bash node.sh NODE_NUMBER   (0 to 1)
# A node that died may be started again with the same line: it rejoins, and the run goes on from its checkpoint.
# When the first node dies, which keeps the rendezvous, start all of them again.
# All nodes must see this folder, the run folder, the model and the data under the same paths. The rendezvous has
# no login: use a private network.
set -euo pipefail
node=${1:?node number, 0 to 1}
head=${HEAD:?name or address of the first node}
port=${PORT:-29400}
: "${HF_TOKEN:?set it before starting}"
cd /project
export GLOO_SOCKET_IFNAME=ib0  # launch.interface: between the nodes, not the first that answers
export NCCL_SOCKET_IFNAME==ib0  # the same for NCCL; = for this very name, or eth1 would take eth10 too
export TORCH_FR_BUFFER_SIZE=2000  # keep the last collectives: who hung, and where
export TORCH_NCCL_DUMP_ON_TIMEOUT=1  # and write them when one times out
export NCCL_NET=IB  # fail without RDMA rather than fall back to TCP in silence
module load cuda
exec /venv/bin/python -m shardwise.launch.wrapper \
  --recipe /project/runs/launches/demo/recipe.yaml \
  --name demo \
  --owner demo \
  --attempt demo \
  --node-rank "$node" \
  -- \
  torchrun \
  --nnodes=2 \
  --nproc-per-node=8 \
  --rdzv-backend=c10d \
  --rdzv-endpoint="$head:$port" \
  --rdzv-id=demo \
  --rdzv-conf=is_host=$((node == 0)),join_timeout=1800,read_timeout=1800 \
  --max-restarts=3 \
  --shutdown-timeout=120 \
  -m shardwise.launch.rank /project/runs/demo
