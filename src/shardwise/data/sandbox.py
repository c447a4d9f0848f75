"""Chat templates are programs from strangers: rendered in Jinja's sandbox, with limits on time and size.

The sandbox keeps a template away from Python's internals; it does not stop one that never ends or that
builds a huge string. So every loop, call and operation of a template that makes a text or a list passes a meter
here: what would be too large is refused before it is made, and the sum of all that is made is bounded too, since
a template may keep what it makes.
"""

import json
import re
import time
from collections.abc import Iterator, Sequence
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
LIMIT_ALL_CHARACTERS = 8 * LIMIT_CHARACTERS  # of all texts and lists that one rendering builds
_ITEM = 16  # an item of a list weighs as much as so many characters
_LARGE = 100_000  # after making so much, the clock is looked at
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
        self.made = 0
        self.deadline = 0.0

    def start(self) -> None:
        self.steps = self.made = 0
        self.deadline = time.monotonic() + LIMIT_SECONDS

    def tick(self) -> None:
        self.steps += 1
        if self.steps & 63 == 0:
            self.look()
        if self.steps > LIMIT_STEPS:
            raise TemplateLimit(f"it took more than {LIMIT_STEPS:,} loop turns and calls")

    def look(self) -> None:
        if self.deadline and time.monotonic() > self.deadline:
            raise TemplateLimit(f"it ran longer than {LIMIT_SECONDS:g} seconds")

    def counted(self, values: Any) -> Iterator[Any]:
        for value in values:
            self.tick()
            yield value

    def allow(self, size: int) -> None:
        """Refuse what would be larger than one text may be."""
        if size > LIMIT_CHARACTERS:
            raise TemplateLimit(f"it built a text of more than {LIMIT_CHARACTERS:,} characters")

    def sized(self, value: Any) -> Any:
        """`value`, which was just made, weighed."""
        size = _outer(value)
        self.allow(size)
        self.made += size
        if self.made > LIMIT_ALL_CHARACTERS:
            raise TemplateLimit(f"it built texts of more than {LIMIT_ALL_CHARACTERS:,} characters in all")
        if size > _LARGE:
            self.look()
        return value

    def weight(self, value: Any, depth: int = 0) -> int:
        """Characters of a value written out, with all that it holds. Raises TemplateLimit when that is too much."""
        if isinstance(value, str | bytes | bytearray):
            return len(value)
        if not isinstance(value, list | tuple | dict | set | frozenset):
            return _ITEM
        if depth > 100:
            raise TemplateLimit("it nests lists too deeply")
        size = 2
        for item in value.items() if isinstance(value, dict) else value:
            size += 4 + self.weight(item, depth + 1)
            self.allow(size)
        return size


