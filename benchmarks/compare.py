"""Shardwise and its peers on the same rows: `python benchmarks/compare.py --model FOLDER`.

Every trainer runs in its own environment under SHARDWISE_CACHE/benchmarks (made on the first use), in turn, for
several rounds: same model, rows, order, seed, learning rate, rank and batch. Taken: tokens per second of real tokens
(padding not counted) over the steps after the first, seconds from command to the end of the first step, peak resident
bytes of the process and the loss of every step. Each run is written to the file of --record as soon as it ends, and a
later call goes on where the file ends, so a comparison may be made in pieces. `--table` writes the table of such a
file into docs/benchmarks.md (see table.py) and runs nothing.

Wall seconds need a machine that nobody else uses; the load before each run is recorded. With `--threads 1` processor
seconds are told too, which other work on the machine disturbs less.
"""

# ruff: noqa: PLC0415

import argparse
import compileall
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import rows as benchmark_rows
import table

HERE = Path(__file__).resolve().parent
CACHE = Path(os.environ.get("SHARDWISE_CACHE", Path.home() / ".cache" / "shardwise")) / "benchmarks"
# Environment and packages of each peer; torch comes first, in the version that shardwise uses.
TRL = ("trl", ("trl", "peft", "psutil"))
PEERS = {
    "transformers": TRL,
    "trl": TRL,
    "trl-packing": TRL,
    "llamafactory": ("llamafactory", ("llamafactory", "psutil")),
    "ms-swift": ("ms-swift", ("ms-swift", "psutil")),
    "litgpt": ("litgpt", ("litgpt", "psutil")),
    "unsloth": ("unsloth", ("unsloth", "psutil")),
}
# Packages that a peer brings in a build that does not load beside a torch without CUDA, and that it can do without.
UNLOADABLE = {"unsloth": ("torchvision",), "llamafactory": ("torchvision", "torchaudio")}
OURS = "shardwise"


@dataclass(frozen=True)
class Case:
    """What is trained on what. `batch`: rows of one step, in one micro-batch."""

    method: str
    data: str  # mixed or long
    sequence_length: int
    batch: int

    @property
    def name(self) -> str:
        return f"{self.method}-{self.data}"


def environment(name: str, packages: tuple[str, ...]) -> Path:
    """The interpreter of a peer's environment, made if it is not there."""
    folder = CACHE / name
    python = folder / "bin" / "python"
    if not (folder / ".ok").exists():
        print(f"installing {', '.join(packages)} into {folder}", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        torch = f"torch=={torch_version()}"
        (folder / "c.txt").write_text(torch + "\n")
        pip = [str(python), "-m", "pip"]
        subprocess.run([*pip, "install", "-q", torch], check=True)
        subprocess.run([*pip, "install", "-q", "-c", str(folder / "c.txt"), *packages], check=True)
        for package in UNLOADABLE.get(name, ()):
            subprocess.run([*pip, "uninstall", "-q", "-y", package], check=True)
        (folder / ".ok").touch()
    return python


def torch_version() -> str:
    return version("torch").split("+")[0]


def rows_in_order(args: argparse.Namespace, case: Case, folder: Path) -> tuple[Path, list[int]]:
    """Rows as shardwise prepares and orders them, written for the peers. Returns (file, tokens of each step)."""
    from shardwise.data import make_order, prepare
    from shardwise.recipe import parse_recipe

    recipe = parse_recipe(recipe_text(args, case, folder))
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
        global_batch_size=case.batch,
        epochs=None,
        max_steps=args.steps,
        seed=args.seed,
    )
    path, tokens = folder / "rows.jsonl", []
    with path.open("w") as file:
        for step in range(order.steps):
            tokens.append(order.tokens(step))
            for (row,) in order.step(step):
                ids, labels = prepared.train.row(row)
                file.write(json.dumps({"input_ids": ids.tolist(), "labels": labels.tolist()}) + "\n")
    return path, tokens


def compile_ours() -> None:
    """Bytecode of shardwise's modules, as pip made that of its peers' packages."""
    compileall.compile_dir(HERE.parent / "src", quiet=2)


def recipe_text(args: argparse.Namespace, case: Case, folder: Path) -> str:
    return f"""\
model: {args.model}
data:
  train: {CACHE / "rows" / case.data}.jsonl
  sequence_length: {case.sequence_length}
  packing: false
  validation: 0
method: {case.method}
lora: {{rank: {args.rank}, alpha: {2 * args.rank}}}
optimizer: {{learning_rate: {args.learning_rate}, weight_decay: 0.0, max_grad_norm: 1.0}}
schedule: {{name: constant, warmup: 0}}
training:
  max_steps: {args.steps}
  global_batch_size: {case.batch}
  micro_batch_size: {case.batch}
  precision: bf16
  activation_checkpointing: none
  seed: {args.seed}
engine: single
evaluation: {{every_steps: 0, samples: 0}}
checkpoint: {{every_steps: 0}}
run: {{folder: {folder}/runs}}
"""


