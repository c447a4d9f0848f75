"""What a sharding engine costs the host: `python benchmarks/engine_hooks.py [--write FILE]`.

A Llama of 24 layers so small that its arithmetic is nothing (width 64, 16 tokens, full checkpointing) takes steps
without an engine and under FSDP2, FSDP1, ZeRO-2 and ZeRO-3 on two ranks. Printed is the processor time of the thread
that issues the work, and the engine's surplus in operations: of those the model itself issues 45 per layer and
forward, as estimate/speed/constants.py counts them. 'units': FSDP wraps every adapter matrix on its own, as PEFT's
wrapping policy does.
"""

# ruff: noqa: PLC0415

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from datetime import date
from importlib.metadata import version
from pathlib import Path

LAYERS, OPS = 24, 24 * 45 * 4
MODES = ("none", "fsdp2", "fsdp1", "zero2", "zero3")
ADAPTED = (*(f"{mode}-lora" for mode in MODES), "fsdp1-units-lora", "fsdp2-units-lora")


def model(lora: bool):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    found = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
            num_key_value_heads=4,
            vocab_size=256,
            use_cache=False,
        )
    )
    found.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    found.train()
    if lora:
        from peft import LoraConfig, get_peft_model

        targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
        found = get_peft_model(found, LoraConfig(r=8, target_modules=targets))
        found.enable_input_require_grads()
    return found


def plain_step(module, batch):
    def step() -> None:
        module(input_ids=batch, labels=batch).loss.backward()
        for parameter in module.parameters():
            parameter.grad = None

    return step


def fsdp2(module, units: bool, lora: bool):
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    if units:
        for name, each in list(module.named_modules()):
            if "lora_" in name and isinstance(each, torch.nn.Linear):
                fully_shard(each, mesh=mesh)
    for layer in (module.base_model.model if lora else module).model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(module, mesh=mesh)
    return module


def fsdp1(module, units: bool):
    from functools import partial

    import torch
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    def wrapped(each) -> bool:
        weight = getattr(each, "weight", None)
        alone = units and weight is not None and weight.requires_grad and not list(each.children())
        return isinstance(each, LlamaDecoderLayer) or alone

    policy = partial(lambda_auto_wrap_policy, lambda_fn=wrapped)
    device = torch.device("cpu")
    return FullyShardedDataParallel(module, auto_wrap_policy=policy, use_orig_params=True, device_id=device)


def zero_step(module, batch, stage: int):
    import deepspeed
    import torch

    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1000,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=1e-4)
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)

    def step() -> None:
        engine.backward(engine(input_ids=batch, labels=batch).loss)
        engine.step()

    return step


def on_rank(mode: str) -> None:
    """Measure one mode and print the median of twelve steps."""
    import torch

    torch.set_num_threads(1)
    lora, units, name = mode.endswith("-lora"), "-units" in mode, mode.split("-")[0]
    module, batch = model(lora), torch.randint(0, 256, (1, 16))
    tensors = [p.requires_grad for p in module.parameters()]
    if name.startswith("zero"):
        import deepspeed

        deepspeed.init_distributed("gloo")
        step = zero_step(module, batch, int(name[-1]))
    else:
        torch.distributed.init_process_group("gloo")
        if name != "none":
            module = fsdp2(module, units, lora) if name == "fsdp2" else fsdp1(module, units)
        step = plain_step(module, batch)
    times = []
    for i in range(16):
        start = time.thread_time()
        step()
        if i >= 4:
            times.append(time.thread_time() - start)
    torch.distributed.barrier()
    if os.environ["RANK"] == "0":
        seconds = sorted(times)[len(times) // 2]
        print(
            json.dumps({"mode": mode, "seconds": seconds, "tensors": len(tensors), "trained": sum(tensors)})
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", type=Path, help="also write the result there")
    parser.add_argument("--mode", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.mode:
        return on_rank(asked.mode)
    rows = []
    for i, mode in enumerate((*MODES, *ADAPTED)):
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
        command += ["--master-port", str(29610 + i), __file__, "--mode", mode]
        done = subprocess.run(
            command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
        )
        line = next((x for x in done.stdout.splitlines() if x.startswith("{")), None)
        if line is None:
            raise SystemExit(f"{mode} failed:\n{done.stderr[-2000:]}")
        rows.append(json.loads(line))
        alone = next(r["seconds"] for r in rows if r["mode"].endswith("-lora") == mode.endswith("-lora"))
        row = rows[-1]
        row["surplus_operations"] = round((row["seconds"] - alone) / (alone / OPS))
        print(
            f"{mode:18} {1e3 * row['seconds']:6.1f} ms, surplus {row['surplus_operations']:6,} operations over "
            f"{LAYERS + 1} layers and ends, {row['tensors']} tensors, {row['trained']} trained",
            flush=True,
        )
    if asked.write:
        versions = {name: version(name) for name in ("torch", "transformers", "peft", "deepspeed")}
        record = {
            "kind": "engine_hooks",
            "date": date.today().isoformat(),
            "platform": platform.platform(),
            "versions": versions,
            "ranks": 2,
            "rows": rows,
        }
        asked.write.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
