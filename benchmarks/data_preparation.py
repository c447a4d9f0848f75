"""How fast rows are prepared and packed, and that memory does not grow with their number.

    python benchmarks/data_preparation.py MODEL_FOLDER [ROWS] [--json FILE]

Writes ROWS synthetic chats (lognormal lengths, median about 230 tokens), prepares a quarter of them and then all
of them in fresh processes, then streams the same two files once, and prints rows per second, CPU seconds and the
peak resident set of each.
"""

import argparse
import json
import os
import platform
import random
import resource
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path

WORDS = [
    "the",
    "a",
    "of",
    "to",
    "and",
    "in",
    "that",
    "it",
    "is",
    "was",
    "for",
    "on",
    "are",
    "with",
    "as",
    "they",
    "be",
    "at",
    "one",
    "have",
    "this",
    "from",
    "or",
    "had",
    "by",
    "hot",
    "but",
    "some",
    "what",
    "there",
    "we",
    "can",
    "out",
    "other",
    "were",
    "all",
    "your",
    "when",
    "up",
    "use",
    "word",
    "how",
    "said",
    "an",
    "each",
    "she",
    "which",
    "do",
    "their",
    "time",
    "if",
    "will",
    "way",
    "about",
    "many",
    "then",
    "them",
    "would",
    "write",
    "like",
    "so",
    "these",
    "her",
    "long",
    "make",
    "thing",
    "see",
    "him",
    "two",
    "has",
    "look",
    "more",
    "day",
    "could",
    "go",
    "come",
    "did",
    "my",
    "sound",
    "no",
    "most",
    "number",
    "who",
    "over",
    "know",
    "water",
    "than",
    "call",
    "first",
    "people",
    "may",
    "down",
    "side",
    "been",
    "now",
    "find",
    "any",
    "new",
]


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


def stream_once(model: str, path: str, rows: str) -> None:
    """As `prepare_once`, without keeping anything: as many rows, as one rank of a run would get them."""
    from shardwise.data import prepare  # noqa: PLC0415
    from shardwise.data.stream_reader import StreamReader  # noqa: PLC0415
    from shardwise.recipe import parse_recipe  # noqa: PLC0415

    data = {"train": path, "sequence_length": 2048, "streaming": True}
    tree = {"model": "x", "data": data, "training": {"max_steps": 10**6}}
    spec = prepare(parse_recipe(json.dumps(tree)).data, model).stream
    assert spec is not None
    started = time.perf_counter()
    reader = StreamReader(spec, 8)
    step = sequences = tokens = 0
    while reader.account(step)[1] < int(rows):
        for block, one in reader.sequences(step):
            sequences, tokens = sequences + 1, tokens + int(block.rows.lengths[list(one)].sum())
        step += 1
    reader.close()
    usage = resource.getrusage(resource.RUSAGE_SELF)
    print(
        json.dumps(
            {
                "rows": reader.account(step)[1],
                "tokens": tokens,
                "seconds": time.perf_counter() - started,
                "efficiency": tokens / (sequences * 2048),
                "cpu_seconds": usage.ru_utime + usage.ru_stime,
                "peak_resident_bytes": usage.ru_maxrss * 1024,
            }
        )
    )


def main() -> None:
    if sys.argv[1] == "--once":
        prepare_once(*sys.argv[2:5])
        return
    if sys.argv[1] == "--stream":
        stream_once(*sys.argv[2:5])
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("rows", type=int, nargs="?", default=100_000)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    model, rows = given.model, given.rows
    results: dict[str, list[dict[str, float]]] = {"prepared": [], "streamed": []}
    with tempfile.TemporaryDirectory() as folder:
        for count in (rows // 4, rows):
            path = Path(folder) / f"{count}.jsonl"
            write_rows(path, count)
            command = [sys.executable, __file__, "--once", model, str(path), f"{folder}/cache"]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            found = json.loads(done.stdout.splitlines()[-1])
            results["prepared"].append(found)
            print(
                f"{found['rows']:,} rows, {found['tokens']:,} tokens: {found['seconds']:.1f} s "
                f"({found['rows'] / found['seconds']:,.0f} rows/s), {found['cpu_seconds']:.1f} CPU s, "
                f"peak resident set {found['peak_resident_bytes'] / 2**20:.0f} MiB of one process; "
                f"again from the cache {found['again_seconds']:.2f} s; "
                f"packing {found['pack_seconds']:.2f} s, {found['efficiency']:.1%} full",
                flush=True,
            )
            command = [sys.executable, __file__, "--stream", model, str(path), str(count)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            found = json.loads(done.stdout.splitlines()[-1])
            results["streamed"].append(found)
            print(
                f"streamed: {found['rows']:,} rows, {found['tokens']:,} tokens: {found['seconds']:.1f} s, "
                f"{found['cpu_seconds']:.1f} CPU s, peak resident set "
                f"{found['peak_resident_bytes'] / 2**20:.0f} MiB, sequences {found['efficiency']:.1%} full",
                flush=True,
            )
    if given.json:
        versions = {name: metadata.version(name) for name in ("tokenizers", "transformers", "numpy")}
        facts = {"machine": platform.processor() or platform.machine(), "cores": os.cpu_count(), **versions}
        given.json.write_text(
            json.dumps({"facts": facts, "model": Path(model).name, **results}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
