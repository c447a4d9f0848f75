"""Reported failures of memory planning, by the id of the report; figures are theirs."""

from dataclasses import replace

import pytest

from shardwise.estimate.memory.around import around
from shardwise.estimate.memory.formula import estimate_memory
from shardwise.estimate.memory.host import loading_bytes_per_node, pinned_bytes
from shardwise.estimate.memory.layer import block_of
from shardwise.estimate.memory.programs import HUGGING_FACE
from shardwise.estimate.memory.states import NF4_DOUBLE_BYTES, counts, held
from shardwise.estimate.memory.trainer import OURS
from shardwise.estimate.stack import Stack
from shardwise.facts.catalogue import named_shape
from shardwise.facts.model import ModelShape, shape_from_config
from shardwise.units import GIB


def model(name: str) -> ModelShape:
    shape = named_shape(name)
    assert shape is not None
    return shape


def test_m01_logits_are_in_the_peak_by_loss_kind():
    gemma = model("Gemma-2-2B")
    stack = Stack(method="lora", sequence_length=8192, loss="full", activation_checkpointing="full")
    full, chunked = estimate_memory(gemma, stack), estimate_memory(gemma, replace(stack, loss="chunked"))
    copies = 2 * 8192 * 256_000 * 4  # fp32 logits and their gradient: 15.6 GiB
    assert copies / GIB == pytest.approx(15.6, abs=0.05)
    assert full.allocated_bytes - chunked.allocated_bytes > copies - GIB
    assert any("training.loss: chunked" in note for note in full.notes)
    assert not any("training.loss" in note for note in chunked.notes)


def test_m02_mixtures_hold_all_their_parameters():
    qwen = model("Qwen3-30B-A3B")
    states = held(qwen, Stack(method="full"), OURS)
    assert states.weights / GIB == pytest.approx(56.9, abs=0.1)
    whole = estimate_memory(qwen, Stack(method="full", sequence_length=512, micro_batch_size=1))
    assert whole.allocated_bytes / GIB > 455 * 0.99  # 16 bytes per parameter
    assert held(model("Mixtral-8x7B-v0.1"), Stack(method="full"), OURS).weights / GIB == pytest.approx(
        87, abs=0.5
    )


@pytest.mark.parametrize("name, millions", [("Qwen3-4B", 943.7), ("Gemma-2-2B", 368.1)])
def test_m04_heads_have_the_size_that_the_config_says(name: str, millions: float):
    shape = model(name)
    block = block_of(shape, "full", 0, "all-linear")
    attention = sum(m.size for m in (*block.attention_in, block.attention_out))
    assert attention * shape.num_hidden_layers / 1e6 == pytest.approx(millions, abs=0.1)


@pytest.mark.parametrize("name, gib", [("Llama-3.1-8B", 5.31), ("Qwen2.5-0.5B", 0.43)])
def test_m05_only_what_the_loader_quantises_is_in_four_bits(name: str, gib: float):
    shape = model(name)
    n = counts(shape, "qlora", 8, "all-linear", False, False)
    embeddings = shape.vocab_size * shape.hidden_size * (1 if shape.tie_word_embeddings else 2)
    assert n.frozen_16bit >= embeddings
    assert (2 * n.frozen_16bit + NF4_DOUBLE_BYTES * n.frozen_4bit) / GIB == pytest.approx(gib, abs=0.02)


def test_m06_preparation_to_fp32_is_counted_where_it_is_done_and_we_do_not():
    llama = model("Llama-3.1-8B")
    stack = Stack(method="qlora", sequence_length=4096, activation_checkpointing="full")
    plain, prepared = (
        held(llama, stack, replace(HUGGING_FACE, fp32_leftovers=casts)).weights for casts in (False, True)
    )
    embeddings = 2 * llama.vocab_size * llama.hidden_size
    assert prepared - plain == pytest.approx(embeddings * 2, rel=0.001)  # 4 bytes instead of 2
    assert held(llama, stack, OURS).weights == plain
    residual = estimate_memory(llama, stack, replace(HUGGING_FACE, fp32_leftovers=True))
    assert residual.term("activations") > 1.8 * estimate_memory(llama, stack, HUGGING_FACE).term(
        "activations"
    )


def test_m08_buckets_make_higher_stages_no_smaller_on_few_ranks():
    small = model("Qwen2.5-0.5B")
    stages = {
        stage: Stack(method="full", sharding=stage, world_size=2, gpus_per_node=2, sequence_length=512)
        for stage in ("zero1", "zero2", "zero3")
    }
    peaks = {s: estimate_memory(small, stack).allocated_bytes for s, stack in stages.items()}
    assert peaks["zero3"] > 0.95 * peaks["zero2"]
    buckets = around(small, stages["zero2"], OURS).buckets
    assert buckets is not None
    assert buckets.bytes == 2 * 2 * min(500_000_000, small.total_parameters)  # two of bf16, for overlap
    smaller = estimate_memory(small, replace(stages["zero2"], reduce_bucket_size=50_000_000))
    assert smaller.phases["backward"] < estimate_memory(small, stages["zero2"]).phases["backward"] - GIB
    assert any("reduce_bucket_size" in n for n in estimate_memory(small, stages["zero2"]).notes)


