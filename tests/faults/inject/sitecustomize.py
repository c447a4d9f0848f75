"""Causes a fault inside a real rank: FAULT="KIND:RANK:STEP", once (a file marks that it has happened).

Python imports this module by itself at start where its folder is on PYTHONPATH. It hangs on to the watch's
beats, which come in every part of a step, so that faults strike in the middle of one.
"""

import importlib.abc
import importlib.util
import os
import signal
import sys
import time
from typing import Any

kind, rank, step = (os.environ.get("FAULT") or "none:0:0").split(":")
WATCH, MODEL = "shardwise.training.watch", "shardwise.training.model"
poison = False


def strike() -> None:
    global poison
    marker = os.environ["FAULT_MARKER"]
    if os.path.exists(marker):
        return
    with open(marker, "w") as file:
        file.write(str(time.time()))
    if kind == "raise":
        raise ValueError("a bad row")
    if kind == "nan":
        poison = True
    number = {
        "kill": signal.SIGKILL,
        "freeze": signal.SIGSTOP,
        "term": signal.SIGTERM,
        "usr1": signal.SIGUSR1,
    }
    if kind in number:
        os.kill(os.getpid(), number[kind])
    if kind == "sleep":
        time.sleep(3600)


def change_watch(module: Any) -> None:
    before = module.Watch.beat

    def beat(self: Any, now: int, phase: str, limit_seconds: float | None = None) -> None:
        before(self, now, phase, limit_seconds)
        if phase == "backward" and now == int(step) and os.environ.get("RANK") == rank:
            strike()

    module.Watch.beat = beat


def change_model(module: Any) -> None:
    before = module.LossModel.forward

    def forward(self: Any, batch: Any) -> Any:
        loss = before(self, batch)
        now = os.environ.get("FAULT_NAN_CALL")
        self.calls = getattr(self, "calls", 0) + int(self.training)
        poisoned = kind == "nan" and os.environ.get("RANK") == rank and now and self.calls == int(now)
        return loss * float("nan") if poisoned else loss

    module.LossModel.forward = forward


CHANGES = {WATCH: change_watch, MODEL: change_model}


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


if os.environ.get("FAULT"):
    sys.meta_path.insert(0, Finder())
