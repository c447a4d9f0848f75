# Run demo on 2 nodes of 1 processor rank. Written by: shardwise launch --on ray
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
from shardwise.launch.ray_worker import begin, connect, end, look_at_links, rank, refuse

NAME = 'demo'
RECIPE = Path('/project/runs/launches/demo/recipe.yaml')
os.chdir('/project')
# No variable needs to be set for the ranks.
ENVIRONMENT = {}

started = begin(RECIPE, NAME)  # model, rows and run folder, before a rank starts
try:
    connect('auto', ENVIRONMENT)
    # Every rank must answer before training; a slow link becomes a warning of the run.
    look_at_links(started, {"CPU": 1})
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
        "secrets": [ray.put({})],
    },
    torch_config=TorchConfig(backend='gloo'),
    scaling_config=ScalingConfig(
        num_workers=2,
        use_gpu=False,
        resources_per_worker={"CPU": 1},
        placement_strategy='SPREAD',
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
