"""One parsed row -> one example. Formats are recognised by their fields.

messages           {"messages": [{"role": "user", "content": "..."}, ...], "tools": [...]}
sharegpt           {"conversations": [{"from": "human", "value": "..."}, ...], "system": "..."}
alpaca             {"instruction": "...", "input": "...", "output": "..."}
prompt_completion  {"prompt": "...", "completion": "..."}, or question/answer, prompt/response, input/output
preference         {"prompt": ..., "chosen": ..., "rejected": ...}
text               {"text": "..."}
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from shardwise.data.conversations import Message, RowProblem, conversation, text_of_content
from shardwise.errors import DataError

PAIRS = (
    ("prompt", "completion"),
    ("prompt", "response"),
    ("question", "answer"),
    ("query", "response"),
    ("input", "output"),
    ("question", "response"),
    ("prompt", "answer"),
    ("query", "answer"),
    ("problem", "solution"),
)
_WEIGHTS = ("weight", "train", "loss")
# Of rows that are plain text: what they would lose in silence.
_NO_PLACE = {"history": "earlier turns", "system": "a system text", "system_prompt": "a system text"}
ALPACA_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
)
ALPACA_PLAIN = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request."
    "\n\n### Instruction:\n{instruction}\n\n### Response:\n"
)


@dataclass(frozen=True)
class Chat:
    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True)
class Pair:
    """Plain text: `prompt` untrained, `completion` trained, then an end token."""

    prompt: str
    completion: str


@dataclass(frozen=True)
class Text:
    text: str
    whole: bool = True  # False: the document goes on in the next one; no end token


@dataclass(frozen=True)
class Preference:
    """What both answers share, and the two ways to go on."""

    prompt: tuple[Message, ...]
    chosen: tuple[Message, ...]
    rejected: tuple[Message, ...]


Example = Chat | Pair | Text | Preference


def recognise(row: Any) -> str | None:
    """The format of a row, by its fields; None when there is no telling."""
    if not isinstance(row, dict):
        return None
    if "chosen" in row and "rejected" in row:
        return "preference"
    if "messages" in row:
        return "sharegpt" if _spelt_from_value(row["messages"]) else "messages"
    if "conversations" in row or "conversation" in row:
        turns = row.get("conversations", row.get("conversation"))
        return "sharegpt" if _spelt_from_value(turns) or not turns else "messages"
    if "instruction" in row and ("output" in row or "response" in row):
        return "alpaca"
    if _pair_of(row):
        return "prompt_completion"
    return "text" if "text" in row else None


def reader_of(name: str) -> Callable[[Any], Example]:
    """The function that turns a row of a format into an example. It raises RowProblem with the reason."""
    return _READERS[name]


def unrecognised(file: str, rows: Iterable[Any]) -> DataError:
    """The error for a file whose rows look like nothing known."""
    fields = next((sorted(map(str, r)) for r in rows if isinstance(r, dict)), None)
    found = (
        f"its rows have the fields {', '.join(fields)}" if fields else "its rows are not objects with fields"
    )
    return DataError(
        f"the format of '{file}' is not recognised",
        f"{found}; known are messages, conversations, instruction/output, prompt/completion, "
        "chosen/rejected and text",
        "rename the fields, or say which it is with format: messages (or sharegpt, alpaca, "
        "prompt_completion, text)",
    )


def _spelt_from_value(turns: Any) -> bool:
    turns = _parsed(turns)
    return isinstance(turns, list) and any(isinstance(t, dict) and "from" in t for t in turns)


def _pair_of(row: dict[str, Any]) -> tuple[str, str] | None:
    return next((pair for pair in PAIRS if pair[0] in row and pair[1] in row), None)


def _parsed(value: Any) -> Any:
    """A list kept as JSON text in a table cell -> the list."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value


def _text(row: dict[str, Any], field: str, need: bool = True) -> str:
    """A field that must be text; blank is allowed when not needed."""
    value = row.get(field)
    if value is None and field not in row and need:
        raise RowProblem(f"field '{field}' is missing")
    if value is None or value == "":
        if need:
            raise RowProblem(f"field '{field}' is empty")
        return ""
    if not isinstance(value, str):
        raise RowProblem(f"field '{field}' is {kind(value)}, text is needed")
    if need and not value.strip():
        raise RowProblem(f"field '{field}' is blank")
    return value


