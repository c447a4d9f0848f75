"""One rank of the engine contract: `python ranks.py ENGINE FOLDER`, started twice by `test_contract.py`.

Every case of an engine runs in the same pair of processes, so that torch and DeepSpeed are imported once.
Rank 0 writes FOLDER/ENGINE.json: case -> what was measured, or the traceback.
"""

import json
import os
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import memory
import torch
import torch.distributed as dist
import toy
from cases import CASES, Case
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from shardwise.runs import RunFolder
from shardwise.training import checks, compiling, leave
from shardwise.training.build import build_engine
from shardwise.training.checkpoint.load import load
from shardwise.training.checkpoint.save import save
from shardwise.training.engines import deepspeed_config
from shardwise.training.engines.protocol import Engine, Ranks
from shardwise.training.engines.single import SingleEngine
from shardwise.training.export.write import export
from shardwise.training.model import LossModel, ModelFolder, prepare_for_training

CPU = torch.device("cpu")
NORM = 0.5
# Everything but the C++ compiler, which takes a minute; COMPILE_BACKEND=inductor for the whole.
compiling.BACKEND = os.environ.get("COMPILE_BACKEND", "aot_eager")
deepspeed_config.SUB_GROUP = 10_000  # several groups even in a tiny model


def build(case: Case, folder: Path, ranks: Ranks) -> Engine:
    recipe = toy.recipe(**case.sections)
    return build_engine(recipe, ModelFolder(folder, recipe), CPU, ranks, 2)


def reference(case: Case, folder: Path) -> dict[str, Any]:
    """The same steps in one process over all micro-batches."""
    sections = {**case.sections, "engine": {"name": "single", "device": "cpu", "processes": 1}}
    sections["training"] = {**sections["training"], "compile": False}
    recipe = toy.recipe(**sections)
    engine = build_engine(recipe, ModelFolder(folder, recipe), CPU, Ranks(), 4)
    assert isinstance(engine, SingleEngine)
    start = toy.weights(engine)
    before = toy.evaluate(engine)
    trace = toy.train(engine, range(case.steps), case.rate, NORM)
    return {
        "trace": trace,
        "start": start,
        "before": before,
        "after": toy.evaluate(engine),
        "weights": toy.weights(engine),
        "short": toy.train_step(engine, toy.micro_batches(case.steps, 1, 0)[:2], case.rate, NORM),
        "bytes": toy.held_bytes(engine),
    }


def run_case(case: Case, root: Path, ranks: Ranks, references: dict[str, Any]) -> dict[str, Any]:
    model = Path(os.environ["SMOLLM2"]) if case.real else root / f"model-{case.model_key}"
    if ranks.rank == 0 and not model.exists():
        toy.make_model(model, tied=case.tied)
    dist.barrier()
    key = f"{case.model_key}-{case.reference_key}"
    if ranks.rank == 0 and key not in references:
        references[key] = reference(case, model)
    engine = build(case, model, ranks)
    found: dict[str, Any] = {"start": toy.weights(engine)}
    found["before"] = toy.evaluate(engine)
    watch = checks.watch_gradients(engine)
    trace = toy.train(engine, range(2), case.rate, NORM)
    found["without_gradient"] = watch.finish()
    rest = toy.train(engine, range(2, case.steps), case.rate, NORM)
    trace.losses += rest.losses
    trace.norms += rest.norms
    found |= {"trace": trace, "after": toy.evaluate(engine), "weights": toy.weights(engine)}
    found["facts"] = checks.live_facts(engine)
    found["mismatches"] = checks.compare_facts(found["facts"], toy.recipe(**case.sections), ranks.world_size)
    found["bytes"] = toy.held_bytes(engine)
    run = RunFolder(root / case.name)
    path = save(run, engine, case.steps, {}, keep=1).path
    target = export(run, engine, ModelFolder(model, toy.recipe(**case.sections)))
    found["short"] = toy.train_step(
        engine, toy.micro_batches(case.steps, ranks.world_size, ranks.rank)[:1], case.rate, NORM
    )
    with engine.gathered(), torch.no_grad():
        engine.module.eval()
        found["generated"] = toy.generate(engine)
        engine.module.train()
    engine.close()
    again = build(case, model, ranks)
    load(path, again)
    found["reloaded"] = toy.evaluate(again)
    found["short_again"] = toy.train_step(
        again, toy.micro_batches(case.steps, ranks.world_size, ranks.rank)[:1], case.rate, NORM
    )
    again.close()
    if ranks.rank != 0:
        return {}
    return compare(found, references[key], case, model, target)


