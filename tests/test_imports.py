"""What a plan may import, and what the rooms may import of each other."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

# Top-level modules beside the standard library that `shardwise plan` may load for a local config.
ALLOWED = {
    "shardwise", "click", "pydantic", "pydantic_core", "annotated_types", "typing_extensions", "typing_inspection",
    "ruamel", "rich", "markdown_it", "mdurl", "pygments", "jinja2", "markupsafe", "_ruamel_yaml",
}  # fmt: skip

PROBE = """
import sys, json, time
before = set(sys.modules)
began = time.process_time()
from shardwise.cli.main import main
sys.argv = ["shardwise"]
try:
    main(["plan", sys.path_model, "--gpus", "8xH100-80GB", "--tokens", "10M"])
except SystemExit as end:
    assert not end.code, end.code
seconds = time.process_time() - began
new = sorted({name.partition(".")[0] for name in set(sys.modules) - before})
print(json.dumps({"modules": new, "seconds": seconds}), file=sys.stderr)
"""


def probe(config: Path) -> dict:
    code = PROBE.replace("sys.path_model", repr(str(config)))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return json.loads(done.stderr.strip().splitlines()[-1])


@pytest.fixture(scope="module")
def llama_8b(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama") / "config.json"
    path.write_text(
        json.dumps(
            {
                "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
                "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
                "max_position_embeddings": 131072, "tie_word_embeddings": False,
            }
        )
    )  # fmt: skip
    return path


def test_plan_imports_only_small_libraries(llama_8b: Path) -> None:
    foreign = {
        name
        for name in probe(llama_8b)["modules"]
        if name not in sys.stdlib_module_names
        and name not in ALLOWED
        and not name.startswith("_sysconfigdata")
    }
    assert not foreign


def test_plan_costs_under_four_tenths_of_a_second_of_cpu(llama_8b: Path) -> None:
    """CPU seconds, not wall time; the best of three, because caches of a busy machine cost CPU time too."""
    assert min(probe(llama_8b)["seconds"] for _ in range(3)) < 0.4


def test_help_imports_no_command(tmp_path: Path) -> None:
    code = "import sys; from shardwise.cli.main import main\ntry: main(['--help'])\nexcept SystemExit: pass\n"
    code += "print([m for m in sys.modules if m.startswith('shardwise.cli.') and m != 'shardwise.cli.main'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip().endswith("[]")


@pytest.mark.parametrize(("command", "extra"), [("demo", "demo"), ("train", "train"), ("web", "web")])
def test_a_missing_package_is_told_with_the_extra_that_brings_it(
    command: str, extra: str, tmp_path: Path
) -> None:
    (tmp_path / "recipe.yaml").write_text(f"model: {tmp_path}\ndata: rows.jsonl\n")
    arguments = [command, *(["recipe.yaml"] if command == "train" else [])]
    code = "import sys\nfor name in ('numpy', 'starlette', 'uvicorn'): sys.modules[name] = None\n"
    code += f"from shardwise.cli.main import main\nmain({arguments!r})\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert f"pip install 'shardwise[{extra}]'" in done.stderr
    assert "Traceback" not in done.stderr
