"""Causes a fault inside a real rank: FAULT="KIND:RANK:STEP[:PHASE]", once (a file marks that it has happened).

Python imports this module by itself at start where its folder is on PYTHONPATH. It hangs on to the watch's
beats, which come in every part of a step, so that faults strike in the middle of one.

kill, freeze, term, usr1    a signal, at this beat
sleep, raise                never go on; an exception
nan, nan_gradient           the loss, or only its gradient, is NaN for one micro-batch of this step, each time
kills:RANK:COUNT            SIGKILL at COUNT random moments of saves, of rank 0 and 1 in turn, over all restarts
slow_save:RANK:SECONDS      every save takes that long
worker:RANK:0               every rank starts a process of its own, as data loaders do
fill:RANK:STEP              the disk of the run folder fills up, but for 64 KiB
"""

import importlib.abc
import importlib.util
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

kind, rank, step, phase = (f"{os.environ.get('FAULT') or 'none:0:0'}:backward".split(":"))[:4]
WATCH, MODEL, SAVE = (
    "shardwise.training.watch",
    "shardwise.training.model",
    "shardwise.training.checkpoint.save",
)
SIGNALS = {"kill": signal.SIGKILL, "freeze": signal.SIGSTOP, "term": signal.SIGTERM, "usr1": signal.SIGUSR1}
STRIKES = {*SIGNALS, "raise", "sleep", "fill"}  # what happens once
MINE = os.environ.get("RANK", "0") == rank
now = 0  # the step that this rank is in
saves = 0


def strike() -> None:
    """What happens once, to one rank."""
    marker = Path(os.environ["FAULT_MARKER"])
    if marker.exists():
        return
    marker.write_text(str(time.time()))
    if kind == "raise":
        raise ValueError("a bad row")
    if kind == "fill":
        with (Path(sys.argv[1]) / "filler").open("wb", buffering=0) as file:
            try:
                while file.write(b"0" * 4096):
                    pass
            except OSError:
                file.truncate(max(0, file.tell() - 2**16))  # some room for events, none for a checkpoint
    if kind in SIGNALS:
        os.kill(os.getpid(), SIGNALS[kind])
    if kind == "sleep":
        time.sleep(3600)


def kill_in_a_save() -> None:
    """One of many: which one it is, is counted by files, so that it goes on over restarts."""
    global saves
    saves += 1
    marker = Path(os.environ["FAULT_MARKER"])
    marker.mkdir(exist_ok=True)
    number = len(list(marker.iterdir()))
    draw = random.Random(number)
    if number >= int(step) or os.environ.get("RANK") != str(number % 2) or saves < draw.randint(2, 4):
        return

    def end() -> None:
        (marker / str(number)).touch()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Timer(draw.uniform(0.0, float(os.environ.get("FAULT_WITHIN", "0.05"))), end).start()


def change_watch(module: Any) -> None:
    before = module.Watch.beat

    def beat(self: Any, at: int, part: str, limit_seconds: float | None = None) -> None:
        global now
        now = at or now
        before(self, at, part, limit_seconds)
        if kind == "worker" and part == "start":
            subprocess.Popen(["sleep", "600"])
        if kind == "kills" and part == "saving":
            kill_in_a_save()
        if kind in STRIKES and MINE and part == phase and at == int(step):
            strike()

    module.Watch.beat = beat


def change_model(module: Any) -> None:
    import torch

    before = module.LossModel.forward
    poisoned: list[Any] = []

    class Poison(torch.autograd.Function):
        @staticmethod
        def forward(_: Any, loss: Any) -> Any:
            return loss.clone()

        @staticmethod
        def backward(_: Any, grad: Any) -> Any:
            return grad * float("nan")

    def forward(self: Any, batch: Any) -> Any:
        loss = before(self, batch)
        if not (self.training and MINE and kind in ("nan", "nan_gradient")):
            return loss
        if not poisoned and now == int(step):
            poisoned.append(batch.input_ids.clone())
            Path(os.environ["FAULT_MARKER"]).write_text(str(time.time()))
        if now == int(step) and any(torch.equal(batch.input_ids, p) for p in poisoned):
            return loss * float("nan") if kind == "nan" else Poison.apply(loss)
        return loss

    module.LossModel.forward = forward


def change_save(module: Any) -> None:
    before = module._write

    def write(*arguments: Any) -> Any:
        note = before(*arguments)
        if kind == "slow_save":
            time.sleep(float(step))
        return note

    module._write = write


CHANGES = {WATCH: change_watch, MODEL: change_model, SAVE: change_save}


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name not in CHANGES:
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)
        assert spec is not None and spec.loader is not None
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            CHANGES[name](module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if os.environ.get("FAULT") and "RANK" in os.environ:
    sys.meta_path.insert(0, Finder())
