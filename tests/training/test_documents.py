"""Packed documents do not see each other, and a packed row's loss is the sum of its documents' losses."""

from pathlib import Path

import numpy as np
import pytest
import torch
from flash_stand_in import stand_in
from transformers import AutoConfig, AutoModelForCausalLM

from shardwise.training.attention import NAME
from shardwise.training.batches import MicroBatch, pack_documents
from shardwise.training.model import LossModel

# family -> sizes beside the common ones
FAMILIES: dict[str, dict[str, object]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "mistral": {"sliding_window": 4},
    "gemma2": {"head_dim": 8, "sliding_window": 4, "query_pre_attn_scalar": 8},
    "gemma3_text": {"head_dim": 8, "sliding_window": 4, "query_pre_attn_scalar": 8},
    "phi3": {"pad_token_id": 0},
    "granite": {"logits_scaling": 4.0},
    "gpt_oss": {"head_dim": 8, "num_local_experts": 4, "sliding_window": 4},
    "gpt_neox": {},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "olmo2": {},
    "cohere": {"logit_scale": 0.5},
}
BACKENDS = (NAME, "eager", "sdpa", "flex_attention", "flash_attention_2")


def tiny(family: str, attention: str = NAME) -> torch.nn.Module:
    sizes = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    }  # fmt: skip
    torch.manual_seed(1)
    config = AutoConfig.for_model(family, **{**sizes, **FAMILIES[family]})
    built_as = "eager" if attention.startswith("flash") else attention  # its package is for GPUs only
    model = AutoModelForCausalLM.from_config(config, attn_implementation=built_as, dtype=torch.float32)
    model.config._attn_implementation = attention
    for parameter in model.parameters():  # sinks and norms that start at 0 or 1 would hide mistakes
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, mean=1.0, std=0.2)
    return model


def document(length: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    ids = np.random.default_rng(seed).integers(3, 64, length).astype(np.int32)
    labels = ids.copy()
    labels[: length // 3] = -100
    return ids, labels


def logits(module: LossModel, batch: MicroBatch) -> torch.Tensor:
    """(T, V) through the very call that training makes."""
    from shardwise.training.model import _attention_arguments

    model = module.causal_lm
    extra = _attention_arguments(batch, model.config._attn_implementation)
    return model(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False, **extra).logits[
        0
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_d07_packed_loss_is_the_sum_of_documents(family: str) -> None:
    """Also the check that our head equals the family's own: the expected value comes from its logits."""
    module = LossModel(tiny(family), "chunked").eval()
    documents = [document(9, 1), document(14, 2), document(3, 3)]
    packed = module(pack_documents(documents)).item()
    alone = 0.0
    reference = tiny(family, "eager").eval()
    for ids, labels in documents:
        out = reference(input_ids=torch.from_numpy(ids.astype(np.int64))[None]).logits[0].float()
        targets = torch.from_numpy(labels.astype(np.int64))
        alone += torch.nn.functional.cross_entropy(out[:-1], targets[1:], reduction="sum").item()
    assert packed == pytest.approx(alone, rel=1e-4)


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlexAttention as torch defines it, uncompiled; FlashAttention by its definition: the kernels need a GPU."""
    import torch.nn.attention.flex_attention as flex
    from transformers.integrations import flex_attention

    monkeypatch.setattr(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    plain = flex.flex_attention
    monkeypatch.setattr(
        flex_attention,
        "compile_friendly_flex_attention",
        lambda q, k, v, training=False, **more: plain(q, k, v, **more),
    )
    stand_in(monkeypatch)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.filterwarnings("ignore:.*flex_attention.*", "ignore:.*FLEX_ATTENTION.*")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3"])
def test_d07_changing_one_document_changes_no_logit_of_another(family: str, backend: str) -> None:
    module = LossModel(tiny(family, backend), "chunked").eval()
    second = document(11, 5)
    with torch.no_grad():
        one = logits(module, pack_documents([document(8, 1), second, document(3, 6)]))
        other = logits(module, pack_documents([document(8, 2), second, document(3, 7)]))
        alone = logits(LossModel(tiny(family, "eager"), "chunked").eval(), pack_documents([second]))
    assert (one[:8] - other[:8]).abs().max() > 1e-3  # the change did something
    assert (one[8:19] - other[8:19]).abs().max() < 1e-5
    assert (one[8:19] - alone).abs().max() < 1e-4


def test_d07_positions_restart_and_first_labels_are_masked() -> None:
    batch = pack_documents([document(3, 1), document(4, 2)])
    assert batch.position_ids[0].tolist() == [0, 1, 2, 0, 1, 2, 3]
    ids = np.arange(3, dtype=np.int32)
    all_labelled = pack_documents([(ids, ids), (ids, ids)])
    assert all_labelled.positions.tolist() == [0, 1, 3, 4]
    assert all_labelled.targets.tolist() == [1, 2, 1, 2]


def test_a_rank_without_rows_takes_part_with_no_label() -> None:
    from shardwise.training.batches import pack

    module = LossModel(tiny("llama"), "chunked")
    batch = pack(None, [])  # type: ignore[arg-type]
    loss = module(batch)
    loss.backward()
    assert loss.item() == 0.0
    assert all(p.grad is None or p.grad.abs().max() == 0 for p in module.parameters())


def test_full_loss_equals_chunked_loss(tiny_model: Path) -> None:
    model = tiny("llama")
    batch = pack_documents([document(9, 1), document(14, 2)])
    chunked, full = LossModel(model, "chunked")(batch), LossModel(model, "full")(batch)
    torch.testing.assert_close(chunked, full)
