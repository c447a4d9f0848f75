"""What other programs' code does with memory, one mechanism at a time; published runs of programs without a table."""

import gc
import weakref
from typing import Any

import pytest

from shardwise.estimate.memory.measured import row_memory
from shardwise.estimate.memory.programs import program_of
from shardwise.facts.catalogue import named_shape
from shardwise.plan.rows import parse_row

ROW = {
    "id": "a", "source": "fmsaccel", "model": "Llama-3-8B", "method": "lora", "lora_rank": "16",
    "lora_targets": "q,k,v,o", "quant": "none", "optimizer": "AdamW", "param_dtype": "bf16",
    "precision": "bf16 autocast", "sharding": "none", "num_gpus": "1", "gpu_kind": "A100-80GB", "gpu_mem_gb": "80",
    "micro_batch_per_gpu": "8", "seq_len": "4096", "seq_kind": "packed", "grad_accum": "1", "act_ckpt": "full",
    "attention": "flash", "compile": "no", "fused_ce": "liger", "outcome": "ok", "measured_peak_mem_GB": "50",
    "mem_unit": "GiB", "mem_kind": "torch max_memory_allocated", "mem_usable": "yes",
}  # fmt: skip
GIB = 2**30


def allocated(**cells: str) -> int:
    row = parse_row(ROW | cells)
    assert row.stack is not None, row.declined
    found = row_memory(row.raw, row.shape, row.stack)
    assert not isinstance(found, str), found
    return found[0].allocated_bytes


def program(**cells: str) -> Any:
    row = parse_row(ROW | cells)
    assert row.shape is not None
    return program_of(row.raw, row.shape.model_type)


FSDP1 = {"sharding": "FSDP1 FULL_SHARD", "num_gpus": "2"}


def test_reentrant_checkpoints_around_frozen_units_of_fsdp1_keep_one_more_copy_of_every_input() -> None:
    other = allocated(**FSDP1, act_ckpt="full (non-reentrant)")
    more = allocated(**FSDP1) - other
    assert more == pytest.approx(
        32 * 8 * 4096 * 4096 * 2, rel=0.12
    )  # and a layer less of what its backward needs


def test_trained_units_and_other_engines_keep_none() -> None:
    assert not program(**FSDP1, method="full").outlived_recomputation
    assert not program(sharding="FSDP2", num_gpus="2").outlived_recomputation
    assert not program(**FSDP1, act_ckpt="none").outlived_recomputation
    assert not program(**FSDP1, source="fsdp_qlora", act_ckpt="full (reentrant)").outlived_recomputation


def test_a_hook_on_several_gradients_holds_a_leaf_until_it_is_removed() -> None:
    """What torch's FSDP does with the input of a unit that trains nothing."""
    torch = pytest.importorskip("torch")
    size = 7919

    def alive() -> int:
        gc.collect()
        return sum(type(o) is torch.Tensor and o.numel() == size for o in gc.get_objects())

    leaf = torch.ones(size).requires_grad_(True)
    handle = torch.autograd.graph.register_multi_grad_hook([leaf], lambda grads: None)
    (leaf * 2).sum().backward()
    del leaf
    held = alive()
    handle.remove()
    assert held > alive() == 0


def test_fabric_s_flat_gradients_are_whole_over_several_micro_batches_frozen_weights_included() -> None:
    litgpt = {"source": "litgpt", "model": "Llama-2-7B", "fused_ce": "chunked (128)", "sharding": "FSDP1",
              "num_gpus": "4", "lora_targets": "q,v", "precision": "bf16-true", "seq_len": "1024",
              "micro_batch_per_gpu": "1"}  # fmt: skip
    row = parse_row(ROW | litgpt | {"grad_accum": "16"})
    assert row.stack is not None
    found = row_memory(row.raw, row.shape, row.stack)
    assert not isinstance(found, str)
    shape = named_shape("Llama-2-7B")
    assert shape is not None
    assert found[0].term("gradients") == pytest.approx(2 * 32 * shape.layer_parameters, rel=0.02)


