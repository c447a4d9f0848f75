"""Kernels are installed where they agree with the original, and nowhere else."""

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from shardwise.training.kernels.install import install

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


def llama(seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**SIZES))


def adapted(**options: Any) -> nn.Module:
    config = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights=False, **options)
    torch.manual_seed(1)
    return get_peft_model(llama(), config)


def step(model: nn.Module) -> list[torch.Tensor]:
    ids = torch.randint(0, 64, (2, 11), generator=torch.Generator().manual_seed(3))
    model.zero_grad()
    logits = model(input_ids=ids, use_cache=False).logits
    logits.square().mean().backward()
    return [logits.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("build", [llama, adapted], ids=["full", "lora"])
def test_a_step_with_kernels_is_the_step_without(build: Any, checkpointed: bool) -> None:
    plain, fast = build(), build()
    names = list(fast.state_dict())
    installed = install(fast)
    assert installed.counts["LlamaRMSNorm"] == 5 and installed.counts["LlamaMLP"] == 2
    assert installed.counts.get("Linear", 0) == (14 if build is adapted else 0)
    assert not installed.skipped
    assert list(fast.state_dict()) == names
    if checkpointed:
        for m in (plain, fast):
            base = m.get_base_model() if build is adapted else m
            base.gradient_checkpointing_enable({"use_reentrant": False})
            base.enable_input_require_grads()
            m.train()
    for a, b in zip(step(fast), step(plain), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_adapters_are_left_as_they_were_and_no_random_number_is_used() -> None:
    model = adapted()
    before, random = {n: p.clone() for n, p in model.named_parameters()}, torch.get_rng_state()
    install(model)
    assert torch.equal(torch.get_rng_state(), random)
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name]) and p.grad is None


@pytest.mark.parametrize("options", [{"use_dora": True}, {"lora_dropout": 0.5}], ids=["dora", "dropout"])
def test_other_kinds_of_adapters_keep_pefts_forward(options: dict[str, Any]) -> None:
    plain, fast = adapted(**options), adapted(**options)
    install(fast)
    torch.manual_seed(5)
    expected = step(plain.train())
    torch.manual_seed(5)
    for a, b in zip(step(fast.train()), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_disabled_and_merged_adapters_are_obeyed() -> None:
    plain, fast = adapted(), adapted()
    install(fast)
    ids = torch.arange(6)[None]
    with torch.no_grad(), plain.disable_adapter(), fast.disable_adapter():
        torch.testing.assert_close(fast(ids).logits, plain(ids).logits)
    fast.merge_adapter()
    with torch.no_grad():
        torch.testing.assert_close(fast(ids).logits, plain(ids).logits, rtol=1e-4, atol=1e-5)


def test_a_norm_of_another_formula_is_left_alone_with_a_reason() -> None:
    """Gemma multiplies by 1 + weight."""
    torch.manual_seed(0)
    model = Gemma2ForCausalLM(Gemma2Config(**SIZES))
    installed = install(model)
    assert "Gemma2RMSNorm" not in installed.counts
    assert "of its size" in installed.skipped["Gemma2RMSNorm"]
    assert type(model.model.norm).__mro__[1].__name__ != "_Norm"


def test_norms_of_heads_get_the_kernel_too() -> None:
    torch.manual_seed(0)
    plain = Qwen3ForCausalLM(Qwen3Config(**SIZES))
    torch.manual_seed(0)
    fast = Qwen3ForCausalLM(Qwen3Config(**SIZES))
    assert install(fast).counts["Qwen3RMSNorm"] == 9
    for a, b in zip(step(fast), step(plain), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_a_part_that_someone_listens_to_is_called() -> None:
    """ZeRO-3 gathers weights in hooks of the modules that own them."""
    model, called = adapted(), []
    install(model)
    layer = model.get_base_model().model.layers[0]
    watched = (
        layer.mlp.down_proj,
        layer.self_attn.q_proj.base_layer,
        layer.self_attn.q_proj.lora_A["default"],
    )
    for module in watched:
        module.register_forward_pre_hook(lambda m, args: called.append(m))
    step(model)
    assert [sum(c is m for c in called) for m in watched] == [1, 1, 1]
