"""Toy tokenizers: every byte is a token, so that any text round-trips, and control tokens are what a test says."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shardwise.data import Prepared
from shardwise.data.tokenizer import Tokenizer

INPUTS = Path(__file__).parent / "inputs"
CONTROL = (
    "<s>",
    "</s>",
    "<|im_start|>",
    "<|im_end|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<start_of_turn>",
    "<end_of_turn>",
    "[INST]",
    "[/INST]",
    "[SYSTEM_PROMPT]",
    "[/SYSTEM_PROMPT]",
)
# As SmolLM2-Instruct ships it: no generation marks, a system text of its own, pad token = end token.
SMOL = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful toy<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Drops the reasoning of all answers but the last, as reasoning models' templates do.
REWRITING = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' and not loop.last %}{{ m['content'].split('</think>')[-1] }}"
    "{% else %}{{ m['content'] }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# As Qwen3's: reasoning stands in the answers after the last question only, empty where there is none; a prompt
# without reasoning ends with the empty block.
THINKING = (
    "{%- set ns = namespace(last=0) -%}"
    "{%- for m in messages -%}{%- if m['role'] == 'user' -%}"
    "{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}"
    "{%- for m in messages -%}"
    "{%- set said = m['content'].split('</think>')[-1].lstrip('\n') -%}"
    "{%- set thought = m.reasoning_content or '' -%}"
    "{%- if not thought and '</think>' in m['content'] -%}"
    "{%- set thought = m['content'].split('</think>')[0].split('<think>')[-1].strip('\n') -%}{%- endif -%}"
    "{{- '<|im_start|>' + m['role'] + '\n' -}}"
    "{%- if m['role'] == 'assistant' and loop.index0 > ns.last and (loop.last or thought) -%}"
    "{{- '<think>\n' + thought + '\n</think>\n\n' + said -}}"
    "{%- elif m['role'] == 'assistant' -%}{{- said -}}{%- else -%}{{- m['content'] -}}{%- endif -%}"
    "{{- '<|im_end|>\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}"
    "{%- if enable_thinking is defined and enable_thinking is false -%}{{- '<think>\n\n</think>\n\n' -}}{%- endif -%}"
    "{%- endif -%}"
)


def make_tokenizer(
    folder: Path, template: str | None = SMOL, end: str = "<|im_end|>", adds_bos: bool = False
) -> Path:
    """A model folder with a byte-level tokenizer of 256 bytes, " hi" and the control tokens."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
    from tokenizers import Tokenizer as Backend
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: i for i, char in enumerate(alphabet)}
    merges = (
        [("h", "i"), ("Ġ", "hi"), ("ab", "cd")] if "ab" in vocab else [("h", "i"), ("Ġ", "hi"), ("a", "b")]
    )
    for a, b in merges:
        vocab[a + b] = len(vocab)
    backend = Backend(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in CONTROL])
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]
        )
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token=end, pad_token=end)
    fast.chat_template = template
    fast.save_pretrained(folder)
    return folder


def make_piece_tokenizer(folder: Path, kind: str) -> Path:
    """A tokenizer in the manner of SentencePiece: spaces are ▁ and, except for `gemma`, one is put first."""
    from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
    from tokenizers import Tokenizer as Backend
    from transformers import PreTrainedTokenizerFast

    pieces = [
        "<unk>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *"▁abcdefghijklmnopqrstuvwxyz.",
        "▁h",
        "▁hi",
    ]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    merges = [("▁", "h"), ("▁h", "i")]
    backend = Backend(
        models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    )
    if kind == "metaspace":
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        spaces = normalizers.Replace(" ", "▁")
        backend.normalizer = (
            normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if kind == "llama" else spaces
        )
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in CONTROL])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    fast.chat_template = SMOL
    fast.save_pretrained(folder)
    return folder


def write_rows(path: Path, rows: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def chat(*turns: str, system: str | None = None) -> dict[str, Any]:
    """user, assistant, user, ... as a row."""
    messages = [{"role": ("user", "assistant")[i % 2], "content": t} for i, t in enumerate(turns)]
    return {"messages": ([{"role": "system", "content": system}] if system else []) + messages}


def trained_text(prepared: Prepared, i: int, tokenizer: Tokenizer) -> str:
    ids, labels = prepared.train.row(i)
    assert len(ids) == len(labels) and ((labels == -100) | (labels == ids)).all() and labels[0] == -100
    return tokenizer.text_of(labels[labels != -100].tolist())


def whole_text(prepared: Prepared, i: int, tokenizer: Tokenizer) -> str:
    return tokenizer.text_of(prepared.train.row(i)[0].tolist())
