"""How runs with faults are started and looked at."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from safetensors.torch import load_file

from shardwise.runs import RunFolder
from shardwise.runs.records import Step

INJECT = Path(__file__).parent / "inject"
PATIENCE = float(os.environ.get("SHARDWISE_TEST_PATIENCE", "1"))  # for machines with other work to do
ENGINES = {
    "fsdp2": ("engine.name=fsdp2",),
    "zero3": ("engine.name=deepspeed", "engine.deepspeed.zero_stage=3"),
}
COMMAND = [sys.executable, "-m", "shardwise.cli.main", "train"]
RECIPE = """
model: {model}
data: {{train: {data}, validation: 4, sequence_length: 64}}
method: full
optimizer: {{learning_rate: 1e-3}}
training: {{max_steps: 12, global_batch_size: 4, micro_batch_size: 1, precision: fp32}}
engine: {{name: fsdp2, device: cpu, processes: 2}}
evaluation: {{every_steps: 0}}
checkpoint: {{every_steps: 4, keep: 2, hang_seconds: 3}}
run: {{folder: {runs}}}
"""


@dataclass(frozen=True)
class Ended:
    run: RunFolder
    code: int
    text: str
    struck_unix_seconds: float | None  # when the fault happened

    @property
    def losses(self) -> list[float]:
        return [step.loss for step in self.run.history(Step)]

    def weights(self) -> dict[str, Any]:
        return load_file(self.run.model_path / "model.safetensors")


@dataclass(frozen=True)
class Going:
    """A run that has been started, to be disturbed from outside."""

    run: RunFolder
    process: "subprocess.Popen[str]"
    output: Path

    def after_step(self, step: int, seconds: float = 120.0) -> None:
        """Wait until a step has been made."""
        end = time.monotonic() + seconds * PATIENCE
        while time.monotonic() < end and self.process.poll() is None:
            if any(e.step >= step for e in self.run.events("step")):  # type: ignore[attr-defined]
                return
            time.sleep(0.02)
        raise AssertionError(f"step {step} did not come:\n{self.output.read_text()[-2000:]}")

    def ranks(self) -> list[int]:
        """Process ids by rank."""
        found = {}
        for child in psutil.Process(self.process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):  # some live only for a moment
                if "-m shardwise.training " in " ".join(child.cmdline()):
                    found.setdefault(int(child.environ().get("RANK", 0)), child.pid)  # not what it forks
        return [found[rank] for rank in sorted(found)]

    def everyone(self) -> list[int]:
        """The launcher, the ranks and whatever they started."""
        own = psutil.Process(self.process.pid)
        return [own.pid, *(c.pid for c in own.children(recursive=True))]

    def end(self, seconds: float = 90.0) -> Ended:
        code = self.process.wait(seconds * PATIENCE)
        return Ended(self.run, code, self.output.read_text(), None)


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all((a[key] == b[key]).all() for key in a)


class Train:
    """Runs in one folder with one recipe. Settings with a '=' are --set, others --accept."""

    def __init__(self, root: Path, model: Path, data: Path) -> None:
        self.root, self.runs = root, root / "runs"
        (root / "recipe.yaml").write_text(RECIPE.format(model=model, data=data, runs=self.runs))

    def __call__(self, name: str, fault: str = "", timeout: float = 280, **options: Any) -> Ended:
        going = self.start(name, fault, **options)
        going.process.wait(timeout * PATIENCE)
        struck = None
        if self.marker(name).is_file():
            struck = float(self.marker(name).read_text())
        return Ended(going.run, going.process.returncode, going.output.read_text(), struck)

    def marker(self, name: str) -> Path:
        return self.root / f"{name}.struck"

    def start(
        self,
        name: str,
        fault: str = "",
        *,
        resume: bool = False,
        engine: str | None = None,
        settings: Sequence[str] = (),
        folder: Path | None = None,
        **env: str,
    ) -> Going:
        run = RunFolder((folder or self.runs) / name)
        what = ["--resume", run.path] if resume else [self.root / "recipe.yaml", "--set", f"run.name={name}"]
        more = [
            *(ENGINES[engine] if engine else ()),
            *([f"run.folder={folder}"] if folder else []),
            *settings,
        ]
        for setting in more:
            what += ["--set" if "=" in setting else "--accept", setting]
        output = self.root / f"{name}{'-again' if resume else ''}.out"
        with output.open("w") as file:
            process = subprocess.Popen(
                [*COMMAND, *map(str, what)],
                stdout=file,
                stderr=file,
                text=True,
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(
                        [str(INJECT), *filter(None, [os.environ.get("PYTHONPATH")])]
                    ),
                    "FAULT": fault,
                    "FAULT_MARKER": str(self.marker(name)),
                    "OMP_NUM_THREADS": "1",
                    **env,
                },
            )
        return Going(run, process, output)


trainer: Callable[[Path, Path, Path], Train] = Train


def record(name: str, value: Any) -> None:
    """Keep numbers of a long proof: one file per name in the folder SHARDWISE_TEST_RECORDS."""
    folder = os.environ.get("SHARDWISE_TEST_RECORDS")
    if folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / f"{name}.json").write_text(json.dumps(value, indent=1))