def test_m09_frozen_weights_stay_in_bf16_under_fsdp2():
    llama = model("Llama-3.1-8B")
    stack = Stack(method="lora", sharding="fsdp2", world_size=2, gpus_per_node=2, lora_rank=8)
    assert held(llama, stack, OURS).weights / GIB == pytest.approx(7.48, abs=0.02)
    upcast = held(llama, stack, replace(HUGGING_FACE, weight_bytes=4)).weights
    assert upcast / GIB == pytest.approx(14.96, abs=0.1)


def test_m10_loading_on_every_rank_needs_as_many_copies_in_host_memory():
    qwen = model("Qwen3-30B-A3B")
    stack = Stack(method="full", sharding="fsdp2", world_size=8, gpus_per_node=8)
    assert loading_bytes_per_node(qwen, stack, every_rank=True) / GIB == pytest.approx(455, abs=1)
    assert loading_bytes_per_node(qwen, stack) / GIB == pytest.approx(57, abs=0.2)
    assert estimate_memory(qwen, stack).host_bytes_per_node / GIB < 256
    assert pinned_bytes(5 * GIB) == 8 * GIB


def test_m12_sizes_are_bytes_until_they_are_printed():
    llama = model("Llama-3.1-8B")
    weights = held(llama, Stack(method="full", precision="bf16"), OURS).weights
    assert weights == 2 * llama.total_parameters
    assert weights / GIB == pytest.approx(14.96, abs=0.01)
    assert weights / 1e9 == pytest.approx(16.06, abs=0.01)
    assert pytest.approx(74.5, abs=0.05) == 80e9 / GIB


def test_m14_adapters_do_not_make_stored_activations_small():
    llama = model("Llama-3.2-1B")
    stack = Stack(method="full", sequence_length=2048)
    full = estimate_memory(llama, stack, HUGGING_FACE)
    lora = replace(stack, method="lora", lora_rank=16)
    adapters = estimate_memory(llama, lora, HUGGING_FACE)
    dropout = estimate_memory(llama, lora, replace(HUGGING_FACE, adapter_dropout=True))
    wider = estimate_memory(llama, replace(lora, lora_rank=256), HUGGING_FACE)
    assert adapters.term("activations") > 0.75 * full.term("activations")
    assert dropout.term("activations") > full.term("activations")
    assert wider.term("activations") > adapters.term("activations")


def test_m15_trained_parameters_follow_rank_and_targets():
    llama = model("Llama-3.1-8B")
    few = counts(llama, "lora", 8, ("q_proj", "k_proj"), False, False).trained
    many = counts(llama, "lora", 256, "all-linear", False, False).trained
    assert few / 1e6 == pytest.approx(3.4, abs=0.05)
    assert many / 1e6 == pytest.approx(671, abs=1)
    assert 16 * many / GIB == pytest.approx(10.0, abs=0.05)
    stack = Stack(method="lora", lora_rank=256)
    states = held(llama, stack, OURS)
    assert states.masters + states.optimizer == 12 * many


def test_m16_a_vision_tower_is_counted_and_not_adapted():
    text = {
        "model_type": "gemma3_text", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 1000,
    }  # fmt: skip
    tower = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
             "image_size": 28, "patch_size": 14, "num_channels": 3}  # fmt: skip
    both = shape_from_config({"model_type": "gemma3", "text_config": text, "vision_config": tower}, "both")
    alone = shape_from_config(text, "text")
    assert both.vision_parameters > 0
    stack = Stack(method="lora", lora_targets=("q_proj",))
    seeing, blind = held(both, stack, OURS), held(alone, stack, OURS)
    assert seeing.weights - blind.weights == 2 * both.vision_parameters
    assert seeing.masters == blind.masters  # the tower got no adapter
    assert {t.part for t in both.adapted("q_proj")} == {"text"}


def test_m17_experts_activations_scale_with_experts_per_token():
    mixtral = model("Mixtral-8x7B-v0.1")
    stack = Stack(method="full", sequence_length=4096, activation_checkpointing="none")
    two = estimate_memory(mixtral, stack)
    one = estimate_memory(replace(mixtral, experts_per_token=1), stack)
    per_token = (two.phases["forward"] - one.phases["forward"]) / 4096 / mixtral.num_hidden_layers
    # One expert more: gate and up (one tensor), their activation and product, 14,336 wide, two bytes each; and
    # copies of the hidden state on the way in and out.
    assert per_token == pytest.approx(2 * (4 * 14_336 + 2 * 4096), rel=0.02)
    assert any("1.25 times" in note for note in two.notes)
