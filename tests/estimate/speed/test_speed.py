"""Time of a step: what must grow, shrink or stay, and a worked number."""

from dataclasses import replace
from typing import Any

import pytest

from shardwise.estimate.speed import Program, SpeedEstimate, estimate_speed
from shardwise.estimate.speed.collectives import Group
from shardwise.estimate.stack import Stack
from shardwise.facts.catalogue import catalogue_shape
from shardwise.facts.gpus import find_gpu
from shardwise.facts.model import ModelShape

A100, H100 = find_gpu("A100-80GB"), find_gpu("H100-80GB")


def shape(name: str = "meta-llama/Llama-3.1-8B") -> ModelShape:
    found = catalogue_shape(name)
    assert found is not None
    return found


BASE = Stack(
    method="full", sharding="fsdp2", world_size=8, gpus_per_node=8, micro_batch_size=2, sequence_length=4096
)


def speed(name: str = "meta-llama/Llama-3.1-8B", gpu: Any = A100, **changes: Any) -> SpeedEstimate:
    return estimate_speed(shape(name), gpu, replace(BASE, **changes))


def part(estimate: SpeedEstimate, name: str) -> float:
    return sum(p.seconds for p in estimate.parts if p.name == name)


def test_matrix_products_are_two_flops_per_weight_token_and_pass() -> None:
    """8B, 8,192 tokens, three passes: 6 x 6.98e9 x 8192 / (0.8 x 312e12) = 1.374 s, and 2 % for a short sum."""
    estimate = speed()
    assert part(estimate, "matrix products") == pytest.approx(1.374 * 1.024, rel=0.01)


def test_full_checkpointing_computes_a_fourth_forward() -> None:
    assert part(speed(activation_checkpointing="full"), "matrix products") == pytest.approx(
        part(speed(), "matrix products") * 4 / 3
    )


def test_adapters_skip_the_weight_gradient() -> None:
    full, lora = speed(), speed(method="lora")
    assert part(lora, "matrix products") == pytest.approx(part(full, "matrix products") * 2 / 3, rel=0.05)
    assert part(lora, "optimizer") < part(full, "optimizer")


def test_qlora_pays_for_unpacking_at_every_use() -> None:
    none, full = speed(method="qlora"), speed(method="qlora", activation_checkpointing="full")
    assert part(none, "dequantisation") > 0
    assert part(full, "dequantisation") == pytest.approx(1.5 * part(none, "dequantisation"))
    assert part(speed(method="lora"), "dequantisation") == 0


def test_attention_grows_with_the_square_of_length_and_respects_windows() -> None:
    short, long = (
        speed(micro_batch_size=8, sequence_length=1024),
        speed(micro_batch_size=1, sequence_length=8192),
    )
    assert part(long, "attention") == pytest.approx(8 * part(short, "attention"), rel=0.05)
    windowed = replace(shape(), sliding_window=1024, full_attention_layers=0)
    stack = replace(BASE, micro_batch_size=1, sequence_length=8192)
    assert part(estimate_speed(windowed, A100, stack), "attention") < 0.4 * part(long, "attention")


def test_m02_a_mixture_is_timed_by_its_active_parameters() -> None:
    moe = speed("Qwen/Qwen3-30B-A3B")
    dense = speed("Qwen/Qwen3-32B")
    assert part(moe, "matrix products") < 0.2 * part(dense, "matrix products")


def test_looped_experts_are_bound_by_the_host() -> None:
    grouped = estimate_speed(shape("Qwen/Qwen3-30B-A3B"), A100, BASE)
    looped = estimate_speed(shape("Qwen/Qwen3-30B-A3B"), A100, BASE, Program(experts="looped"))
    assert looped.step_seconds > 2 * grouped.step_seconds


def test_more_gpus_share_the_update_and_pay_for_collectives() -> None:
    one = speed(sharding="single", world_size=1, gpus_per_node=1)
    eight = speed()
    assert part(one, "communication") == 0
    assert part(eight, "communication") > 0
    assert part(eight, "optimizer") < part(one, "optimizer")