def kind(value: Any) -> str:
    """A JSON value's kind in words, with the value when it is short."""
    if isinstance(value, bool):
        return f"true or false ({json.dumps(value)})"
    if isinstance(value, int | float):
        return f"a number ({value})"
    return {list: "a list", dict: "an object", str: "text", type(None): "null"}.get(type(value), "no text")


def _object(row: Any) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise RowProblem(f"the row is {kind(row)}, an object with fields is needed")
    return row


def _plain(row: dict[str, Any]) -> None:
    for field, what in _NO_PLACE.items():
        if row.get(field) and _parsed(row[field]) != []:
            raise RowProblem(
                f"field '{field}' holds {what}, for which plain text has no place: write messages"
            )


def _read_messages(row: Any) -> Example:
    row = _object(row)
    turns = row.get("messages", row.get("conversations", row.get("conversation")))
    return Chat(*conversation(_parsed(turns), row.get("tools"), row.get("system")))


def _read_sharegpt(row: Any) -> Example:
    row = _object(row)
    turns = _parsed(row.get("conversations", row.get("conversation", row.get("messages"))))
    if isinstance(turns, list):
        turns = [
            {"role": t.get("from"), "content": t.get("value"), **{k: t[k] for k in _WEIGHTS if k in t}}
            if isinstance(t, dict) and "from" in t
            else t
            for t in turns
        ]
    return Chat(*conversation(turns, row.get("tools"), row.get("system")))


def _read_alpaca(row: Any) -> Example:
    row = _object(row)
    _plain(row)
    instruction = _text(row, "instruction")
    context = _text(row, "input", need=False)
    answer = _text(row, "output" if "output" in row else "response")
    form = ALPACA_INPUT if context.strip() else ALPACA_PLAIN
    filled = form.replace("{instruction}", instruction, 1)
    if context.strip():
        head, tail = form.split("{input}")
        filled = head.replace("{instruction}", instruction, 1) + context + tail
    return Pair(filled, answer)


def _read_pair(row: Any) -> Example:
    row = _object(row)
    pair = _pair_of(row) or next((p for p in PAIRS if p[0] in row), PAIRS[0])
    prompt, completion = (_parsed(row.get(field)) for field in pair)
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], dict):  # a chat cut before its answer
        rest = completion if isinstance(completion, list) else [{"role": "assistant", "content": completion}]
        return Chat(*conversation([*prompt, *rest], row.get("tools"), row.get("system")))
    _plain(row)
    return Pair(_text(row, pair[0], need=False), _text(row, pair[1]))


def _read_text(row: Any) -> Example:
    if isinstance(row, str):
        row = {"text": row}
    row = _object(row)
    return Text(_text(row, "text"), whole="\0part" not in row)


def _read_preference(row: Any) -> Example:
    row = _object(row)
    prompt = _parsed(row.get("prompt"))
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}] if prompt.strip() else []
    elif prompt is None:
        prompt = []
    both = []
    for side in ("chosen", "rejected"):
        turns = _parsed(row.get(side))
        if isinstance(turns, str):
            turns = [{"role": "assistant", "content": turns}]
        if not isinstance(turns, list) or not turns:
            raise RowProblem(f"field '{side}' is {kind(turns)}, an answer or a list of turns is needed")
        whole = [*prompt, *turns] if turns[: len(prompt)] != prompt else turns
        both.append(conversation(whole, row.get("tools"), row.get("system"))[0])
    chosen, rejected = both
    shared = 0
    while shared < min(len(chosen), len(rejected)) and chosen[shared] == rejected[shared]:
        shared += 1
    if shared == len(chosen) or shared == len(rejected):
        raise RowProblem("chosen and rejected are the same")
    if not shared:
        raise RowProblem("chosen and rejected share no prompt")
    return Preference(chosen[:shared], chosen[shared:], rejected[shared:])


_READERS: dict[str, Callable[[Any], Example]] = {
    "messages": _read_messages,
    "sharegpt": _read_sharegpt,
    "alpaca": _read_alpaca,
    "prompt_completion": _read_pair,
    "preference": _read_preference,
    "text": _read_text,
}

__all__ = [
    "Chat",
    "Example",
    "Pair",
    "Preference",
    "Text",
    "kind",
    "reader_of",
    "recognise",
    "text_of_content",
]
