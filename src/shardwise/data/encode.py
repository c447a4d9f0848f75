"""Examples -> token ids and marks: exactly the assistant's text and its end token are trained.

A chat is rendered once whole, and once as the prompt of each answer. Where a prompt is a prefix of the whole,
the rest up to the end token is what the model has to write: that part is trained. This needs no generation
marks in the template. The text is tokenized in pieces cut at these places, so the tokens before an answer are
the very tokens that the model sees when it is asked to answer. Where a template renders an earlier answer
differently once other turns follow (some drop its reasoning), that answer carries no label, and is counted.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from shardwise.data.conversations import Message, RowProblem, conversation
from shardwise.data.formats import Chat, Example, Pair, Preference, Text
from shardwise.data.sandbox import TemplateRefusal
from shardwise.data.store import INSIDE_CHARACTER, TRAINED
from shardwise.data.templates import ChatTemplate
from shardwise.data.tokenizer import Tokenizer
from shardwise.errors import DataError

REWRITTEN = "an earlier answer that the template rewrites, not trained"
_QUOTE = 0x100000  # private use plane: control-token text of a row while its template runs
_PRIVATE = re.compile("[\U000f0000-\U0010ffff]")  # both planes that stand-ins come from


@dataclass
class Encoded:
    """ids (T,) int32, marks (T,) uint8 (store.TRAINED, store.INSIDE_CHARACTER); `answers` of a chat with a label."""

    ids: np.ndarray
    marks: np.ndarray
    text: bool
    ended: bool
    notes: tuple[str, ...] = ()
    answers: int = 0


@dataclass
class _Plan:
    text: str
    spans: list[tuple[int, int]]  # character ranges that are trained
    special: bool = False  # let the tokenizer add its own tokens (bos)
    add_end: bool = False
    document: bool = False
    quoted: dict[str, str] | None = None  # not None: control-token text is only text (encode_guarded)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class Encoder:
    """`train_on`: assistant, or all (every token carries a label)."""

    tokenizer: Tokenizer
    template: ChatTemplate | None
    train_on: str = "assistant"

    @cached_property
    def _control(self) -> re.Pattern[str] | None:
        names = self.tokenizer.control
        return re.compile("|".join(re.escape(n) for n in names)) if names else None

    def encode(self, examples: Sequence[Example]) -> Iterator[Encoded | RowProblem]:
        """One result per example, in order."""
        plans: list[_Plan | RowProblem] = []
        for example in examples:
            try:
                plans.append(self._plan(example))
            except RowProblem as problem:
                plans.append(problem)
        batches = self._tokenize([p for p in plans if isinstance(p, _Plan)])
        for plan in plans:
            if isinstance(plan, RowProblem):
                yield plan
                continue
            found = next(batches)
            yield found if isinstance(found, RowProblem) else self._finish(plan, *found)

    def _finish(self, plan: _Plan, ids: np.ndarray, marks: np.ndarray) -> Encoded:
        end = self.tokenizer.end
        if plan.add_end and end is not None and (len(ids) == 0 or int(ids[-1]) != end):
            ids = np.append(ids, np.int32(end))
            marks = np.append(marks, np.uint8(TRAINED))
        elif plan.add_end and len(ids):
            marks[-1] |= TRAINED
        if self.train_on == "all":
            marks |= TRAINED
        trained = np.flatnonzero(marks & TRAINED)
        ended = bool(len(trained)) and int(ids[trained[-1]]) in self.ends
        return Encoded(ids, marks, plan.document, ended, tuple(plan.notes), len(plan.spans))

    @cached_property
    def ends(self) -> frozenset[int]:
        ends = {self.tokenizer.end}
        if self.template is not None and self.template.end:
            ends.add(self.tokenizer.control[self.template.end])
        return frozenset(i for i in ends if i is not None)

    # -- examples to text and trained character ranges

    def _plan(self, example: Example) -> _Plan:
        if isinstance(example, Chat):
            return self._chat_plan(example)
        if isinstance(example, Pair):
            completion = example.completion
            end = self.tokenizer.end_text
            if end and completion.endswith(end) and completion != end:
                completion = completion[: -len(end)]
            text = example.prompt + completion
            return self._plain(text, [(len(example.prompt), len(text))], add_end=True)
        if isinstance(example, Text):
            plan = self._plain(example.text, [(0, len(example.text))], add_end=example.whole)
            plan.document = True
            return plan
        assert isinstance(example, Preference)
        raise RowProblem("a preference pair cannot be trained on with this method")

    def _plain(self, text: str, spans: list[tuple[int, int]], add_end: bool) -> _Plan:
        plan = _Plan(text, spans, special=True, add_end=add_end)
        if self._control and self._control.search(text):
            plan.quoted = {}
            plan.notes.append("control-token text, kept as plain text")
        return plan

    def _chat_plan(self, chat: Chat) -> _Plan:
        template = self.template
        if template is None:
            raise DataError("chats need a chat template", "none is given", "set model.chat_template")
        notes: list[str] = []
        messages, quoted = self._quote(chat.messages, notes)
        if any(m.get("tool_calls") for m in messages) and template.arguments is None:
            raise RowProblem("the chat template does not write tool calls")
        messages = template.shaped(messages)
        try:
            whole = template.raw(messages, False, chat.tools, _reasons(messages))
            spans = self._answers(template, messages, chat.tools, whole, notes)
        except TemplateRefusal as problem:
            raise RowProblem(f"the chat template refuses it: {problem}") from None
        if not spans:
            raise RowProblem("no answer is left to train on (every one has weight 0)")
        plan = _Plan(whole, spans, quoted=quoted or None, notes=notes)
        if not template.end:  # the template never says that an answer is over
            plan.text = whole[: spans[-1][1]]
            plan.add_end = True
        return plan

    def _answers(
        self,
        template: ChatTemplate,
        messages: list[Message],
        tools: Sequence[dict[str, Any]],
        whole: str,
        notes: list[str],
    ) -> list[tuple[int, int]]:
        """Character ranges of the answers in `whole`, each with its end token."""
        spans = []
        reasons = _reasons(messages)
        for i, message in enumerate(messages):
            if message["role"] != "assistant" or message.get("weight") == 0:
                continue
            last = i == len(messages) - 1
            start = template.raw(messages[:i], True, tools, reasons)
            until = whole if last else template.raw(messages[: i + 1], False, tools, reasons)
            if not until.startswith(start):
                if last:
                    raise RowProblem(
                        "the chat template renders the prompt differently from the finished chat"
                    )
                notes.append(REWRITTEN)
                continue
            first, ends = self._turn(template, message, until, len(start))
            end = next((end for end in ends if whole.startswith(until[:end])), None)
            if end is None:
                notes.append(REWRITTEN)
                continue
            if message.get("reasoning_content", "").strip() not in until[first:end]:
                notes.append("reasoning that the chat template does not write, left out")
            spans.append((first, end))
        return spans

    def _turn(self, template: ChatTemplate, message: Message, text: str, start: int) -> tuple[int, list[int]]:
        """Where one answer begins in a text that ends with it, and where it may end, the likeliest first."""
        content = message["content"].strip()
        at = text.find(content, start) if content else start
        calls = bool(message.get("tool_calls"))
        first = start
        if at >= 0 and not calls and not template.prompts and text[start:at].strip():
            first = at  # no answer header in prompts: it stands between prompt and content
        after = max(at, start) + len(content)
        found = list(self._control.finditer(text, after)) if self._control and template.end else []
        if content and not calls:
            close = next((i for i, m in enumerate(found) if not text[after : m.start()].strip()), None)
        else:
            close = len(found) - 1 if found else None
        if close is None:
            return first, [len(text.rstrip()) if text[after:].strip() else after]
        ends = [found[close].end()]
        for follower in found[
            close + 1 :
        ]:  # some turns end with two control tokens, one right after the other
            if follower.start() != ends[0]:
                break
            ends.insert(0, follower.end())
        return first, ends

    def _quote(self, messages: Sequence[Message], notes: list[str]) -> tuple[list[Message], dict[str, str]]:
        """Control-token text in contents -> stand-ins, so that the template's own can be told from it."""
        names = list(self.tokenizer.control)
        if not self._control or not any(self._control.search(t) for m in messages for t in _texts(m)):
            return list(messages), {}
        stand_in = {name: chr(_QUOTE + i) for i, name in enumerate(names)}
        if any(_PRIVATE.search(t) for m in messages for t in _texts(m)):
            raise RowProblem("it holds control-token text and private-use characters")
        pattern = self._control

        def quote(value: Any) -> Any:
            if isinstance(value, str):
                return pattern.sub(lambda m: stand_in[m[0]], value)
            if isinstance(value, dict):
                return {quote(k): quote(v) for k, v in value.items()}
            return [quote(v) for v in value] if isinstance(value, list | tuple) else value

        end = self.template.end if self.template else ""
        out = []
        for message in messages:
            content = message["content"]
            if message["role"] == "assistant" and end and content.endswith(end) and content != end:
                message = message | {"content": content[: -len(end)]}
            out.append({k: v if k == "role" else quote(v) for k, v in message.items()})
        used = {
            char: name for name, char in stand_in.items() if any(char in t for m in out for t in _texts(m))
        }
        if used:
            notes.append("control-token text in a turn, kept as plain text")
        return out, used

    # -- text to tokens

    def _tokenize(self, plans: list[_Plan]) -> Iterator[tuple[np.ndarray, np.ndarray] | RowProblem]:
        plans = [self._guarded(p) for p in plans]
        pieces = [_pieces(p) if self._cut(p) else [(p.text, False)] for p in plans]
        groups: dict[bool, list[str]] = {True: [], False: []}
        for plan, parts in zip(plans, pieces, strict=True):
            if plan.quoted is None:
                groups[plan.special] += [text for text, _ in parts]
        encoded = {k: iter(self.tokenizer.encode(v, special=k)) if v else iter(()) for k, v in groups.items()}
        for plan, parts in zip(plans, pieces, strict=True):
            try:
                done = []
                for text, trained in parts:
                    if plan.quoted is None:
                        encoding = next(encoded[plan.special])
                        ids = np.array(encoding.ids, dtype=np.int32)
                    else:
                        ids, encoding = self.tokenizer.encode_guarded(text, plan.special, bool(plan.quoted))
                    marks = np.full(len(ids), TRAINED if trained else 0, np.uint8)
                    if not text.isascii():
                        marks |= _inside(encoding.offsets)
                    if not self._cut(plan):
                        marks |= _covered(encoding.offsets, plan.spans)
                        if self._swallows(plan, encoding.offsets):
                            ids, marks = self._apart(plan)
                    done.append((ids, marks))
                yield np.concatenate([d[0] for d in done]), np.concatenate([d[1] for d in done])
            except DataError as problem:
                yield RowProblem(f"{problem.what}: {problem.why}")

    def _guarded(self, plan: _Plan) -> _Plan:
        """The plan over the text that `encode_guarded` takes, where a control token is one character long."""
        if not plan.quoted:
            return plan
        text, spans = "", []
        for part, trained in _pieces(plan):
            guarded = self.tokenizer.guard(part, plan.quoted)
            if trained:
                spans.append((len(text), len(text) + len(guarded)))
            text += guarded
        return replace(plan, text=text, spans=spans)

    def _swallows(self, plan: _Plan, offsets: Sequence[tuple[int, int]]) -> bool:
        """Whether one token holds the end of a prompt and the beginning of its completion.

        With only white space of the prompt in it ("Answer: " + "hi" gives " hi") such a token is what the
        model knows, and is trained; with more, or as the first of the row, it would hide the completion.
        """
        if plan.document or not plan.spans or plan.spans[0][0] == 0 or not self.tokenizer.splits:
            return False
        edge = plan.spans[0][0]
        table = np.asarray(offsets, dtype=np.int64).reshape(-1, 2)
        across = np.flatnonzero((table[:, 0] < edge) & (table[:, 1] > edge))
        return len(across) > 0 and (
            int(across[0]) == 0 or bool(plan.text[int(table[across[0], 0]) : edge].strip())
        )

    def _apart(self, plan: _Plan) -> tuple[np.ndarray, np.ndarray]:
        """Ids and marks of a prompt and its completion tokenized apart, as the model meets them later."""
        edge = plan.spans[0][0]
        done = []
        for text, special, mark in ((plan.text[:edge], plan.special, 0), (plan.text[edge:], False, TRAINED)):
            if plan.quoted is None:
                encoding = self.tokenizer.encode([text], special)[0]
                ids = np.array(encoding.ids, dtype=np.int32)
            else:
                ids, encoding = self.tokenizer.encode_guarded(text, special, bool(plan.quoted))
            last = len(ids)
            while not mark and last and encoding.special_tokens_mask[last - 1]:
                last -= 1  # an end token that the tokenizer puts after every text
            marks = np.full(len(ids), mark, np.uint8)
            if not text.isascii():
                marks |= _inside(encoding.offsets)
            done.append((ids[:last], marks[:last]))
        return np.concatenate([d[0] for d in done]), np.concatenate([d[1] for d in done])

    def _cut(self, plan: _Plan) -> bool:
        """Whether to tokenize in pieces. Plain text is one text whose boundary is found by characters."""
        return not plan.special and self.tokenizer.splits

    def prompt(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> np.ndarray:
        """Ids (T,) of the prompt after which the model answers, made just as training rows are."""
        if self.template is None:
            raise DataError("chats need a chat template", "none is given", "set model.chat_template")
        try:
            turns, given = conversation(list(messages), list(tools), answered=False)
        except RowProblem as problem:
            raise DataError(
                "the prompt is no chat", str(problem), "give turns with role and content"
            ) from None
        shaped, quoted = self._quote(turns, [])
        shaped = self.template.shaped(shaped)
        try:
            text = self.template.raw(shaped, True, given, _reasons(shaped))
            spans = self._answers(self.template, shaped, given, text, [])
        except TemplateRefusal as problem:
            raise DataError("the chat template refuses the prompt", str(problem), "see its text") from None
        found = next(self._tokenize([_Plan(text, spans, quoted=quoted or None)]))
        if isinstance(found, RowProblem):
            raise DataError("the prompt cannot be tokenized", str(found))
        return found[0]


def _reasons(messages: Sequence[Message]) -> bool:
    """Whether an answer brings its reasoning along."""
    return any(m.get("reasoning_content") or "</think>" in m["content"] for m in messages)


def _pieces(plan: _Plan) -> list[tuple[str, bool]]:
    """(text, trained) in order, cut at the spans."""
    out, at = [], 0
    for first, end in plan.spans:
        out += [(plan.text[at:first], False), (plan.text[first:end], True)]
        at = end
    out.append((plan.text[at:], False))
    return [piece for piece in out if piece[0]]


def _inside(offsets: Sequence[tuple[int, int]]) -> np.ndarray:
    """Marks of tokens that go on with the character of the token before: (T,) uint8."""
    marks = np.zeros(len(offsets), np.uint8)
    if len(offsets) > 1:
        table = np.asarray(offsets, dtype=np.int64)
        inside = (table[1:, 0] < table[:-1, 1]) & (table[1:, 1] > table[1:, 0])
        marks[1:][inside] = INSIDE_CHARACTER
    return marks


def _covered(offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]) -> np.ndarray:
    """Marks of tokens with a character in a span: a token across its beginning is trained. (T,) uint8."""
    table = np.asarray(offsets, dtype=np.int64).reshape(-1, 2)
    marks = np.zeros(len(table), np.uint8)
    for first, end in spans:
        marks[(table[:, 1] > first) & (table[:, 0] < end) & (table[:, 1] > table[:, 0])] = TRAINED
    return marks


def _texts(value: Any) -> Iterator[str]:
    """Every text inside a message."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield str(key)
            yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)