def test_a_slower_network_costs_more_between_nodes_only() -> None:
    slow = replace(H100, network=replace(H100.network, bytes_per_second=3e9))
    far = replace(BASE, world_size=16)
    assert (
        estimate_speed(shape(), slow, far).step_seconds
        > 1.5 * estimate_speed(shape(), H100, far).step_seconds
    )
    assert (
        estimate_speed(shape(), slow, BASE).step_seconds == estimate_speed(shape(), H100, BASE).step_seconds
    )


def test_replicated_groups_spare_the_network() -> None:
    slow = replace(H100, network=replace(H100.network, bytes_per_second=6e9))
    stack = replace(BASE, world_size=32, gradient_accumulation_steps=4)
    flat = estimate_speed(shape(), slow, stack)
    hybrid = estimate_speed(shape(), slow, replace(stack, dp_replicate=4))
    assert hybrid.step_seconds < flat.step_seconds


def test_gathers_are_bound_by_the_slower_level() -> None:
    group = Group(ranks=16, per_node=8, inside_bytes_per_second=300e9, between_bytes_per_second=100e9)
    expected = 10e9 * (1 / 2) / 100e9  # between: half of it crosses
    assert group.gather_seconds(10e9) == pytest.approx(expected, rel=0.01)
    assert group.reduce_seconds(10e9) == 2 * group.gather_seconds(10e9)
    assert Group(1, 1, 1.0, 1.0).gather_seconds(1e9) == 0


def test_offload_costs_traffic_and_an_update_on_the_host() -> None:
    plain = speed(sharding="zero2")
    offloaded = speed(sharding="zero2", offload_optimizer="cpu")
    disk = speed(sharding="zero3", offload_optimizer="nvme", offload_parameters="nvme")
    assert part(plain, "offload") == 0
    assert 0 < part(offloaded, "offload") < part(disk, "offload")


def test_m18_accumulation_multiplies_compute_but_not_the_update() -> None:
    """Time is of whole optimizer steps: forward, backward, update, communication; never of forwards alone."""
    one, four = speed(), speed(gradient_accumulation_steps=4)
    assert part(four, "matrix products") == pytest.approx(4 * part(one, "matrix products"))
    assert part(four, "optimizer") == pytest.approx(part(one, "optimizer"))
    assert four.tokens_per_step == 4 * one.tokens_per_step


def test_m18_a_range_is_given_and_holds_the_estimate() -> None:
    for method in ("full", "lora", "qlora"):
        estimate = speed(method=method)
        assert 0 < estimate.low_seconds < estimate.step_seconds < estimate.high_seconds
        assert estimate.low_tokens_per_second_per_gpu < estimate.tokens_per_second_per_gpu
        assert estimate.tokens_per_second_per_gpu < estimate.high_tokens_per_second_per_gpu


def test_parts_add_up_to_the_step() -> None:
    for changes in ({}, {"method": "qlora"}, {"sharding": "zero3", "offload_optimizer": "cpu"}):
        estimate = speed(**changes)
        assert sum(p.seconds for p in estimate.parts) == pytest.approx(estimate.step_seconds, rel=1e-6)


def test_short_sequences_wait_for_the_host() -> None:
    tiny = speed(method="lora", sharding="single", world_size=1, micro_batch_size=1, sequence_length=128)
    assert tiny.bound_by == "waiting for the host"
    assert tiny.mfu < 0.2


def test_mfu_counts_needed_flops_against_the_dense_peak() -> None:
    estimate = speed()
    assert 0.3 < estimate.mfu < 0.7
    recomputed = speed(activation_checkpointing="full")
    assert recomputed.mfu < estimate.mfu  # recomputation is no work the model needs


