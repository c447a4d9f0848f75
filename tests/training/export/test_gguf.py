"""GGUF of each family that is written, read back by transformers; tokenizers of both kinds."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from shardwise.errors import RuleError
from shardwise.training.export.compare import difference, logits
from shardwise.training.export.gguf_file import write_gguf
from shardwise.training.export.main import LIMITS, _read_gguf
from shardwise.training.export.write import copy_tokenizer


def family(kind: str, folder: Path, tokenizer: Path) -> Path:
    """A tiny random model of one family, its norms and biases not those it starts with."""
    import transformers as t

    sizes = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
    model, config, more = {
        "mistral": (t.MistralForCausalLM, t.MistralConfig, {"sliding_window": None}),
        "qwen2": (t.Qwen2ForCausalLM, t.Qwen2Config, {"tie_word_embeddings": True}),
        "qwen3": (t.Qwen3ForCausalLM, t.Qwen3Config, {"head_dim": 16}),
        "phi3": (t.Phi3ForCausalLM, t.Phi3Config, {"pad_token_id": 0, "eos_token_id": 2}),
        "gemma2": (t.Gemma2ForCausalLM, t.Gemma2Config, {"head_dim": 16}),
        "gemma3": (t.Gemma3ForCausalLM, t.Gemma3TextConfig, {"head_dim": 16}),
        "gpt2": (t.GPT2LMHeadModel, t.GPT2Config, {}),
    }[kind]
    torch.manual_seed(0)
    made = model(config(**{**sizes, **more}))
    with torch.no_grad():
        for name, weight in made.named_parameters():
            if name.endswith(("norm.weight", "bias")):
                weight.add_(0.2 * torch.randn_like(weight))
    made.save_pretrained(folder)
    copy_tokenizer(tokenizer, folder)
    return folder


ROWS = [[5, 9, 40, 33, 7, 120, 200, 19] * 6]


@pytest.mark.parametrize("kind", ["mistral", "qwen2", "qwen3", "phi3", "gemma2", "gemma3"])
def test_gguf_of_other_families_reads_back_as_the_same_model(
    kind: str, tmp_path: Path, tiny_model: Path
) -> None:

    folder = family(kind, tmp_path / "model", tiny_model)
    wanted = AutoModelForCausalLM.from_pretrained(folder)
    for number_type in ("f16", "q8_0"):
        file = tmp_path / f"{number_type}.gguf"
        write_gguf(folder, file, number_type, "toy")
        again, how = _read_gguf(file, wanted.config)
        assert bool(how) == (kind == "qwen3")  # transformers' reader takes Qwen 3's heads for 128 wide
        found = difference(logits(wanted, ROWS), logits(again, ROWS))
        assert found.relative < LIMITS[number_type] / 5, (kind, found)


def test_gguf_of_a_family_that_cannot_be_checked_is_refused_with_a_way_out(
    tmp_path: Path, tiny_model: Path
) -> None:

    with pytest.raises(RuleError, match="'gpt2' cannot be written") as caught:
        write_gguf(family("gpt2", tmp_path / "model", tiny_model), tmp_path / "x.gguf", "f16", "toy")
    assert "qwen3" in caught.value.why and "--to merged" in caught.value.hint


def test_gguf_keeps_a_tokenizer_that_came_from_sentencepiece(tmp_path: Path, tiny_model: Path) -> None:
    """Pieces with a fallback to bytes: GGUF has scores for them, and no merges."""
    from tokenizers import Tokenizer, decoders, models, normalizers, trainers
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    folder = family("mistral", tmp_path / "model", tiny_model)
    trainer = trainers.BpeTrainer(vocab_size=60, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False)
    learned = Tokenizer(models.BPE(unk_token="<unk>"))
    space = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    learned.normalizer = space
    learned.train_from_iterator(["the quick brown fox jumps over the lazy dog"] * 4, trainer)
    tree = json.loads(learned.to_str())["model"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    tokens += [t for t in sorted(tree["vocab"], key=tree["vocab"].get) if t not in tokens][:61]
    merges = [tuple(m) for m in tree["merges"] if m[0] in tokens and m[1] in tokens and "".join(m) in tokens]
    whole = Tokenizer(
        models.BPE(
            {t: i for i, t in enumerate(tokens)}, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True
        )
    )
    whole.normalizer = space
    whole.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        (folder / name).unlink(missing_ok=True)
    ours = PreTrainedTokenizerFast(
        tokenizer_object=whole, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )
    ours.save_pretrained(folder)
    write_gguf(folder, tmp_path / "x.gguf", "f16", "toy")
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file="x.gguf")
    for text in ("the quick brown fox", "lazy dogs jump", "ünïcode \N{GRINNING FACE}"):
        ids = ours(text, add_special_tokens=False)["input_ids"]
        assert theirs(text, add_special_tokens=False)["input_ids"] == ids
        assert theirs.decode(ids) == ours.decode(ids)