def run_shardwise(args: argparse.Namespace, case: Case, folder: Path) -> dict:
    """The product's own command; its events and summary hold the numbers."""
    recipe = folder / "recipe.yaml"
    recipe.write_text(recipe_text(args, case, folder))
    began = time.time()
    command = [sys.executable, "-m", "shardwise.cli.main", "train", str(recipe)]
    done = subprocess.run(command, env=threads(args), capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    run = max((folder / "runs").iterdir(), key=lambda p: p.stat().st_mtime)
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    steps = [e for e in events if e["kind"] == "step"]
    summary = json.loads((run / "summary.json").read_text())
    return {
        "step_seconds": [e["seconds"] for e in steps],
        "step_cpu_seconds": [e["cpu_seconds"] for e in steps],
        "losses": [e["loss"] for e in steps],
        "first_step_began_seconds": steps[0]["time"] - steps[0]["seconds"] - began,
        "first_step_seconds": steps[0]["time"] - began,
        "peak_resident_bytes": summary["measured"]["peak_resident_bytes"],
        "versions": summary["versions"],
    }


def run_peer(args: argparse.Namespace, peer: str, case: Case, rows: Path, folder: Path) -> dict:
    """`peer.py` in the peer's environment."""
    job = {
        "peer": peer,
        "model": args.model,
        "rows": str(rows),
        "cache": str(CACHE),
        "method": case.method,
        "steps": args.steps,
        "batch": case.batch,
        "learning_rate": args.learning_rate,
        "rank": args.rank,
        "seed": args.seed,
        "threads": args.threads,
        "command_time": time.time(),
    }
    (folder / "job.json").write_text(json.dumps(job))
    result = folder / "result.json"
    result.unlink(missing_ok=True)
    python = environment(*PEERS[peer])
    command = [str(python), str(HERE / "peer.py"), str(folder / "job.json"), str(result)]
    done = subprocess.run(command, env=threads(args), cwd=folder, capture_output=True, text=True)
    if not result.exists():
        raise RuntimeError(done.stderr[-2000:])
    return json.loads(result.read_text())


def threads(args: argparse.Namespace) -> dict[str, str]:
    return {
        **os.environ,
        "OMP_NUM_THREADS": str(args.threads),
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }


def children_seconds() -> float:
    """Processor seconds of all commands run so far."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def one_run(
    args: argparse.Namespace, case: Case, peer: str, rows: Path, tokens: list[int], folder: Path
) -> dict:
    """One trainer once: what is recorded, with `error` instead of numbers where it failed."""
    load, used, began = os.getloadavg()[0], children_seconds(), time.time()
    try:
        got = run_shardwise(args, case, folder) if peer == OURS else run_peer(args, peer, case, rows, folder)
    except RuntimeError as problem:
        lines = [line for line in str(problem).strip().splitlines() if line.strip()]
        got = {"error": "\n".join(lines[-6:])}
    else:
        tokens = got["step_tokens"] if peer == "trl-packing" else tokens
        count = min(len(got["step_seconds"]), len(tokens))
        real = sum(tokens[1:count])
        got["tokens_per_second"] = real / sum(got["step_seconds"][1:count])
        got["tokens_per_cpu_second"] = real / sum(got["step_cpu_seconds"][1:count])
    return {
        **got,
        "load": load,
        "command_cpu_seconds": children_seconds() - used,
        "command_seconds": time.time() - began,
        "time": time.strftime("%Y-%m-%d %H:%M:%S"),
    }


def save(path: Path, record: dict) -> None:
    part = path.with_suffix(".part")
    part.write_text(json.dumps(record, indent=1) + "\n")
    part.replace(path)


def compare(args: argparse.Namespace, record: dict) -> None:
    """Every run that is not in `record` yet, round by round; each round begins with another trainer."""
    deadline = time.time() + args.seconds
    names = [OURS, *args.peers]
    for round_ in range(1, args.rounds + 1):
        for case in args.cases:
            order = names[(round_ - 1) % len(names) :] + names[: (round_ - 1) % len(names)]
            done = {r["peer"] for r in record["runs"] if (r["case"], r["round"]) == (case.name, round_)}
            broken = {r["peer"] for r in record["runs"] if r["case"] == case.name and "error" in r}
            todo = [p for p in order if p not in done | (set() if args.retry else broken)]
            if not todo:
                continue
            with tempfile.TemporaryDirectory() as folder:
                rows, tokens = rows_in_order(args, case, Path(folder))
                record["cases"][case.name] = {
                    "method": case.method,
                    "data": case.data,
                    "sequence_length": case.sequence_length,
                    "batch": case.batch,
                    "tokens": tokens,
                }
                for peer in todo:
                    earlier = [
                        r["command_seconds"]
                        for r in record["runs"]
                        if r["case"] == case.name and r["peer"] == peer
                    ]
                    if time.time() + max(earlier, default=0.0) > deadline:
                        print(f"stopped for time before {case.name}, {peer}", file=sys.stderr)
                        return
                    got = one_run(args, case, peer, rows, tokens, Path(folder))
                    if args.retry:
                        record["runs"] = [
                            r for r in record["runs"]
                            if not ("error" in r and (r["case"], r["peer"]) == (case.name, peer))
                        ]  # fmt: skip
                    record["runs"].append({"case": case.name, "round": round_, "peer": peer, **got})
                    save(args.record, record)
                    tell(case, round_, peer, got)


def tell(case: Case, round_: int, peer: str, got: dict) -> None:
    what = f"round {round_} {case.name} {peer}: "
    if "error" in got:
        what += f"failed after {got['command_seconds']:.0f} s: {got['error'].splitlines()[-1][:200]}"
    else:
        what += (
            f"{got['tokens_per_second']:.1f} tokens/s, {got['tokens_per_cpu_second']:.1f} per processor second, "
            f"first step after {got['first_step_seconds']:.1f} s, {got['peak_resident_bytes'] / 2**30:.2f} GiB, "
            f"loss {got['losses'][-1]:.4f}, {got['command_seconds']:.0f} s in all (load {got['load']:.1f})"
        )
    print(what, file=sys.stderr, flush=True)


def opened(args: argparse.Namespace) -> dict:
    """The record to go on with. Refuses one of other settings: its rounds would not be comparable."""
    settings = {
        "steps": args.steps,
        "rank": args.rank,
        "learning_rate": args.learning_rate,
        "seed": args.seed,
        "threads": args.threads,
    }
    if args.record.exists():
        record = json.loads(args.record.read_text())
        if record["settings"] != settings:
            raise SystemExit(f"{args.record} was made with {record['settings']}: give another --record")
        return record
    weights = sum(f.stat().st_size for f in Path(args.model).glob("*.safetensors"))
    return {
        "kind": "peers",
        "date": date.today().isoformat(),
        "processor": table.processor(),
        "cores": os.cpu_count(),
        "platform": platform.platform(),
        "torch": torch_version(),
        "model": Path(args.model).name,
        "weights_bytes": weights,
        "settings": settings,
        "cases": {},
        "runs": [],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a model folder; default: SmolLM2 as `shardwise demo` makes it")
    parser.add_argument("--record", type=Path, help="default: measurements/peers-DATE-THREADS-threads.json")
    parser.add_argument("--peers", nargs="*", default=list(PEERS), choices=list(PEERS))
    parser.add_argument("--methods", nargs="*", default=["lora", "full"], choices=["lora", "full"])
    parser.add_argument("--data", nargs="*", default=["mixed", "long"], choices=["mixed", "long"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5, help="optimizer steps; rates leave out the first")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=2e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument(
        "--seconds", type=float, default=1e9, help="start no run that would end after so many"
    )
    parser.add_argument("--retry", action="store_true", help="run again what failed before")
    parser.add_argument(
        "--table", action="store_true", help="write the record's table into the docs, run nothing"
    )
    args = parser.parse_args()
    if args.record is None:
        name = f"peers-{date.today().isoformat()}-{args.threads}-threads.json"
        args.record = HERE.parent / "measurements" / name
    if args.table:
        table.write(json.loads(args.record.read_text()), args.record)
        return
    if args.model is None:
        from shardwise.cli.demo import demo_model

        args.model = demo_model()
    args.model = str(Path(args.model).resolve())
    benchmark_rows.write(CACHE / "rows")
    compile_ours()
    shapes = {"mixed": (512, 4), "long": (2048, 1)}
    args.cases = [Case(method, data, *shapes[data]) for data in args.data for method in args.methods]
    record = opened(args)
    compare(args, record)
    print(table.text(record))


if __name__ == "__main__":
    main()
