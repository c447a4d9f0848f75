"""A tokenizer.json -> the tokenizer part of a GGUF file: byte-level BPE, and BPE that came from SentencePiece."""

import json
from pathlib import Path
from typing import Any

from shardwise.errors import RuleError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # llama.cpp's token types
# tokenizer.ggml.pre, by what only this family's splitting expression has
_SPLITTERS = (("\\p{N}{1,3}", "llama-bpe"), ("\\p{N}", "qwen2"), ('"individual_digits": true', "smollm"))
_SPACE = "\u2581"  # what SentencePiece writes for a space


def write_tokenizer(writer: Any, model: Path, vocabulary: int) -> None:
    """Tokens, merges or scores, special tokens and the chat template. Raises RuleError for other kinds."""
    from transformers import AutoTokenizer

    text = (model / "tokenizer.json").read_text(encoding="utf-8")
    tree = json.loads(text)
    kind = tree["model"]["type"]
    pieces = kind == "BPE" and bool(tree["model"].get("byte_fallback"))
    if kind != "BPE" or not (pieces or "ByteLevel" in text):
        raise RuleError(
            f"a {kind} tokenizer is not written to GGUF here",
            "only BPE is, of bytes or with a fallback to them",
            "use --to merged, and llama.cpp's own convert_hf_to_gguf.py on the result",
        )
    tokens, types = _tokens(tree, vocabulary)
    merges = [m if isinstance(m, str) else " ".join(m) for m in tree["model"]["merges"]]
    if pieces:
        types = [
            BYTE if len(t) == 6 and t.startswith("<0x") else kind
            for t, kind in zip(tokens, types, strict=True)
        ]
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_list(tokens)
        writer.add_token_scores(_scores(tokens, merges))
        writer.add_token_types(types)
        writer.add_add_space_prefix(_adds_space(tree))
    else:
        pre = json.dumps(tree.get("pre_tokenizer"), ensure_ascii=False).replace("\\\\", "\\")
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(next((name for mark, name in _SPLITTERS if mark in pre), "gpt-2"))
        writer.add_token_list(tokens)
        writer.add_token_types(types)
        writer.add_token_merges(merges)
    full = AutoTokenizer.from_pretrained(model)
    for number, add in (
        (full.bos_token_id, writer.add_bos_token_id),
        (full.eos_token_id, writer.add_eos_token_id),
        (full.pad_token_id, writer.add_pad_token_id),
        (full.unk_token_id, writer.add_unk_token_id),
    ):
        if number is not None:
            add(number)
    writer.add_add_bos_token(False)  # the chat template writes it where it belongs
    if isinstance(full.chat_template, str):
        writer.add_chat_template(full.chat_template)


def _tokens(tree: dict[str, Any], vocabulary: int) -> tuple[list[str], list[int]]:
    """Every id's token and its type; ids that no token has are there and unused."""
    tokens = [f"[PAD{i}]" for i in range(vocabulary)]
    types = [UNUSED] * vocabulary
    for token, i in tree["model"]["vocab"].items():
        if i < vocabulary:
            tokens[i], types[i] = token, UNKNOWN if token == tree["model"].get("unk_token") else NORMAL
    for added in tree["added_tokens"]:
        i = added["id"]
        if i < vocabulary and types[i] != UNKNOWN:
            tokens[i], types[i] = added["content"], CONTROL if added["special"] else USER_DEFINED
    return tokens, types


def _scores(tokens: list[str], merges: list[str]) -> list[float]:
    """SentencePiece joins the pair whose piece has the highest score first: the earlier its merge, the higher."""
    first: dict[str, int] = {}
    for number, merge in enumerate(merges):
        left, _, right = merge.partition(" ")
        first.setdefault(left + right, number)
    return [-float(first.get(token, len(merges))) for token in tokens]


def _adds_space(tree: dict[str, Any]) -> bool:
    """Whether a space is put before a text: by a normalizer that prepends, or a Metaspace pre-tokenizer."""
    text = json.dumps([tree.get("normalizer"), tree.get("pre_tokenizer")], ensure_ascii=False)
    return (
        f'"prepend": "{_SPACE}"' in text
        or '"prepend_scheme": "first"' in text
        or '"prepend_scheme": "always"' in text
    )