def test_compiled_layers_move_fewer_bytes() -> None:
    assert part(speed(compile=True), "element-wise") < 0.6 * part(speed(), "element-wise")


def launch(**changes: Any) -> float:
    tiny = {"micro_batch_size": 1, "sequence_length": 64, "world_size": 2, "gpus_per_node": 2}
    return part(speed("HuggingFaceTB/SmolLM2-135M", **(tiny | changes)), "waiting for the host")


def test_hooks_of_an_engine_cost_the_host_per_tensor_and_unit() -> None:
    """Measured surplus: ZeRO-3's hooks the most, ZeRO-2's the least of those that hook at all."""
    ddp, zero2, fsdp2, zero3 = (launch(sharding=s) for s in ("ddp", "zero2", "fsdp2", "zero3"))
    assert ddp < zero2 < fsdp2 < zero3
    assert launch(sharding="zero1") == zero2


def test_adapters_wrapped_one_by_one_cost_more_than_whole_layers() -> None:
    stack = replace(BASE, method="lora", micro_batch_size=1, sequence_length=256)
    layers = estimate_speed(shape(), A100, stack)
    units = estimate_speed(shape(), A100, stack, Program(adapter_units=True))
    assert units.step_seconds > 1.5 * layers.step_seconds


def test_a_program_may_keep_zero_on_one_gpu() -> None:
    stack = replace(BASE, sharding="single", world_size=1, gpus_per_node=1, sequence_length=256)
    kept = estimate_speed(shape(), A100, stack, Program(engine="zero3"))
    assert kept.step_seconds > estimate_speed(shape(), A100, stack).step_seconds


def test_zero3_fetches_a_huge_layer_late_and_again() -> None:
    """A layer of 0.9 B parameters leaves little of 1e9 live ones for the next: gathers are hardly hidden."""
    big = replace(BASE, sharding="zero3", activation_checkpointing="full", micro_batch_size=1)
    of = shape("meta-llama/Llama-3.1-70B")
    few = estimate_speed(of, A100, big)
    many = estimate_speed(of, A100, replace(big, max_live_parameters=4_000_000_000))
    assert part(few, "communication") > 1.5 * part(many, "communication")


def test_attention_reaches_as_far_as_documents_and_the_loss_as_far_as_labels() -> None:
    whole = speed(sequence_length=8192)
    short = speed(sequence_length=8192, document_tokens=512.0)
    assert part(short, "attention") == pytest.approx(
        part(whole, "attention") / 16, rel=0.3
    )  # or bound by traffic
    assert speed(sequence_length=512, document_tokens=9000.0) == speed(sequence_length=512)
    eager = {"sequence_length": 8192, "attention": "eager"}  # masks what it has computed
    assert part(speed(**eager, document_tokens=512.0), "attention") == part(speed(**eager), "attention")
    answers = speed(labelled_share=0.25)
    assert part(answers, "loss") == pytest.approx(part(speed(), "loss") / 4, rel=0.01)
    assert part(speed(labelled_share=0.25, loss="full"), "loss") == part(speed(), "loss")


def test_paged_states_that_find_room_cost_nothing_and_others_cross_pcie_twice() -> None:
    fitting = speed(optimizer="paged_adamw_8bit")
    assert part(fitting, "offload") == 0
    crowded = speed("meta-llama/Llama-3.1-70B", optimizer="paged_adamw_8bit", micro_batch_size=1)
    states = 2 * shape("meta-llama/Llama-3.1-70B").total_parameters / 8
    seconds = 2 * states / (A100.pcie.bytes_per_second * 0.7)
    assert part(crowded, "offload") == pytest.approx(seconds, rel=0.05)


def test_a_softmax_under_autocast_moves_more_bytes() -> None:
    stack = replace(BASE, attention="eager")
    plain = estimate_speed(shape(), A100, stack)
    assert part(estimate_speed(shape(), A100, stack, Program(autocast=True)), "attention") > 1.15 * part(
        plain, "attention"
    )
