# Run demo on 2 nodes of 8 x H100-80GB. Written by: shardwise launch --on ray
# Start it on a machine of the Ray cluster:  python driver.py
# All nodes must see the run folder, the model and the data under the same paths, and have shardwise installed.
# Ray's own ports have no login: use a private network.

import os
import sys
from pathlib import Path

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

from shardwise.errors import ShardwiseError
from shardwise.launch.ray_worker import begin, connect, end, rank, refuse

NAME = 'demo'
RECIPE = Path('/project/runs/launches/demo/recipe.yaml')
os.chdir('/project')
# Variables of every rank.
ENVIRONMENT = {
    'GLOO_SOCKET_IFNAME': 'ib0',  # launch.interface: between the nodes, not the first that answers
    'NCCL_SOCKET_IFNAME': '=ib0',  # the same for NCCL; = for this very name, or eth1 would take eth10 too
    'TORCH_FR_BUFFER_SIZE': '2000',  # keep the last collectives: who hung, and where
    'TORCH_NCCL_DUMP_ON_TIMEOUT': '1',  # and write them when one times out
    'NCCL_NET': 'IB',  # fail without RDMA rather than fall back to TCP in silence
}
# Values come from this shell. Ray writes a runtime_env into its logs: these travel as an object.
SECRETS = {
    'HF_TOKEN': os.environ['HF_TOKEN'],
}

started = begin(RECIPE, NAME)  # model, rows and run folder, before a rank starts
try:
    connect('auto', ENVIRONMENT)
except ShardwiseError as problem:
    sys.exit(refuse(started, problem))
trainer = TorchTrainer(
    rank,
    train_loop_config={
        "run": str(started.run.path.resolve()),
        "recipe": str(RECIPE),
        "ready": ray.util.get_node_ip_address(),  # the other nodes fetch the model and prepare rows themselves
        "directory": os.getcwd(),
        "environment": dict(started.environment),
        "secrets": [ray.put(SECRETS)],
    },
    torch_config=TorchConfig(backend='nccl'),
    scaling_config=ScalingConfig(
        num_workers=16,
        use_gpu=True,
        resources_per_worker={"CPU": 1, "GPU": 1},
        placement_strategy='PACK',
    ),
    run_config=RunConfig(
        name=NAME,
        storage_path=str(started.run.logs_path.resolve() / "ray"),
        # A lost worker or node: Ray starts all ranks again, and they resume from the run's newest checkpoint.
        failure_config=FailureConfig(max_failures=3),
    ),
)
try:
    trainer.fit()
    code = 0
except Exception as problem:  # the ranks' own records say why; this is for what happened before them
    print(f"shardwise: Ray Train ended with: {problem}", file=sys.stderr)
    code = 1
sys.exit(end(started, code))
