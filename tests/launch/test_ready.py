"""Model and rows are on each node before a rank starts: in a cache of its own, or in one that all share."""

import os
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "data"))
from fake_hub import Hub, serve
from uninterrupted import recipe

from shardwise.launch.environment import variables
from shardwise.recipe import load_recipe

# What the wrapper does before it starts torchrun. An interpreter of its own: the hub's library reads its variables
# when it is imported.
NODE = """
import sys
from pathlib import Path
from shardwise.launch.wrapper import begin
begin(Path(sys.argv[1]), sys.argv[2], "me", "1", lead=sys.argv[3] == "0")
"""


def begin_on_two_nodes(folder: Path, name: str, caches: list[Path], hub: Hub) -> None:
    """Both at the same time, as a scheduler starts them; each with the variables that `launch.cache` sets."""
    nodes = []
    for number, cache in enumerate(caches):
        asked = load_recipe(folder / "r.yaml", [f"launch.cache={cache}"])
        environment = {
            **os.environ,
            **{v.name: v.value for v in variables(asked)},
            "HF_ENDPOINT": hub.endpoint,
        }
        environment.pop("HF_HUB_OFFLINE", None)
        nodes.append(
            subprocess.Popen(
                [sys.executable, "-c", NODE, str(folder / "r.yaml"), name, str(number)], cwd=folder,
                env=environment, text=True, stderr=subprocess.PIPE,
            )
        )  # fmt: skip
    for node in nodes:
        _, said = node.communicate(timeout=120)
        assert node.returncode == 0, said


def weights_sent(hub: Hub) -> int:
    return len([one for one in hub.log if one.startswith("GET") and "safetensors" in one])


def test_each_node_makes_model_and_rows_ready_in_its_own_cache_or_the_shared_one(
    tmp_path: Path, tiny_model: Path, chat_file: Path
) -> None:
    files = {path.name: path.read_bytes() for path in tiny_model.iterdir()}
    text = recipe(Path("org/tiny"), chat_file, 0, "{nodes: 2}")
    (tmp_path / "r.yaml").write_text(text)
    own, shared = [tmp_path / "disk-0", tmp_path / "disk-1"], tmp_path / "shared"
    with serve("org/tiny", files, kind="model") as hub:
        begin_on_two_nodes(tmp_path, "apart", own, hub)
        assert weights_sent(hub) == 2
        hub.log.clear()
        begin_on_two_nodes(tmp_path, "together", [shared, shared], hub)
        assert weights_sent(hub) == 1
    for cache in (*own, shared):
        assert list(cache.rglob("model.safetensors")), cache
        assert len(list((cache / "shardwise" / "data").glob("*/done.json"))) == 1, cache
