"""Where in the source a tensor is born: the innermost line that is not torch's own, and the module that ran."""

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from shardwise.training.trace.storages import Place

_TORCH = re.compile(r"/torch/(?!distributed/fsdp/|optim/)|/contextlib\.py$|/kernels/install\.py$|<")
_OWN = "/training/trace/"
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
_DEEPEST = 80  # frames looked at


@contextmanager
def places(module: nn.Module) -> Iterator[Callable[[], Place]]:
    """A function that says where it was called from, in words of `module`'s parts.

    Running modules are followed by hooks: looking into frames would keep their variables alive.
    """
    names = {id(part): _NUMBER.sub("*", name) for name, part in module.named_modules()}
    sources: dict[tuple[str, int], str | None] = {}
    running: list[str] = []

    def begin(part: nn.Module, _: Any) -> None:
        running.append(names.get(id(part), ""))

    def end(*_: Any) -> None:
        running.pop()

    def here() -> Place:
        frame: FrameType | None = sys._getframe(2)
        for _ in range(_DEEPEST):
            if frame is None:
                break
            key = (frame.f_code.co_filename, frame.f_lineno)
            if key not in sources:
                sources[key] = _source(*key)
            source = sources[key]
            if source is not None:
                return Place(source, running[-1] if running else "")
            frame = frame.f_back
        return Place("", running[-1] if running else "")

    handles = (
        register_module_forward_pre_hook(begin),
        register_module_forward_hook(end, always_call=True),
    )
    try:
        yield here
    finally:
        for handle in handles:
            handle.remove()


def _source(file: str, line: int) -> str | None:
    """ "package/path.py:line" of a file worth naming; None for torch's machinery and the recorder itself."""
    if _OWN in file or _TORCH.search(file):
        return None
    short = file.rsplit("/site-packages/", 1)[-1]
    if "/shardwise/" in short:
        short = "shardwise/" + short.rsplit("/shardwise/", 1)[-1]
    return f"{short}:{line}"
