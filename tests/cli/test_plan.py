"""`shardwise plan` as a person and as a program meets it."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

CONFIG = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 32000, "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}  # fmt: skip
# What the path of `plan` may import beside the standard library.
ALLOWED = {
    "shardwise", "click", "pydantic", "pydantic_core", "annotated_types", "typing_extensions", "typing_inspection",
    "ruamel", "rich",
}  # fmt: skip


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def run(*args: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "COLUMNS": "100"}
    return subprocess.run(
        [sys.executable, "-m", "shardwise.cli.main", "plan", *args],
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
    )


def test_plan_imports_nothing_heavy(model: Path) -> None:
    code = (
        "import sys\n"
        "from shardwise.cli.main import cli\n"
        "before = set()\n"
        f"cli.main(['plan', {str(model)!r}, '--gpus', '8xH100-80GB', '--tokens', '1M'], standalone_mode=False)\n"
        "print(*sorted({m.split('.')[0] for m in sys.modules}), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    loaded = set(done.stderr.split()[-1000:])
    standard = set(sys.stdlib_module_names) | set(sys.builtin_module_names) | {"__main__"}
    foreign = {
        m for m in loaded if m not in standard and m not in ALLOWED and not m.startswith(("_", "sitecustom"))
    }
    editable = {
        m for m in foreign if "editable" in m or m in ("distutils-precedence", "google", "mpl_toolkits")
    }
    assert foreign - editable == set()


def test_plan_of_a_local_config_is_light(model: Path) -> None:
    """Under 0.4 s of processor time on a quiet machine; the best of three, for noise."""
    used = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = run(str(model), "--gpus", "8xH100-80GB")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert done.returncode == 0, done.stderr
        used.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(used) < 0.4


def test_the_answer_leads_with_a_recommendation_and_explains(model: Path) -> None:
    text = run(str(model), "--gpus", "8xH100-80GB", "--tokens", "10M", "--explain").stdout
    assert "recommended:" in text
    assert "It should take" in text
    assert "12 bytes per parameter" in text
    assert "weights" in text
    assert "matrix products" in text


def test_json_is_the_same_answer(model: Path) -> None:
    found = json.loads(run(str(model), "--gpus", "8xH100-80GB", "--tokens", "10M", "--json").stdout)
    assert found["model"]["total_parameters"] == 6_738_415_616
    assert found["recommended"]["verdict"] == "fits"
    assert found["recommended"]["memory"]["allocated_bytes"] > 0
    assert (
        found["recommended"]["low_seconds"]
        < found["recommended"]["seconds"]
        < found["recommended"]["high_seconds"]
    )
    assert found["rule_of_thumb"][0]["bytes"] == 12 * 6_738_415_616


def test_a_written_recipe_is_one_that_train_takes(model: Path, tmp_path: Path) -> None:
    from shardwise.recipe.load import load_recipe

    (tmp_path / "rows.jsonl").write_text('{"text": "hello"}\n' * 50)
    recipe = tmp_path / "recipe.yaml"
    done = run(
        str(model), "--gpus", "2xRTX4090", "--data", str(tmp_path / "rows.jsonl"), "--write", str(recipe)
    )
    assert done.returncode == 0, done.stderr
    loaded = load_recipe(recipe)
    assert loaded.model.source == str(model)
    assert loaded.engine.processes == 2
    again = run(str(model), "--gpus", "2xRTX4090", "--tokens", "1M", "--write", str(recipe))
    assert again.returncode == 2
    assert "not overwritten" in again.stderr


@pytest.mark.parametrize("offer", ["RTX4090", "2xRTX4090", "8xH100-80GB", "16xA100-80GB"])
def test_a_written_recipe_is_one_that_launch_takes(
    offer: str, model: Path, tmp_path: Path, monkeypatch
) -> None:
    from click.testing import CliRunner

    from shardwise.cli.main import cli

    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text('{"text": "hello"}\n' * 50)
    question = ["plan", str(model), "--gpus", offer, "--data", "rows.jsonl", "--method", "full"]
    done = CliRunner().invoke(cli, [*question, "--write", "recipe.yaml"])
    assert done.exit_code == 0, done.output
    # what a plan cannot know: where runs are kept
    own = {
        "kubernetes": ["--set", "launch.kubernetes.claim=c"],
        "skypilot": ["--set", "launch.skypilot.volume=v"],
    }
    for place in ("torchrun", "slurm", "kubernetes", "ray", "skypilot"):
        words = ["launch", "recipe.yaml", "--on", place, "--dry-run", *own.get(place, [])]
        done = CliRunner().invoke(cli, words)
        assert done.exit_code == 0, (place, done.output)
        assert "shardwise" in done.output
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "recipe.yaml", "rows.jsonl"]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["no/such/folder"], "does not exist"),
        (["MODEL", "--gpus", "8xH1000"], "did you mean"),
        (["MODEL", "--tokens", "many"], "is not a count"),
        (["MODEL", "--tokens", "0"], "at least one token"),
        (["MODEL", "--budget", "lots", "--tokens", "1M"], "amount of money"),
        (["MODEL", "--deadline", "soon", "--tokens", "1M"], "duration"),
        (["MODEL", "--data", "none.jsonl"], "does not exist"),
        (["MODEL", "--method", "dpo"], "dpo"),
        (["MODEL", "--targets", "q_porj"], "q_proj"),
        (["MODEL", "--gpus", "12xH100-80GB"], "8 or 16"),
        (["MODEL", "--gpus", "16xH100-80GB", "--network", "carrier-pigeon"], "unknown link"),
        (["MODEL", "--prices", "none.json"], "prices"),
    ],
)
def test_misuse_is_three_lines_and_exit_2(model: Path, args: list[str], words: str) -> None:
    done = run(*[str(model) if a == "MODEL" else a for a in args])
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_an_empty_data_file_is_refused(model: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n\n")
    done = run(str(model), "--data", str(tmp_path / "empty.jsonl"))
    assert done.returncode == 2
    assert "empty" in done.stderr


def test_accuracy_prints_both_scores(tmp_path: Path) -> None:
    table = tmp_path / "runs.csv"
    table.write_text(
        "id,model,method,sharding,sharding_norm,num_gpus,gpu_kind,micro_batch_per_gpu,seq_len,act_ckpt,"
        "measured_peak_mem_GB,mem_unit,mem_kind,mem_usable,tokens_per_s_per_gpu,tput_usable\n"
        "a,Llama-3-8B,full,FSDP2,zero3,64,A100-80GB,1,8192,selective,30,GiB,allocated,yes,2973,yes\n"
        "b,Nobody-1B,full,FSDP2,zero3,64,A100-80GB,1,8192,selective,30,GiB,allocated,yes,2973,yes\n"
    )
    command = [sys.executable, "-m", "shardwise.cli.main", "accuracy", str(table), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    found = json.loads(done.stdout)
    for kind in ("memory", "throughput"):
        assert (found[kind]["scored"], found[kind]["declined"]) == (1, 1)
        assert (
            abs(found[kind]["median_signed"]) == found[kind]["median_absolute"] == found[kind]["p90_absolute"]
        )
    assert "Nobody-1B" in found["throughput"]["declined_rows"][0]["reason"]


def test_explain_takes_the_estimate_apart(model: Path) -> None:
    """The same in JSON: what is printed sums to the estimate of the recommended option."""
    flags = (str(model), "--gpus", "8xH100-80GB", "--method", "full", "--tokens", "10M", "--explain")
    text = run(*flags).stdout
    assert "allocated is the sum of these, in bytes:" in text and "one more sequence per micro-batch" in text
    assert "highest of each phase: load" in text and "shardwise/training/" in text
    answer = json.loads(run(*flags, "--json").stdout)
    memory, formula = answer["recommended"]["memory"], answer["memory_formula"]
    values = {name: symbol["value"] for name, symbol in formula["symbols"].items()}
    total = 0.0
    for term in formula["terms"].values():
        for monomial in term:
            size = monomial["bytes"]
            for name, power in monomial["powers"].items():
                size *= values[name] ** power
            total += size
    assert total == pytest.approx(memory["allocated_bytes"], rel=1e-6)
    assert sum(part["bytes"] for part in formula["parts"]) == pytest.approx(
        memory["allocated_bytes"], rel=1e-6
    )
    assert formula["phase"] == memory["peak_phase"] == max(memory["phases"], key=memory["phases"].__getitem__)
    assert formula["sensitivities_bytes"]["world_size"] <= 0
    assert "memory_formula" not in json.loads(run(*flags[:-1], "--json").stdout)
