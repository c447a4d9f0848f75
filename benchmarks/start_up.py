"""From the command to the end of the first step, as people start a run: `python benchmarks/start_up.py`.

`shardwise train RECIPE` and `trl sft --config FILE` in turn, each in its own environment (see compare.py), on the same
model, chats, batch and method, both from the chats themselves. The clock stops when the line of the first step is
printed; then the run is ended. A round before the first fills every cache: prepared rows here, tokenized ones
there, and both packages' bytecode. Seconds are wall time, so nothing else should run.
"""

# ruff: noqa: PLC0415

import argparse
import json
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import compare
import table

STEP = {"shardwise": re.compile(r"^step 1/"), "trl": re.compile(r"^\{'loss'")}  # the line of the first step
TRL = """\
model_name_or_path: {model}
dataset_name: {rows}
dtype: bfloat16
bf16: true
use_cpu: true
max_length: 512
per_device_train_batch_size: 4
gradient_accumulation_steps: 1
gradient_checkpointing: false
learning_rate: 2.0e-4
max_steps: {steps}
logging_steps: 1
disable_tqdm: true
report_to: none
save_strategy: "no"
output_dir: {out}
seed: 0
"""
LORA = "use_peft: true\nlora_r: 16\nlora_alpha: 32\nlora_target_modules: all-linear\n"


def commands(args: argparse.Namespace, method: str, folder: Path) -> dict[str, list[str]]:
    """What people type, with the files it names."""
    rows = folder / "rows"
    rows.mkdir(exist_ok=True)
    (rows / "train.jsonl").write_bytes((compare.CACHE / "rows" / "mixed.jsonl").read_bytes())
    recipe = folder / "recipe.yaml"
    recipe.write_text(compare.recipe_text(args, compare.Case(method, "mixed", 512, 4), folder))
    config = folder / "trl.yaml"
    text = TRL.format(model=args.model, rows=rows, steps=args.steps, out=folder / "trl")
    config.write_text(text + (LORA if method == "lora" else ""))
    trl = compare.environment(*compare.PEERS["trl"]).parent / "trl"
    return {
        "shardwise": [str(Path(sys.executable).parent / "shardwise"), "train", str(recipe)],
        "trl": [str(trl), "sft", "--config", str(config)],
    }


def seconds(command: list[str], step: re.Pattern[str], environment: dict[str, str], folder: Path) -> float:
    """Wall seconds to the line of the first step; the command and all that it started are ended then."""
    began, said = time.monotonic(), []
    process = subprocess.Popen(
        command, env=environment, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if step.search(line):
                return time.monotonic() - began
            said.append(line)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    raise SystemExit(f"{' '.join(command)} ended without a step:\n{''.join(said[-20:])}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a model folder; default: SmolLM2 as `shardwise demo` makes it")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8, help="length of the run that is ended after its first")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.model is None:
        from shardwise.cli.demo import demo_model

        args.model = demo_model()
    args.model, args.rank, args.learning_rate, args.seed = str(Path(args.model).resolve()), 16, 2e-4, 0
    compare.benchmark_rows.write(compare.CACHE / "rows")
    compare.compile_ours()
    environment = {**compare.threads(args), "PYTHONUNBUFFERED": "1"}
    found: dict[str, dict[str, list[float]]] = {}
    for method in ("lora", "full"):
        with tempfile.TemporaryDirectory() as folder:
            asked = commands(args, method, Path(folder))
            took: dict[str, list[float]] = {name: [] for name in asked}
            for number in range(args.rounds + 1):
                for name, command in asked.items():
                    one = seconds(command, STEP[name], environment, Path(folder))
                    print(f"{method}, round {number}, {name}: {one:.1f} s", file=sys.stderr, flush=True)
                    took[name] += [one] if number else []
        ratios = [b / a for a, b in zip(took["shardwise"], took["trl"], strict=True)]
        found[method] = {**took, "trl / shardwise": ratios}
        parts = [f"{name} {statistics.median(v):.1f} s ({min(v):.1f} to {max(v):.1f})" for name, v in took.items()]
        print(f"{method}: {', '.join(parts)}; trl's / shardwise's {table.spread(ratios)}")
    if args.out:
        record = {
            "kind": "start_up",
            "date": date.today().isoformat(),
            "processor": table.processor(),
            "platform": platform.platform(),
            "threads": args.threads,
            "versions": {p: version(p) for p in ("torch", "transformers", "peft")},
            "trl": compare.PEERS["trl"][1],
            "seconds": found,
        }
        args.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
