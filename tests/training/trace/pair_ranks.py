"""One of two real ranks: `python pair_ranks.py FOLDER`, started by `test_pairs.py`.

All runs go through the same pair of processes, one after the other, so that torch and DeepSpeed are imported once.
Each rank writes FOLDER/rank-N.json: run -> phase -> bytes of live tensors at their highest, or the traceback.
"""

import gc
import json
import os
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pairs import DOCUMENTS, PAIRS, Pair, make_model, small_buckets

from shardwise.runs import RunFolder
from shardwise.training import leave
from shardwise.training.build import build_engine
from shardwise.training.checkpoint.save import take
from shardwise.training.engines import ddp
from shardwise.training.engines.protocol import Engine, Ranks
from shardwise.training.model import ModelFolder
from shardwise.training.trace.step import micro_batch
from shardwise.training.trace.storages import Peak, StorageLog

STEPS = 3  # optimizer states are made in the first; of the others each phase's lowest peak counts


class Log(StorageLog):
    """Gives gloo's threads time to let go of a collective's tensors, which on a GPU its queue does."""

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        if func.namespace == "c10d":
            time.sleep(0.002)
        return result


def batch(vocabulary: int) -> Any:
    made = micro_batch(DOCUMENTS)
    made.input_ids.random_(0, vocabulary)
    made.targets.random_(0, vocabulary)
    made.positions.copy_(torch.arange(len(made.positions)))
    made.position_ids.copy_(torch.cat([torch.arange(n) for n in DOCUMENTS])[None])
    return made


def step(engine: Engine, log: StorageLog, pair: Pair, vocabulary: int) -> None:
    scale = 1 / (2 * pair.accumulation * sum(n - 1 for n in DOCUMENTS))
    for i in range(pair.accumulation):
        log.enter("forward")
        loss = engine.forward(batch(vocabulary))
        log.enter("backward")
        engine.backward(loss, scale, last=i == pair.accumulation - 1)
        del loss
    settle()
    classify(log, engine)
    log.enter("step")
    engine.step(1e-4, 1.0)
    classify(log, engine)


def waited(hook: Any) -> Any:
    """DDP's communication hook that ends when the bucket is reduced, as it does for whoever comes next on a GPU."""

    def reduce(engine: Any, state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        future: torch.futures.Future[torch.Tensor] = hook(engine, state, bucket)
        future.wait()
        return future

    return reduce


def others(engine: Engine, log: StorageLog, vocabulary: int) -> None:
    """A batch of an evaluation, and what a save in the background takes, as the training loop does them."""
    log.enter("evaluation")
    engine.module.eval()
    engine.module.on_loss = lambda: None
    with torch.no_grad():
        float(engine.forward(batch(vocabulary)).double())
    engine.module.train()
    settle()
    log.enter("save")
    run = RunFolder(Path(os.environ["RUN"]))
    taken = take(run, engine, 2, {}, keep=1, copy=True)
    assert taken.copied
    log.enter("after")


def settle() -> None:
    """Gloo's threads hold a collective's tensors until they come to run again; a GPU's streams do not."""
    dist.barrier()
    time.sleep(0.01)


def classify(log: StorageLog, engine: Engine) -> None:
    for term, tensors in engine.tensors().items():
        log.classify(tensors, term)


def measure(pair: Pair, folder: Path, ranks: Ranks) -> dict[str, Any]:
    recipe = pair.recipe(folder)
    source = ModelFolder(folder, recipe)
    log = Log(device="cpu")
    with log:
        engine = build_engine(recipe, source, torch.device("cpu"), ranks, pair.accumulation)
        classify(log, engine)
        engine.module.on_loss = lambda: log.enter("loss")
        vocabulary = source.config().vocab_size
        lowest: dict[str, Peak] = {}
        for number in range(2 if pair.real else STEPS):
            gc.collect()
            log.restart()
            step(engine, log, pair, vocabulary)
            if number:
                for phase, peak in log.peaks().items():
                    lowest[phase] = min(lowest.get(phase, peak), peak, key=lambda p: p.bytes)
        settle()
        log.restart()
        others(engine, log, vocabulary)
        lowest |= {phase: log.peaks()[phase] for phase in ("evaluation", "save")}
    engine.close()
    return {phase: {"bytes": peak.bytes, "terms": peak.terms} for phase, peak in lowest.items()}


def main(words: list[str]) -> int:
    root = Path(words[0])
    warnings.simplefilter("ignore")
    ranks = Ranks(*(int(os.environ[k]) for k in ("RANK", "WORLD_SIZE", "LOCAL_RANK")))
    dist.init_process_group("gloo")
    results: dict[str, Any] = {}
    ddp.DdpEngine._reduce = waited(ddp.DdpEngine._reduce)  # type: ignore[method-assign]
    os.environ["RUN"] = str(root / "run")
    only = os.environ.get("ONLY", "").split(",")
    for pair in (p for p in PAIRS if any(part in p.name for part in only)):
        folder = Path(os.environ["SMOLLM2"]) if pair.real else root / f"model-{pair.tied}"
        if ranks.rank == 0 and not folder.exists():
            make_model(folder, pair.tied)
        dist.barrier()
        try:
            began = time.perf_counter()
            results[pair.name] = measure(pair, folder, ranks)
            print(f"{pair.name}: {time.perf_counter() - began:.1f} s", flush=True)
        except Exception:
            results[pair.name] = {"error": traceback.format_exc()}
            traceback.print_exc()
            break  # the ranks may be at different places now
        gc.collect()
    (root / f"rank-{ranks.rank}.json").write_text(json.dumps(results))
    if not any("error" in r for r in results.values()):
        dist.barrier()
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    with small_buckets():
        leave.run(main)
