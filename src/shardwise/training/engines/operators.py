"""DeepSpeed's operators inside a rank: load finished libraries, so that nothing is compiled or waited for.

`python -m shardwise.training.engines.operators NAME` compiles one; only `shardwise.launch.operators` calls it.
"""

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

BUILDERS = {
    "shm_comm": "ShareMemCommBuilder",
    "cpu_adam": "CPUAdamBuilder",
    "pin_memory": "PinMemoryBuilder",
    "async_io": "AsyncIOBuilder",
}


def preload() -> None:
    """Hand DeepSpeed every library of TORCH_EXTENSIONS_DIR that is finished.

    Otherwise each rank runs ninja under torch's lock file to find that there is nothing to do, and a rank that
    is killed at that moment leaves a lock on which the next run waits forever.
    """
    folder = os.environ.get("TORCH_EXTENSIONS_DIR")
    if not folder:
        return
    for name in BUILDERS:
        builder = _builder(name)
        if builder is None:
            continue
        library = Path(folder) / builder.name / f"{builder.name}.so"
        if library.is_file() and builder.name not in builder._loaded_ops:
            builder._loaded_ops[builder.name] = _import(builder.name, library)


def _builder(name: str) -> Any:
    from deepspeed.accelerator import get_accelerator

    return get_accelerator().create_op_builder(BUILDERS[name])


def _import(name: str, library: Path) -> Any:
    if name == "async_io":  # its symbols come from pin_memory, which this makes visible
        _builder("pin_memory").load(verbose=False)
    spec = importlib.util.spec_from_file_location(name, library)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    _builder(sys.argv[1]).load(verbose=True)
