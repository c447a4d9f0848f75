"""Chat templates are programs from strangers: rendered in Jinja's sandbox, with limits on time and size.

The sandbox keeps a template away from Python's internals; it does not stop one that never ends or that
builds a huge string. So every loop, call, and text operation of a template passes a meter here.
"""

import json
import re
import time
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from shardwise.errors import DataError

LIMIT_SECONDS = 2.0
LIMIT_STEPS = 2_000_000  # loop turns and calls in one rendering
LIMIT_CHARACTERS = 16 * 2**20  # of any one text a template builds
LIMIT_TEMPLATE_CHARACTERS = 2**20
_WIDE = re.compile(r"\d{6,}")
_UNLIMITED_FILTERS = (
    "center",
    "format",
    "random",
    "urlize",
    "wordwrap",
    "xmlattr",
    "pprint",
    "filesizeformat",
)


class TemplateRefusal(Exception):
    """A template called raise_exception: it does not take these messages."""


class TemplateLimit(Exception):
    """A template went over a limit of time or size."""


class Meter:
    """Counts what one rendering does."""

    def __init__(self) -> None:
        self.steps = 0
        self.deadline = 0.0

    def start(self) -> None:
        self.steps = 0
        self.deadline = time.monotonic() + LIMIT_SECONDS

    def tick(self) -> None:
        self.steps += 1
        if self.steps & 63 == 0 and time.monotonic() > self.deadline:
            raise TemplateLimit(f"it ran longer than {LIMIT_SECONDS:g} seconds")
        if self.steps > LIMIT_STEPS:
            raise TemplateLimit(f"it took more than {LIMIT_STEPS:,} loop turns and calls")

    def counted(self, values: Any) -> Iterator[Any]:
        for value in values:
            self.tick()
            yield value

    def sized(self, value: Any, size: int | None = None) -> Any:
        if size is None:
            size = len(value) if isinstance(value, str | list | tuple | dict) else 0
        if size > LIMIT_CHARACTERS:
            raise TemplateLimit(f"it built a text of more than {LIMIT_CHARACTERS:,} characters")
        return value


class _Generation(Extension):
    """`{% generation %}`: read and passed through; labels are found by rendering prefixes instead."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols], cache_size=0
        )
        self.meter = meter = Meter()
        for name in _UNLIMITED_FILTERS:
            self.filters.pop(name, None)
        for name in ("lipsum", "cycler", "joiner"):
            self.globals.pop(name, None)
        for name in ("replace", "indent", "join", "batch", "slice"):
            self.filters[name] = self._filter(self.filters[name])
        self.filters["_counted"] = meter.counted
        self.filters["_sized"] = meter.sized
        self.filters["tojson"] = _tojson
        self.globals["dict"] = lambda *args, **named: dict(*args, **named)
        self.globals["raise_exception"] = _raise
        self.globals["strftime_now"] = lambda form: datetime.now().strftime(str(form)[:200])

    def _filter(self, function: Any) -> Any:
        marks = {k: v for k, v in vars(function).items() if k.startswith("jinja")}

        def limited(*args: Any, **named: Any) -> Any:
            self._check_arguments(args, named)
            return self.meter.sized(function(*args, **named))

        vars(limited).update(marks)
        return limited

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in list(tree.find_all(nodes.For)):
            loop.iter = nodes.Filter(loop.iter, "_counted", [], [], None, None, lineno=loop.lineno)
        _wrap(tree)
        for block in tree.find_all(nodes.AssignBlock):
            block.filter = nodes.Filter(block.filter, "_sized", [], [], None, None, lineno=block.lineno)
        return tree

    def unsafe_undefined(self, obj: Any, attribute: str) -> Any:
        """Jinja would print nothing for an internal attribute; a template that asks for one is stopped."""
        raise jinja2.sandbox.SecurityError(f"it asks for '{attribute}' of a {type(obj).__name__}")

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        self.meter.tick()
        if operator == "*":
            for text, times in ((left, right), (right, left)):
                if isinstance(text, str | list | tuple) and isinstance(times, int):
                    self.meter.sized(text, len(text) * max(times, 0))
        if operator == "**" and not (_small(left, 10**6) and _small(right, 64)):
            raise TemplateLimit("it raised a number to a large power")
        if operator == "*" and not (_small(left) and _small(right)):
            raise TemplateLimit("it multiplied very large numbers")
        if operator == "%" and isinstance(left, str) and (_WIDE.search(left) or "*" in left):
            raise TemplateLimit("it asked for a very wide field")
        if operator == "+" and isinstance(left, str | list) and isinstance(right, str | list):
            self.meter.sized(left, len(left) + len(right))
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, called: Any, /, *args: Any, **named: Any) -> Any:
        self.meter.tick()
        called_text = getattr(called, "__wrapped__", called)  # the sandbox wraps str.format
        owner = getattr(called_text, "__self__", None)
        if isinstance(owner, str):
            self._check_arguments((owner, *args), named)
            if called_text.__name__ == "replace" and len(args) >= 2:
                self.meter.sized(owner, len(owner) + owner.count(str(args[0])) * len(str(args[1])))
            if called_text.__name__ in ("format", "format_map") and _WIDE.search(owner):
                raise TemplateLimit("it asked for a very wide field")
        return self.meter.sized(super().call(context, called, *args, **named))

    def _check_arguments(self, args: Any, named: dict[str, Any]) -> None:
        """Widths, counts and the growth of a replacement, before they are spent."""
        for value in (*args, *named.values()):
            if isinstance(value, int) and value > 100_000:
                raise TemplateLimit(f"it asked for a width or count of {value}")
        texts = [a for a in args if isinstance(a, str)]
        if len(texts) == 3:  # text, old, new of `replace`
            self.meter.sized(texts[0], len(texts[0]) + texts[0].count(texts[1]) * len(texts[2]))


def _wrap(node: nodes.Node) -> None:
    """Put a size check around every `a ~ b`."""
    for name, value in node.iter_fields():
        if isinstance(value, list):
            for i, item in enumerate(value):
                if isinstance(item, nodes.Node):
                    _wrap(item)
                    if isinstance(item, nodes.Concat):
                        value[i] = nodes.Filter(item, "_sized", [], [], None, None, lineno=item.lineno)
        elif isinstance(value, nodes.Node):
            _wrap(value)
            if isinstance(value, nodes.Concat):
                setattr(node, name, nodes.Filter(value, "_sized", [], [], None, None, lineno=value.lineno))


def _small(value: Any, limit: int = 2**64) -> bool:
    return not isinstance(value, int) or abs(value) < limit


def _tojson(
    x: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON; Jinja's own filter would write < as \\u003c."""
    if isinstance(indent, int) and indent > 64:
        raise TemplateLimit(f"it asked for an indent of {indent}")
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise TemplateRefusal(str(message))