def _outer(value: Any) -> int:
    """Size of a text, or of a list without what its items hold: those were weighed when they were made."""
    if isinstance(value, str | bytes | bytearray):
        return len(value)
    return _ITEM * len(value) if isinstance(value, list | tuple | dict | set | frozenset) else 0


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
        self.finalize = self._shown
        self.concat = self._joined  # type: ignore[method-assign] # of blocks and macros
        for name in _UNLIMITED_FILTERS:
            self.filters.pop(name, None)
        for name in ("lipsum", "cycler", "joiner"):
            self.globals.pop(name, None)
        for name, function in list(self.filters.items()):
            self.filters[name] = self._filter(name, function)
        self.filters["_counted"] = meter.counted
        self.filters["_sized"] = meter.sized
        self.filters["_joined"] = self._joined
        self.filters["tojson"] = self._tojson
        self.globals["dict"] = lambda *args, **named: meter.sized(dict(*args, **named))
        self.globals["raise_exception"] = _raise
        self.globals["strftime_now"] = lambda form: datetime.now().strftime(str(form)[:200])

    def _filter(self, name: str, function: Any) -> Any:
        marks = {k: v for k, v in getattr(function, "__dict__", {}).items() if k.startswith("jinja")}

        def limited(*args: Any, **named: Any) -> Any:
            self.meter.tick()
            self._check_arguments(args, named)
            own = args[1:] if marks else args  # without the context or environment that Jinja puts first
            if name == "join":
                own = (*own[:1], *own[1:2], *(v for k, v in named.items() if k == "d"))
                items = own[0] if isinstance(own[0], list | tuple) else list(self.meter.counted(own[0]))
                between = len(str(own[1])) if len(own) > 1 else 0
                self.meter.allow(self.meter.weight(items) + between * len(items))
                args = (args[0], items, *args[2:]) if marks else (items, *args[1:])
            elif name in ("string", "replace", "indent", "urlencode", "escape", "e", "forceescape", "safe"):
                self.meter.weight(own[0])
            elif name == "sum" and not isinstance(
                named.get("start", own[2] if len(own) > 2 else 0), int | float
            ):
                raise TemplateLimit("it sums things that are no numbers")
            return self.meter.sized(function(*args, **named))

        vars(limited).update(marks)
        return limited

    def _shown(self, value: Any) -> Any:
        """What an expression prints, before it becomes a text."""
        if not isinstance(value, str):
            self.meter.weight(value)
        return value

    def _joined(self, parts: Any) -> str:
        """Parts of a text put together."""
        parts = [part if isinstance(part, str) else str(self._shown(part)) for part in parts]
        self.meter.allow(sum(map(len, parts)))
        return str(self.meter.sized("".join(parts)))

    def _tojson(self, x: Any, *args: Any, **named: Any) -> str:
        self.meter.tick()
        self.meter.weight(x)
        return str(self.meter.sized(_tojson(x, *args, **named)))

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
            for made, times in ((left, right), (right, left)):
                if isinstance(times, int):
                    self.meter.allow(_outer(made) * max(times, 0))
        if operator == "**" and not (_small(left, 10**6) and _small(right, 64)):
            raise TemplateLimit("it raised a number to a large power")
        if operator == "*" and not (_small(left) and _small(right)):
            raise TemplateLimit("it multiplied very large numbers")
        if operator == "%" and isinstance(left, str | bytes):
            if isinstance(left, bytes) or _WIDE.search(left) or "*" in left:
                raise TemplateLimit("it asked for a very wide field")
            self.meter.allow(len(left) + left.count("%") * max(1, self._largest(right)))
        if operator == "+":
            self.meter.allow(_outer(left) + _outer(right))
        return self.meter.sized(super().call_binop(context, operator, left, right))

    def _largest(self, values: Any) -> int:
        """Size of the largest of some values, each written out."""
        many = (
            values.values()
            if isinstance(values, dict)
            else values
            if isinstance(values, tuple)
            else (values,)
        )
        return max((self.meter.weight(value) for value in many), default=0)

    def call(self, context: Any, called: Any, /, *args: Any, **named: Any) -> Any:
        self.meter.tick()
        called_text = getattr(called, "__wrapped__", called)  # the sandbox wraps str.format
        owner = getattr(called_text, "__self__", None)
        if isinstance(owner, str | bytes):
            self._check_method(owner, called_text.__name__, args, named)
        return self.meter.sized(super().call(context, called, *args, **named))

    def _check_method(self, owner: Any, name: str, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        """What a method of a text would make, before it makes it."""
        if isinstance(owner, bytes) or name in ("translate", "expandtabs", "format_map"):
            raise TemplateLimit(f"it calls {type(owner).__name__}.{name}, which no chat template needs")
        self._check_arguments((owner, *args), named)
        if name == "replace" and len(args) >= 2:
            self.meter.allow(len(owner) + owner.count(str(args[0])) * len(str(args[1])))
        elif name == "join" and args:
            items = args[0] if isinstance(args[0], list | tuple | dict | str) else ()
            self.meter.allow(self.meter.weight(list(items)) + len(owner) * len(items))
        elif name == "format":
            if _WIDE.search(owner):
                raise TemplateLimit("it asked for a very wide field")
            largest = max(self._largest(args), self._largest(named))
            self.meter.allow(len(owner) + owner.count("{") * max(1, largest))

    def _check_arguments(self, args: Sequence[Any], named: dict[str, Any]) -> None:
        """Widths, counts and the growth of a replacement, before they are spent."""
        for value in (*args, *named.values()):
            if isinstance(value, int) and value > 100_000:
                raise TemplateLimit(f"it asked for a width or count of {value}")
        texts = [a for a in args if isinstance(a, str)]
        if len(texts) == 3:  # text, old, new of `replace`
            self.meter.allow(len(texts[0]) + texts[0].count(texts[1]) * len(texts[2]))


def _wrap(node: nodes.Node) -> None:
    """Weigh what operators make that the environment does not see: `a ~ b` and `a[1:]`."""
    for name, value in node.iter_fields():
        if isinstance(value, list):
            for i, item in enumerate(value):
                if isinstance(item, nodes.Node):
                    _wrap(item)
                    value[i] = _weighed(item)
        elif isinstance(value, nodes.Node):
            _wrap(value)
            setattr(node, name, _weighed(value))


def _weighed(node: nodes.Node) -> nodes.Node:
    if isinstance(node, nodes.Concat):
        parts = nodes.List(node.nodes, lineno=node.lineno)
        return nodes.Filter(parts, "_joined", [], [], None, None, lineno=node.lineno)
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
        return nodes.Filter(node, "_sized", [], [], None, None, lineno=node.lineno)
    return node


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
                meter.allow(size)
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