def test_experts_in_turn_need_scratch_for_one_of_them_only() -> None:
    mixtral = {
        "model": "Mixtral-8x7B-v0.1",
        "method": "qlora",
        "quant": "bnb nf4 (double quant)",
        "fused_ce": "liger",
    }
    in_turn, together = allocated(**mixtral), allocated(**mixtral, notes="scattermoe")
    assert 1 < (together - in_turn) / GIB < 8


def test_a_frozen_weight_in_fp32_is_remembered_in_16_bits_under_autocast() -> None:
    """3 numbers a parameter where nothing is checkpointed: 4 bytes kept, 2 bytes of the copy a product remembers."""
    cells = {"model": "Llama-2-7B", "seq_len": "128", "micro_batch_per_gpu": "1", "act_ckpt": "none"}
    wide = allocated(
        **cells, param_dtype="fp32", source="litgpt", precision="bf16-mixed", fused_ce="chunked (128)"
    )
    assert wide / 6.74e9 == pytest.approx(6, rel=0.1)


def test_inputs_of_old_4_bit_products_stay_for_all_layers_where_checkpoints_do_not_reenter() -> None:
    """Of each of 32 layers: two normed inputs, attention's output and the MLP's 11,008 in 2 bytes."""
    swift = {"source": "msswift", "model": "Qwen-7B-Chat", "method": "qlora", "seq_len": "2048", "precision": "bf16",
             "micro_batch_per_gpu": "1", "fused_ce": "liger"}  # fmt: skip
    more = allocated(**swift, quant="bnb nf4") - allocated(**swift | {"source": "axolotl"}, quant="bnb nf4")
    assert more == pytest.approx(2048 * 32 * 2 * (3 * 4096 + 11008), rel=0.1)


def test_a_checkpoint_that_does_not_reenter_misses_what_a_function_keeps_as_an_attribute() -> None:
    """What bitsandbytes before 0.43 did."""
    torch = pytest.importorskip("torch")

    class Product(torch.autograd.Function):  # type: ignore[misc, name-defined]
        @staticmethod
        def forward(ctx: Any, x: Any, w: Any) -> Any:
            ctx.tensors = x
            return x @ w

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return grads[0] @ torch.eye(3), None

    inputs: list[weakref.ref[Any]] = []

    def layer(x: Any) -> Any:
        doubled = x * 2
        inputs.append(weakref.ref(doubled))
        return Product.apply(doubled, torch.eye(3))

    def alive(reenter: bool) -> int:
        inputs.clear()
        h = torch.ones(7, 3).requires_grad_(True)
        for _ in range(4):
            h = torch.utils.checkpoint.checkpoint(layer, h, use_reentrant=reenter)
        gc.collect()
        return sum(ref() is not None for ref in inputs)

    assert (alive(reenter=True), alive(reenter=False)) == (0, 4)


def test_paged_states_are_not_on_the_device() -> None:
    full = {"method": "full", "model": "Llama-3.2-1B", "seq_len": "256", "micro_batch_per_gpu": "1"}
    less = allocated(**full) - allocated(**full, optimizer="bnb PagedAdamW")
    assert less == pytest.approx(8 * 1.236e9, rel=0.05)


def test_trained_embeddings_are_copies_with_states_of_their_own() -> None:
    qwen = {"source": "qwen", "model": "Qwen-7B-Chat", "seq_len": "128", "micro_batch_per_gpu": "1",
            "grad_accum": "8", "precision": "bf16"}  # fmt: skip
    more = allocated(**qwen, lora_targets="c_attn,c_proj,w1,w2 + trainable embeddings and head") - allocated(
        **qwen, lora_targets="c_attn,c_proj,w1,w2"
    )
    elements = 2 * 151936 * 4096
    assert 8 * elements < more < 11 * elements