class Template:
    """A compiled template. `render` raises TemplateRefusal (raise_exception) or DataError (all else)."""

    def __init__(self, source: str, name: str) -> None:
        self.source, self.name = source, name
        if len(source) > LIMIT_TEMPLATE_CHARACTERS:
            raise self._error(f"it is longer than {LIMIT_TEMPLATE_CHARACTERS:,} characters")
        self._environment = _Environment()
        try:
            self._template = self._environment.from_string(source)
        except jinja2.TemplateSyntaxError as problem:
            raise DataError(
                f"chat template {name}, line {problem.lineno}: {problem.message}",
                "it is not valid Jinja",
                "mend it, or name another with model.chat_template",
            ) from None
        except (RecursionError, TemplateLimit, OverflowError, ValueError) as problem:
            raise self._error(str(problem)) from None

    def render(self, **variables: Any) -> str:
        """The text. At most LIMIT_SECONDS, LIMIT_STEPS and LIMIT_CHARACTERS."""
        meter = self._environment.meter
        meter.start()
        parts: list[str] = []
        size = 0
        try:
            for part in self._template.root_render_func(self._template.new_context(variables)):
                parts.append(part)
                size += len(part)
                meter.sized(part, size)
            return "".join(parts)
        except TemplateRefusal:
            raise
        except TemplateLimit as problem:
            raise self._error(str(problem)) from None
        except jinja2.sandbox.SecurityError as problem:
            raise self._error(f"it is refused by the sandbox: {problem}") from None
        except jinja2.TemplateError as problem:
            raise TemplateRefusal(f"{type(problem).__name__}: {problem}") from None
        except (RecursionError, MemoryError) as problem:
            raise self._error(f"it needs too much ({type(problem).__name__})") from None
        except (TypeError, ValueError, KeyError, AttributeError, IndexError, ArithmeticError) as problem:
            raise TemplateRefusal(f"{type(problem).__name__}: {problem}") from None

    def _error(self, why: str) -> DataError:
        return DataError(
            f"chat template {self.name} is stopped",
            why,
            "use a template you trust: model.chat_template: chatml (or llama3, mistral, gemma, qwen, zephyr)",
        )