def compare(
    found: dict[str, Any], expected: dict[str, Any], case: Case, model: Path, target: Path | None
) -> dict[str, Any]:
    """Differences relative to `single`, as plain numbers."""
    ours, theirs = found["trace"], expected["trace"]
    assert target is not None
    return {
        "loss": max(abs(a - b) / abs(b) for a, b in zip(ours.losses, theirs.losses, strict=True)),
        "norm": max(abs(a - b) / abs(b) for a, b in zip(ours.norms, theirs.norms, strict=True)),
        "clipped": sum(n > NORM for n in theirs.norms),
        "start": toy.distance(found["start"], expected["start"]),
        "weights": toy.distance(found["weights"], expected["weights"]),
        "moved": toy.distance(found["weights"], found["start"]),
        "before": abs(found["before"] - expected["before"]) / expected["before"],
        "after": abs(found["after"] - expected["after"]) / expected["after"],
        "short": max(abs(a - b) / abs(b) for a, b in zip(found["short"], expected["short"], strict=True)),
        "reloaded": abs(found["reloaded"] - found["after"]) / found["after"],
        "resumed": max(
            abs(a - b) / abs(b) for a, b in zip(found["short_again"], found["short"], strict=True)
        ),
        "exported": abs(exported_loss(target, case, model) - found["after"]) / found["after"],
        "export_wrong": export_wrong(target, case, model, found["weights"]),
        "losses": ours.losses,
        "reference_losses": theirs.losses,
        "facts": found["facts"],
        "mismatches": found["mismatches"],
        "without_gradient": found["without_gradient"],
        "generated": found["generated"],
        "bytes": found["bytes"],
        "reference_bytes": expected["bytes"],
    }


def export_wrong(target: Path, case: Case, model: Path, weights: dict[str, torch.Tensor]) -> list[str]:
    """What is wrong with the exported tensors: names, shapes of the base, emptiness, values (C06)."""
    written = {k: v for file in target.glob("*.safetensors") for k, v in load_file(file).items()}
    expected = {
        name.replace("vector.default.weight", "vector").replace(".default.", "."): tensor
        for name, tensor in weights.items()
    }
    wrong = sorted(written.keys() ^ expected.keys())
    for name in written.keys() & expected.keys():
        tensor, ours = written[name], expected[name]
        if (
            tensor.numel() == 0
            or tensor.shape != ours.shape
            or not torch.equal(tensor, ours.to(tensor.dtype))
        ):
            wrong.append(f"{name}: {tuple(tensor.shape)} for {tuple(ours.shape)}")
    if case.method == "full":
        base = {k: v.shape for file in model.glob("*.safetensors") for k, v in load_file(file).items()}
        wrong += [k for k, v in written.items() if base.get(k) != v.shape]
    return wrong


def exported_loss(target: Path, case: Case, model: Path) -> float:
    """The evaluation loss of the exported folder in plain transformers or PEFT."""
    from peft import PeftModel

    recipe = toy.recipe(**{**case.sections, "engine": {"name": "single", "device": "cpu", "processes": 1}})
    if case.method == "full":
        plain: Any = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
        plain.set_attn_implementation(ModelFolder(model, recipe).attention)
    else:
        base = ModelFolder(model, recipe)
        if case.method == "qlora":
            from shardwise.training.adapters.qlora import load_quantised

            plain = load_quantised(base, recipe.quantization)
        else:
            plain = base.load()
        plain = PeftModel.from_pretrained(plain, target)
    module: LossModel = prepare_for_training(plain, recipe)
    total, tokens = 0.0, 0
    with torch.no_grad():
        for batch in toy.micro_batches(10**6, 1, 0):
            total += float(module(batch))
            tokens += batch.trained_tokens
    return total / tokens


def run_memory(engine: str, root: Path, ranks: Ranks) -> dict[str, Any]:
    """Peak bytes of an engine's variants on the fullest rank."""
    model = root / "model-large"
    if ranks.rank == 0 and not model.exists():
        toy.make_model(model, layers=6, hidden=192)
    dist.barrier()
    found = {}
    for name, section in memory.ENGINES[engine].items():
        both = [{}, {}]
        dist.all_gather_object(both, memory.measure(section, model, ranks))
        found[name] = {key: max(one[key] for one in both) for key in both[0]}
    return found


def main(words: list[str]) -> int:
    engine, root = words[0], Path(words[1])
    warnings.simplefilter("ignore")
    os.chdir(root)  # nvme_path of the cases is relative
    ranks = Ranks(*(int(os.environ[k]) for k in ("RANK", "WORLD_SIZE", "LOCAL_RANK")))
    dist.init_process_group("gloo")
    results, references = {}, {}  # type: ignore[var-annotated]
    only = os.environ.get("ONLY", "").split(",")
    for case in (c for c in CASES[engine] if any(part in c.name for part in only)):
        began = time.perf_counter()
        try:
            results[case.name] = run_case(case, root, ranks, references)
            results[case.name]["seconds"] = time.perf_counter() - began
        except Exception:
            results[case.name] = {"error": traceback.format_exc()}
            traceback.print_exc()
            break  # the ranks may be at different places now
    if not os.environ.get("ONLY") or "memory" in only:
        try:
            results["memory"] = run_memory(engine, root, ranks)
        except Exception:
            results["memory"] = {"error": traceback.format_exc()}
    if ranks.rank == 0 or any("error" in r for r in results.values()):
        (root / f"{engine}-{ranks.rank}.json").write_text(json.dumps(results))
    if not any("error" in r for r in results.values()):
        dist.barrier()
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    leave.run(main)