def test_deepspeed_casts_adapters_and_its_step_goes_in_sub_groups() -> None:
    zero = {"sharding": "ZeRO-3", "sharding_norm": "zero3", "num_gpus": "1", "method": "full", "seq_len": "128",
            "micro_batch_per_gpu": "1", "model": "Llama-2-7B", "precision": "bf16"}  # fmt: skip
    row = parse_row(ROW | zero)
    assert row.stack is not None
    found = row_memory(row.raw, row.shape, row.stack)
    assert not isinstance(found, str)
    assert found[0].term("temporaries") < 4.1 * 10**9


@pytest.mark.parametrize(
    ("cells", "attribute", "expected"),
    [
        ({"source": "torchtune", "sharding": "FSDP2", "method": "full"}, "root_units", True),
        ({"source": "torchtune", "sharding": "FSDP2", "method": "lora"}, "root_units", False),
        ({"source": "torchtune"}, "sharded_scales", True),
        ({"source": "x", "fused_ce": "Cut Cross-Entropy (CCE)"}, "loss", "fused"),
        ({"source": "x", "fused_ce": "fused CE kernel, logits materialised"}, "loss", "kernel"),
        ({"source": "x", "fused_ce": ""}, "loss", "full"),
        ({"source": "msswift"}, "adapter_bytes", 4),
        ({"source": "qwen"}, "adapter_dropout", True),
        ({"source": "fmsaccel"}, "adapter_dropout", False),
        ({"source": "x", "quant": "bnb int8"}, "quantised_bytes", 1.0),
        ({"source": "unsloth", "notes": "Unsloth alpaca"}, "loss_bytes", 0),
        ({"source": "unsloth", "notes": "HF alpaca", "fused_ce": "no"}, "loss", "full"),
        ({"source": "torchtune", "source_path": "meta-llama/llama-cookbook PR 41"}, "name", "transformers"),
    ],
)
def test_programs_are_told_apart_by_what_their_columns_say(
    cells: dict[str, str], attribute: str, expected: object
) -> None:
    assert getattr(program(**cells), attribute) == expected


@pytest.mark.parametrize(
    ("model", "published", "cells"),
    [
        ("Apertus-8B", 8.7, {}),
        ("Seed-OSS-36B", 27.7, {}),
        ("Mistral-Small-24B", 24.0, {"fused_ce": "no"}),  # Magistral
        ("Mistral-Small-24B", 21.0, {"optimizer": "adamw_torch"}),  # Devstral
        ("Qwen3-4B", 5.1, {}),  # Plano-4B
        ("LFM2-350M", 25.0, {"method": "full", "quant": "none", "micro_batch_per_gpu": "4", "seq_len": "4096",
                             "act_ckpt": "none", "fused_ce": "chunked", "optimizer": "adamw_torch_fused",
                             "param_dtype": "bf16"}),
        ("Llama-4-Scout-17B-16E", 60.1, {"micro_batch_per_gpu": "1", "seq_len": "4096"}),
    ],
)  # fmt: skip
def test_what_axolotl_publishes_of_its_examples(model: str, published: float, cells: dict[str, str]) -> None:
    """'This config uses about ... VRAM' of axolotl/examples/*/README.md: memory reserved, as its logs show it."""
    example = {
        "source": "axolotl", "model": model, "method": "qlora", "quant": "bnb nf4", "lora_rank": "32",
        "lora_targets": "all-linear", "optimizer": "adamw_bnb_8bit", "param_dtype": "4-bit + bf16",
        "precision": "bf16", "micro_batch_per_gpu": "2", "seq_len": "2048", "grad_accum": "4",
        "fused_ce": "cut cross-entropy", "mem_kind": "device_mem_reserved",
    }  # fmt: skip
    row = parse_row(ROW | example | cells)
    assert row.stack is not None
    found = row_memory(row.raw, row.shape, row.stack)
    assert not isinstance(found, str)
    assert found[1] / GIB == pytest.approx(published, rel=0.1)
