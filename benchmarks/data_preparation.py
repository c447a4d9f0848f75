"""How fast rows are prepared and packed, and that memory does not grow with their number.

    python benchmarks/data_preparation.py MODEL_FOLDER [ROWS]

Writes ROWS synthetic chats (lognormal lengths, median about 230 tokens), prepares a quarter of them and then all
of them in fresh processes, and prints rows per second, CPU seconds and the peak resident set of each.
"""

import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

WORDS = (
    "the a of to and in that it is was for on are with as they be at one have this from or had by hot but some what "
    "there we can out other were all your when up use word how said an each she which do their time if will way "
    "about many then them would write like so these her long make thing see him two has look more day could go come "
    "did my sound no most number who over know water than call first people may down side been now find any new"
).split()


def write_rows(path: Path, rows: int) -> None:
    """Chats of one or two exchanges."""
    random_ = random.Random(0)
    with path.open("w", encoding="utf-8") as out:
        for _ in range(rows):
            words = int(random_.lognormvariate(4.6, 0.8)) + 1
            messages = []
            for _ in range(random_.choice((1, 1, 1, 2))):
                for role, count in (("user", words // 3 + 1), ("assistant", words)):
                    messages.append({"role": role, "content": " ".join(random_.choices(WORDS, k=count))})
            out.write(json.dumps({"messages": messages}) + "\n")


def prepare_once(model: str, path: str, cache: str) -> None:
    """Runs in a process of its own; prints one JSON line."""
    from shardwise.data import make_order, prepare  # noqa: PLC0415
    from shardwise.recipe import parse_recipe  # noqa: PLC0415

    data = parse_recipe(json.dumps({"model": "x", "data": {"train": path, "sequence_length": 2048}})).data
    started = time.perf_counter()
    prepared = prepare(data, model, cache=Path(cache))
    seconds = time.perf_counter() - started
    started = time.perf_counter()
    order = make_order(prepared.train, sequence_length=2048, packing=True, global_batch_size=8, epochs=1)
    packed = time.perf_counter() - started
    started = time.perf_counter()
    prepare(data, model, cache=Path(cache))
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    print(
        json.dumps(
            {
                "rows": prepared.report.rows_read,
                "tokens": prepared.report.tokens,
                "seconds": seconds,
                "again_seconds": time.perf_counter() - started,
                "pack_seconds": packed,
                "efficiency": order.efficiency,
                "cpu_seconds": sum(u.ru_utime + u.ru_stime for u in usage),
                "peak_resident_bytes": max(u.ru_maxrss for u in usage) * 1024,
            }
        )
    )


def main() -> None:
    if sys.argv[1] == "--once":
        prepare_once(*sys.argv[2:5])
        return
    model, rows = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 100_000
    with tempfile.TemporaryDirectory() as folder:
        for count in (rows // 4, rows):
            path = Path(folder) / f"{count}.jsonl"
            write_rows(path, count)
            command = [sys.executable, __file__, "--once", model, str(path), f"{folder}/cache"]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            found = json.loads(done.stdout.splitlines()[-1])
            print(
                f"{found['rows']:,} rows, {found['tokens']:,} tokens: {found['seconds']:.1f} s "
                f"({found['rows'] / found['seconds']:,.0f} rows/s), {found['cpu_seconds']:.1f} CPU s, "
                f"peak resident set {found['peak_resident_bytes'] / 2**20:.0f} MiB of one process; "
                f"again from the cache {found['again_seconds']:.2f} s; "
                f"packing {found['pack_seconds']:.2f} s, {found['efficiency']:.1%} full"
            )


if __name__ == "__main__":
    main()
