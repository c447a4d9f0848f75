"""A model's chat template: rendered in the sandbox, and asked at load what it does with unusual turns."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from shardwise.data.conversations import Message
from shardwise.data.sandbox import Template, TemplateRefusal
from shardwise.data.tokenizer import Tokenizer
from shardwise.errors import DataError

_FOLDER = Path(__file__).parent / "templates"
_SYSTEM, _USER, _ANSWER = "Qzsystemtextqz", "Qzusertextqz", "Qzanswertextqz"
_KEY, _VALUE = "qzkey", "qzvalue"
_MARK = re.compile(r"<\|[^\s|<>]{1,40}\|>|</?[a-z]+_of_turn>|\[/?[A-Z_]{3,20}\]")


def shipped() -> dict[str, Path]:
    """Name -> file of the templates that come with shardwise."""
    return {path.stem: path for path in sorted(_FOLDER.glob("*.jinja"))}


@dataclass(frozen=True, eq=False)
class ChatTemplate:
    """`system`: what happens to a system turn: kept, or merged into the first user turn.

    `injected`: text that the template writes before the first user turn when a chat has no system turn.
    `arguments`: how it wants tool arguments: object, string, or None when it writes no tool calls.
    `prompts`: whether it ends a prompt with a header for the answer.
    `end`: the control token after an answer; "" when it writes none.
    """

    template: Template
    variables: dict[str, str]
    control: frozenset[str]
    known: frozenset[str] = frozenset()  # all texts that the tokenizer has a token of its own for

    @property
    def name(self) -> str:
        return self.template.name

    def raw(
        self,
        messages: Sequence[Message],
        prompt: bool,
        tools: Sequence[dict[str, Any]] = (),
        reasoning: bool = False,
    ) -> str:
        """The template's own text; `reasoning`: answers of this chat bring their reasoning along.

        Raises TemplateRefusal, DataError.
        """
        return self._text(messages, prompt, tools, {} if reasoning else self.quiet, self.listed)

    def _text(
        self,
        messages: Sequence[Message],
        prompt: bool,
        tools: Sequence[dict[str, Any]],
        more: dict[str, Any],
        listed: bool,
    ) -> str:
        if listed:
            messages = [m | {"content": [{"type": "text", "text": m["content"]}]} for m in messages]
        return self.template.render(
            messages=list(messages),
            tools=list(tools) or None,
            documents=None,
            add_generation_prompt=prompt,
            **self.variables,
            **more,
        )

    def render(self, messages: Sequence[Message], prompt: bool, tools: Sequence[dict[str, Any]] = ()) -> str:
        """The text, system turns and tool arguments brought into the shape this template takes.

        Raises TemplateRefusal (it does not take these turns), DataError (it is broken or over a limit).
        """
        return self.raw(self.shaped(messages), prompt, tools)

    def shaped(self, messages: Sequence[Message]) -> list[Message]:
        """Messages as this template takes them."""
        out = [dict(message) for message in messages]
        if out and out[0]["role"] == "system" and self.system == "merged":
            text = out.pop(0)["content"]
            if out and out[0]["role"] == "user":
                out[0]["content"] = f"{text}\n\n{out[0]['content']}" if text.strip() else out[0]["content"]
        for message in out:
            if message.get("tool_calls") and self.arguments == "string":
                message["tool_calls"] = [_with_string_arguments(call) for call in message["tool_calls"]]
        return out

    @cached_property
    def listed(self) -> bool:
        """Whether contents must be lists of parts, as templates of models with images want them."""
        for listed in (False, True):
            try:
                text = self._text([_turn("user", _USER), _turn("assistant", _ANSWER)], False, (), {}, listed)
            except TemplateRefusal:
                continue
            if text.count(_USER) == 1 and text.count(_ANSWER) == 1:
                return listed
        return False

    @cached_property
    def quiet(self) -> dict[str, bool]:
        """What to tell the template about chats without reasoning, so that prompts end as answers begin.

        Templates of models that can reason may open a reasoning block in every prompt, but not in a finished
        chat; most have a switch for that.
        """
        turns = [_turn("user", _USER), _turn("assistant", _ANSWER)]
        for more in ({}, {"enable_thinking": False, "thinking": False}):
            try:
                prompt, whole = (
                    self._text(turns[:1], True, (), more, self.listed),
                    self._text(turns, False, (), more, self.listed),
                )
            except TemplateRefusal:
                continue
            if whole.startswith(prompt):
                return more
        return {}

    @cached_property
    def system(self) -> str:
        try:
            text = self.raw([_turn("system", _SYSTEM), _turn("user", _USER)], True)
        except TemplateRefusal:
            return "merged"
        return "kept" if text.count(_SYSTEM) == 1 else "merged"

    @cached_property
    def injected(self) -> str:
        text = self.raw([_turn("user", _USER)], True).partition(_USER)[0]
        if self.system == "kept":
            other = self.raw([_turn("system", _SYSTEM), _turn("user", _USER)], True).partition(_USER)[0]
            while text and other and text[-1] == other[-1]:
                text, other = text[:-1], other[:-1]
        for control in sorted(self.control, key=len, reverse=True):
            text = text.replace(control, " ")
        words = text.split()
        if words and words[0].lower() == "system":
            words = words[1:]
        return " ".join(words) if len(words) > 2 else ""

    @cached_property
    def arguments(self) -> str | None:
        for style in ("object", "string"):
            call = {
                "type": "function",
                "id": "qz0000000",
                "function": {"name": "qzname", "arguments": {_KEY: _VALUE}},
            }
            call = call if style == "object" else _with_string_arguments(call)
            turn = {"role": "assistant", "content": "", "tool_calls": [call]}
            try:
                text = self.raw([_turn("user", _USER), turn], False)
            except TemplateRefusal:
                continue
            if (
                _KEY in text and _VALUE in text and f"'{_KEY}'" not in text
            ):  # written, and not as a Python dict
                return style
        return None

    @cached_property
    def foreign(self) -> tuple[str, ...]:
        """Marks in its text that look like control tokens and are none of this tokenizer's."""
        text = self.raw([_turn("user", _USER), _turn("assistant", _ANSWER)], True)
        return tuple(dict.fromkeys(m for m in _MARK.findall(text) if m not in self.known))

    @cached_property
    def prompts(self) -> bool:
        turns = [_turn("user", _USER)]
        return self.raw(turns, True) != self.raw(turns, False)

    @cached_property
    def end(self) -> str:
        text = self.raw([_turn("user", _USER), _turn("assistant", _ANSWER)], False)
        tail = text.rpartition(_ANSWER)[2].lstrip()
        return next((c for c in sorted(self.control, key=len, reverse=True) if tail.startswith(c)), "")

    def check(self) -> None:
        """Refuse a template that loses user or answer text, before any row is read. Raises DataError."""
        try:
            text = self.raw([_turn("user", _USER), _turn("assistant", _ANSWER)], False)
        except TemplateRefusal as problem:
            raise DataError(
                f"chat template {self.name} cannot render a plain chat",
                str(problem),
                "name another: model.chat_template: chatml",
            ) from None
        if text.count(_USER) != 1 or text.count(_ANSWER) != 1:
            raise DataError(
                f"chat template {self.name} does not write each turn exactly once",
                f"of a two-turn chat it makes {text[:200]!r}",
                "name another: model.chat_template: chatml",
            )


