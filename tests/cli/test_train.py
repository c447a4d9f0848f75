"""`train` from recipe to result: the files it leaves, adapters that load elsewhere, stopping and going on."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

RECIPE = """
model: {model}
data:
  train: {data}
  validation: 4
  sequence_length: 128
method: {method}
training: {{max_steps: {steps}, global_batch_size: 2, micro_batch_size: 1}}
optimizer: {{learning_rate: 1e-2}}
evaluation: {{samples: 1, max_new_tokens: 4}}
run: {{name: {method}}}
"""


def write(folder: Path, model: Path, data: Path, method: str, steps: int = 6, more: str = "") -> Path:
    path = folder / "recipe.yaml"
    path.write_text(RECIPE.format(model=model, data=data, method=method, steps=steps) + more)
    return path


@pytest.fixture(scope="module", params=["lora", "full"])
def finished(request, tmp_path_factory, tiny_model, chat_file, shardwise) -> tuple[str, Path, str]:
    folder = tmp_path_factory.mktemp(f"train-{request.param}")
    write(folder, tiny_model, chat_file, request.param)
    done = shardwise("train", "recipe.yaml", cwd=folder)
    assert done.returncode == 0, done.stderr
    return request.param, folder / "runs" / request.param, done.stdout


def test_run_folder_holds_what_was_promised(finished) -> None:
    _, run, _ = finished
    for name in ("recipe.yaml", "plan.json", "events.jsonl", "summary.json", "report.html", "status.json"):
        assert (run / name).is_file(), name
    decided = (run / "recipe.yaml").read_text().partition("\nlaunch:")[0]  # that section is decided at launch
    assert "auto" not in decided.split()
    steps = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    steps = [e for e in steps if e["kind"] == "step"]
    assert [e["step"] for e in steps] == list(range(1, 7))
    assert all(e["trained_tokens"] > 0 and e["peak_allocated_bytes"] > 0 for e in steps)
    summary = json.loads((run / "summary.json").read_text())
    assert summary["evaluation_after"] < summary["evaluation_before"]
    assert summary["estimate"]["peak_allocated_bytes"] > 0
    assert summary["samples"][0]["before"] is not None


def test_report_compares_estimate_and_measurement(finished) -> None:
    _, _, output = finished
    for word in ("estimate", "measured", "peak"):
        assert word in output


def test_result_loads_in_plain_libraries(finished, tiny_model: Path) -> None:
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    method, run, _ = finished
    base = AutoModelForCausalLM.from_pretrained(tiny_model)
    before = {n: p.clone() for n, p in base.named_parameters()}
    if method == "lora":
        from peft import PeftModel

        stored = load_file(run / "adapter" / "adapter_model.safetensors")
        model = PeftModel.from_pretrained(base, run / "adapter")
        live = {n.replace(".default.", "."): p for n, p in model.named_parameters() if "lora_" in n}
        assert live.keys() == stored.keys()
        assert all(torch.equal(live[n], stored[n]) for n in stored)
        assert any(p.abs().max() > 0 for n, p in stored.items() if "lora_B" in n)
    else:
        after = dict(AutoModelForCausalLM.from_pretrained(run / "model").named_parameters())
        assert after.keys() == before.keys()
        assert all(not torch.equal(after[n], before[n]) for n in after)


def test_runs_show_and_chat_know_the_run(finished, shardwise) -> None:
    _, run, _ = finished
    listed = shardwise("runs", "--folder", run.parent)
    assert run.name in listed.stdout
    shown = shardwise("show", run)
    assert shown.returncode == 0 and "measured" in shown.stdout
    said = shardwise("chat", run, "-m", "the quick", "--max-new-tokens", "3")
    assert said.returncode == 0, said.stderr


def test_dry_run_starts_nothing(tmp_path: Path, tiny_model: Path, chat_file: Path, shardwise) -> None:
    write(tmp_path, tiny_model, chat_file, "lora")
    done = shardwise("train", "recipe.yaml", "--dry-run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "nothing was started" in done.stdout
    assert [p.name for p in tmp_path.iterdir()] == ["recipe.yaml"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stopped_run_goes_on_to_the_same_weights(
    number, tmp_path, tiny_model, chat_file, shardwise
) -> None:
    from safetensors.torch import load_file

    for name in ("whole", "stopped"):
        (tmp_path / name).mkdir()
        write(tmp_path / name, tiny_model, chat_file, "lora", steps=60)
    assert shardwise("train", "recipe.yaml", cwd=tmp_path / "whole").returncode == 0
    process = subprocess.Popen(
        [sys.executable, "-m", "shardwise.cli.main", "train", "recipe.yaml"],
        cwd=tmp_path / "stopped", stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    run = tmp_path / "stopped" / "runs" / "lora"
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        if (run / "events.jsonl").is_file() and '"kind": "step"' in (run / "events.jsonl").read_text():
            break
        time.sleep(0.01)
    process.send_signal(number)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 75, output
    assert "--resume" in output
    done = shardwise("train", "--resume", "latest", cwd=tmp_path / "stopped")
    assert done.returncode == 0, done.stderr
    weights = [
        load_file(tmp_path / name / "runs" / "lora" / "adapter" / "adapter_model.safetensors")
        for name in ("whole", "stopped")
    ]
    assert weights[0].keys() == weights[1].keys()
    for name, value in weights[0].items():
        assert (value - weights[1][name]).abs().max() == 0, name
