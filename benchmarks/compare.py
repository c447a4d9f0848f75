"""Shardwise and its peers on the same rows: `python benchmarks/compare.py --model FOLDER --data ROWS.jsonl`.

Every trainer runs in its own environment under SHARDWISE_CACHE/benchmarks (made on the first use), in turn, for
several rounds: same model, rows, order, seed, learning rate, rank and batch. Printed: tokens per second of real
tokens (padding not counted) over the steps after the first, seconds from command to the end of the first step, peak
resident bytes of the process and the loss, and each as a ratio to shardwise with its range over the rounds. They go
to measurements/ as JSON and, with --table, into docs/benchmarks.md.

Both wall and processor seconds are recorded: on a machine that others use too, the second is the steadier one.
"""

# ruff: noqa: PLC0415

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).resolve().parent
CACHE = Path(os.environ.get("SHARDWISE_CACHE", Path.home() / ".cache" / "shardwise")) / "benchmarks"
# What each environment installs, torch first. Peers that share an environment name the same one.
PEERS = {
    "transformers": ("trl", ["trl", "peft", "psutil"]),
    "trl": ("trl", ["trl", "peft", "psutil"]),
    "trl-packing": ("trl", ["trl", "peft", "psutil"]),
    "llamafactory": ("llamafactory", ["llamafactory", "psutil"]),
}