def chat_template(tokenizer: Tokenizer, given: str | None = None) -> ChatTemplate:
    """The template to use: a shipped name, a Jinja file, Jinja text, or the model's own.

    Raises DataError when there is none or it is broken.
    """
    source, name = _source(tokenizer, given)
    known = frozenset(map(str, tokenizer.full.added_tokens_decoder.values())) | frozenset(tokenizer.control)
    made = ChatTemplate(Template(source, name), tokenizer.variables, frozenset(tokenizer.control), known)
    made.check()
    return made


def template_text(own: str | None, given: str | None) -> str | None:
    """The Jinja text that will be used, without loading a tokenizer; None: whatever the model has."""
    if given is None:
        return own
    if given in shipped():
        return shipped()[given].read_text(encoding="utf-8")
    if "{%" in given or "{{" in given:
        return given
    try:
        return Path(given).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as problem:
        raise DataError(
            f"chat template '{given}' cannot be read",
            getattr(problem, "strerror", None) or str(problem),
            f"give a Jinja file, or one of: {', '.join(shipped())}",
        ) from None


def _source(tokenizer: Tokenizer, given: str | None) -> tuple[str, str]:
    text = template_text(tokenizer.template, given)
    if text is None:
        raise DataError(
            f"'{tokenizer.name}' has no chat template",
            "the data are chats, and nothing says how this model writes turns",
            f"set model.chat_template to one of {', '.join(shipped())}, or to a Jinja file",
        )
    if given is None:
        return text, "of the model"
    return text, given if given in shipped() or "{" not in given else "given as text"


def _turn(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _with_string_arguments(call: dict[str, Any]) -> dict[str, Any]:
    import json

    function = call["function"]
    if isinstance(function["arguments"], str):
        return call
    return call | {
        "function": function | {"arguments": json.dumps(function["arguments"], ensure_ascii=False)}
    }
