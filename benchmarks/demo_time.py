"""Is the demo's time estimated before it runs? `python benchmarks/demo_time.py [--steps N] [--write FILE]`.

In an empty cache (the converted model is taken over): `shardwise demo` by data sheets alone, then `shardwise
calibrate` and the demo twice more, so that the last estimate also knows the run before. Printed is each estimate
against what the run took. Leave the machine alone while it runs.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from datetime import date
from importlib.metadata import version
from pathlib import Path

from shardwise.data import default_cache


def command(*words: str, folder: Path, cache: Path) -> None:
    environment = {**os.environ, "SHARDWISE_CACHE": str(cache)}
    line = [sys.executable, "-m", "shardwise.cli.main", *words]
    subprocess.run(line, cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)


def demo(name: str, steps: int, folder: Path, cache: Path) -> dict[str, object]:
    began = os.getloadavg()[0]
    command("demo", "--steps", str(steps), "--folder", name, folder=folder, cache=cache)
    run = next((folder / name / "runs").iterdir())
    summary = json.loads((run / "summary.json").read_text())
    estimated, measured = summary["estimate"]["seconds"], summary["measured"]["training_seconds"]
    row = {
        "estimate": name,
        "estimated_seconds": estimated,
        "measured_seconds": measured,
        "load_before": began,
    }
    print(
        f"{name:12} estimated {estimated:6.1f} s, measured {measured:6.1f} s: {estimated / measured - 1:+.1%}"
    )
    return row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--write", type=Path)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        cache = folder / "cache"
        cache.mkdir()
        (cache / "models").symlink_to(default_cache() / "models", target_is_directory=True)
        rows = [demo("data-sheets", asked.steps, folder, cache)]
        (cache / "finished-runs.jsonl").unlink(missing_ok=True)
        command("calibrate", folder=folder, cache=cache)
        rows.append(demo("calibrated", asked.steps, folder, cache))
        rows.append(demo("one-run-more", asked.steps, folder, cache))
    if asked.write:
        record = {
            "kind": "demo_time",
            "date": date.today().isoformat(),
            "platform": platform.platform(),
            "cores": os.cpu_count(),
            "versions": {name: version(name) for name in ("torch", "transformers", "peft")},
            "steps": asked.steps,
            "rows": rows,
        }
        asked.write.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