def environment(name, packages):
    """The interpreter of a peer's environment, made if it is not there."""
    folder = CACHE / name
    python = folder / "bin" / "python"
    if not (folder / ".ok").exists():
        print(f"installing {', '.join(packages)} into {folder}", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        torch = f"torch=={torch_version()}"
        subprocess.run([python, "-m", "pip", "install", "-q", torch], check=True)
        (folder / "c.txt").write_text(torch + "\n")
        subprocess.run([python, "-m", "pip", "install", "-q", "-c", folder / "c.txt", *packages], check=True)
        (folder / ".ok").touch()
    return python


def torch_version():
    return version("torch").split("+")[0]


def rows_in_order(args, length, folder):
    """Rows as shardwise prepares and orders them, written for the peers. Returns (file, tokens of each step)."""
    from shardwise.data import make_order, prepare
    from shardwise.recipe import parse_recipe

    recipe = parse_recipe(recipe_text(args, "lora", length, folder))
    config = json.loads((Path(args.model) / "config.json").read_text())
    prepared = prepare(
        recipe.data,
        Path(args.model),
        max_length=config["max_position_embeddings"],
        vocabulary=config["vocab_size"],
        seed=args.seed,
    )
    order = make_order(
        prepared.train,
        sequence_length=prepared.sequence_length,
        packing=False,
        global_batch_size=batch_of(args, length),
        epochs=None,
        max_steps=args.steps,
        seed=args.seed,
    )
    path, tokens = Path(folder) / "rows.jsonl", []
    with path.open("w") as file:
        for step in range(order.steps):
            tokens.append(order.tokens(step))
            for (row,) in order.step(step):
                ids, labels = prepared.train.row(row)
                file.write(json.dumps({"input_ids": ids.tolist(), "labels": labels.tolist()}) + "\n")
    return path, tokens


def batch_of(args, length):
    return 1 if length > args.sequence_length else args.batch


def recipe_text(args, method, length, folder):
    return f"""\
model: {args.model}
data: {{train: {args.data}, sequence_length: {length}, packing: false, validation: 0}}
method: {method}
lora: {{rank: {args.rank}, alpha: {2 * args.rank}}}
optimizer: {{learning_rate: {args.learning_rate}, weight_decay: 0.0, max_grad_norm: 1.0}}
schedule: {{name: constant, warmup: 0}}
training:
  max_steps: {args.steps}
  global_batch_size: {batch_of(args, length)}
  micro_batch_size: {batch_of(args, length)}
  precision: bf16
  activation_checkpointing: none
  seed: {args.seed}
engine: single
evaluation: {{every_steps: 0, samples: 0}}
checkpoint: {{every_steps: 0}}
run: {{folder: {folder}/runs}}
"""


def run_shardwise(args, method, length, folder):
    """The product's own command; its events and summary hold the numbers."""
    recipe = Path(folder) / "recipe.yaml"
    recipe.write_text(recipe_text(args, method, length, folder))
    began = time.time()
    command = [Path(sys.executable).parent / "shardwise", "train", recipe]
    done = subprocess.run(command, env=threads(args), capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    run = max((Path(folder) / "runs").iterdir(), key=lambda p: p.stat().st_mtime)
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    steps = [e for e in events if e["kind"] == "step"]
    summary = json.loads((run / "summary.json").read_text())
    return {
        "step_seconds": [e["seconds"] for e in steps],
        "losses": [e["loss"] for e in steps],
        "first_step_seconds": steps[0]["time"] - began,
        "peak_resident_bytes": summary["measured"]["peak_resident_bytes"],
        "versions": summary["versions"],
        "seconds": time.time() - began,
    }


def run_peer(args, peer, method, rows, length, folder):
    name, packages = PEERS[peer]
    job = {
        "peer": peer,
        "model": str(Path(args.model).resolve()),
        "rows": str(rows),
        "method": method,
        "steps": args.steps,
        "batch": batch_of(args, length),
        "learning_rate": args.learning_rate,
        "rank": args.rank,
        "seed": args.seed,
        "threads": args.threads,
        "command_time": time.time(),
    }
    (Path(folder) / "job.json").write_text(json.dumps(job))
    result = Path(folder) / "result.json"
    result.unlink(missing_ok=True)
    command = [environment(name, packages), HERE / "peer.py", Path(folder) / "job.json", result]
    done = subprocess.run(command, env=threads(args), cwd=folder, capture_output=True, text=True)
    if not result.exists():
        raise RuntimeError(done.stderr[-2000:])
    return json.loads(result.read_text())


def children_seconds():
    """Processor seconds of all commands run so far."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def threads(args):
    environment = {**os.environ, "OMP_NUM_THREADS": str(args.threads), "HF_HUB_OFFLINE": "1"}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    return environment


def one_case(args, method, length):
    """All peers, `rounds` times in turn. Returns a record per peer."""
    results = {peer: [] for peer in ("shardwise", *args.peers)}
    failed = {}
    with tempfile.TemporaryDirectory() as folder:
        rows, tokens = rows_in_order(args, length, folder)
        for round_ in range(args.rounds):
            for peer in results:
                if peer in failed:
                    continue
                load, used = os.getloadavg()[0], children_seconds()
                try:
                    if peer == "shardwise":
                        got = run_shardwise(args, method, length, folder)
                    else:
                        got = run_peer(args, peer, method, rows, length, folder)
                except RuntimeError as problem:
                    failed[peer] = str(problem)
                    print(f"{peer}: {problem}", file=sys.stderr)
                    continue
                real = sum(tokens[1 : len(got["step_seconds"])])
                got["tokens_per_second"] = real / sum(got["step_seconds"][1:])
                if got.get("step_cpu_seconds"):
                    got["tokens_per_cpu_second"] = real / sum(got["step_cpu_seconds"][1:])
                got["load"], got["command_cpu_seconds"] = load, children_seconds() - used
                results[peer].append(got)
                print(
                    f"round {round_ + 1} {method} {length} {peer}: {got['tokens_per_second']:.1f} tokens/s, "
                    f"first step after {got['first_step_seconds']:.1f} s, "
                    f"{got['peak_resident_bytes'] / 2**30:.2f} GiB, loss {got['losses'][-1]:.4f} (load {load:.1f})",
                    file=sys.stderr,
                    flush=True,
                )
    return {"method": method, "sequence_length": length, "tokens": tokens, "runs": results, "failed": failed}


def spread(values):
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})" if values else "-"


def table(case, weights_bytes):
    """Markdown: one line per peer, ratios of shardwise to it, round by round."""
    ours = case["runs"]["shardwise"]
    lines = [
        f"### {case['method']}, sequences up to {case['sequence_length']} tokens",
        "",
        "| trainer | tokens/s | shardwise is faster by | first step, s | peak resident, GiB "
        "| shardwise's peak above weights / its | last loss |",
        "|---|---|---|---|---|---|---|",
    ]
    for peer, runs in case["runs"].items():
        if not runs:
            lines.append(
                f"| {peer} | failed: {case['failed'].get(peer, '').strip().splitlines()[-1][:100]} | | | | | |"
            )
            continue
        faster = [a["tokens_per_second"] / b["tokens_per_second"] for a, b in zip(ours, runs, strict=False)]
        above = [
            (a["peak_resident_bytes"] - weights_bytes) / (b["peak_resident_bytes"] - weights_bytes)
            for a, b in zip(ours, runs, strict=False)
        ]
        middle = {
            k: statistics.median(r[k] for r in runs) for k in ("tokens_per_second", "first_step_seconds")
        }
        peak = statistics.median(r["peak_resident_bytes"] for r in runs) / 2**30
        lines.append(
            f"| {peer} | {middle['tokens_per_second']:.0f} | {spread(faster)} | {middle['first_step_seconds']:.1f} "
            f"| {peak:.2f} | {spread(above)} | {runs[0]['losses'][-1]:.3f} |"
        )
    return "\n".join(lines) + "\n"


def processor():
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="a model folder")
    parser.add_argument("--data", required=True, help="rows as shardwise reads them")
    parser.add_argument("--peers", nargs="*", default=list(PEERS), choices=list(PEERS))
    parser.add_argument("--methods", nargs="*", default=["lora", "full"])
    parser.add_argument("--sequence-length", type=int, default=512)
    parser.add_argument("--long", type=int, default=0, help="also one row of so many tokens a step; 0: not")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=2e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=Path, default=HERE.parent / "measurements")
    parser.add_argument("--table", type=Path, help="a file to which the tables are added")
    args = parser.parse_args()
    args.model, args.data = str(Path(args.model).resolve()), str(Path(args.data).resolve())
    cases = [
        one_case(args, method, length)
        for length in (args.sequence_length, args.long)
        if length
        for method in args.methods
    ]
    weights = sum(f.stat().st_size for f in Path(args.model).glob("*.safetensors"))
    about = {
        "kind": "peers",
        "date": date.today().isoformat(),
        "processor": processor(),
        "threads": args.threads,
        "torch": torch_version(),
        "weights_bytes": weights,
        "settings": {
            k: str(v) if isinstance(v, Path) else v
            for k, v in vars(args).items()
            if k not in ("model", "data")
        },
        "model": Path(args.model).name,
    }
    args.out.mkdir(exist_ok=True)
    name = f"peers-{about['date']}-{int(time.time())}.json"
    (args.out / name).write_text(json.dumps({**about, "cases": cases}, indent=1) + "\n")
    text = "\n".join(table(case, weights) for case in cases)
    print(text)
    if args.table:
        with args.table.open("a") as file:
            file.write("\n" + text)


if __name__ == "__main__":
    main()
