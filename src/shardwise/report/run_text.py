"""A run as text for a terminal: readable at 80 columns, without colour, other people's text defused."""

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from shardwise.report.numbers import show, show_change, show_difference, show_loss
from shardwise.report.run_view import Comparison, RunView
from shardwise.runs import SamplePair
from shardwise.units import format_count, format_seconds

STYLES = {"done": "green", "running": "cyan", "interrupted": "yellow", "failed": "red", "refused": "red"}


def print_run(console: Console, view: RunView, samples: int = 3) -> None:
    """What `shardwise show RUN` prints. Paths and commands are never broken, so that they can be copied."""
    console.print(run_text(view, samples))
    console.print(run_places(view), soft_wrap=True)


def run_text(view: RunView, samples: int = 3) -> RenderableType:
    """State, losses before and after, estimate against measured, samples, warnings."""
    parts: list[RenderableType] = [_head(view), Text(), _losses(view), Text()]
    if view.memory or view.speed:
        parts += [_comparison(view), Text()]
    if view.effective is not None:
        parts += [Text(str(view.effective)), Text()]
    for pair in view.samples[:samples]:
        parts += [_sample(pair), Text()]
    if len(view.samples) > samples:
        parts += [Text(f"{len(view.samples) - samples} more samples in the report\n", "dim")]
    parts += [Text("warning: ", "yellow").append(printable(w), "none") for w in view.warnings]
    parts += [Text()] if view.warnings else []
    return Group(*parts)


def run_places(view: RunView) -> Text:
    """Where everything lies and what to type next. Print it with `soft_wrap=True`."""
    width = max((len(what) for what, _ in view.files), default=0)
    text = Text("files", "bold")
    for what, path in view.files:
        text.append(f"\n  {what:<{width}}  {printable(path)}", "none")
    text.append("\n\nnext")
    for what, command in view.next_commands:
        text.append(f"\n  {what}\n    {printable(command)}", "none")
    return text


def printable(text: str) -> str:
    """Control characters made visible: a model's answer must not steer the terminal."""
    return "".join(
        c if c in "\n\t" or (c.isprintable() or c == " ") else "\N{REPLACEMENT CHARACTER}" for c in text
    )


def _head(view: RunView) -> Text:
    state = view.status.state
    line = Text(view.name, "bold").append("  ").append(state, STYLES[state])
    done, planned = view.summary.steps, view.steps_planned
    facts = []
    if done is not None:
        facts.append(f"{done} of {planned} steps" if planned and planned != done else f"{done} steps")
    if view.summary.tokens:
        facts.append(f"{format_count(view.summary.tokens)} tokens")
    if view.summary.seconds.total is not None:
        facts.append(f"{format_seconds(view.summary.seconds.total)} in all")
    if isinstance(view.summary.device, str):
        facts.append(view.summary.device)
    if facts:
        line.append("\n" + ", ".join(facts))
    if view.status.reason:
        line.append("\n" + printable(view.status.reason))
    return line


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right", no_wrap=number > 0)
    return table


def _losses(view: RunView) -> Table:
    s = view.summary
    table = _table("loss", "before", "after", "change")
    held_out = (view.evaluation_before, view.evaluation_after)
    table.add_row("held-out rows", *map(show_loss, held_out), show_change(*held_out))
    table.add_row(
        "training, first and last step",
        show_loss(s.loss_first),
        show_loss(s.loss_last),
        show_change(s.loss_first, s.loss_last),
    )
    return table


def _comparison(view: RunView) -> Table:
    table = _table("estimate against measured", "estimate", "measured", "estimate is off by")
    for row in view.memory:
        table.add_row(_label(row), *_cells(row), style="bold" if row.name == "peak allocated" else "")
    if view.peak_resident_bytes:
        table.add_row("resident set (the system's count)", "-", show(view.peak_resident_bytes, "bytes"), "-")
    for row in view.speed:
        table.add_row(_label(row), *_cells(row))
    return table


def _label(row: Comparison) -> str:
    return {"peak allocated": "peak of live tensors", "peak reserved": "peak reserved by the allocator"}.get(
        row.name, row.name.replace("_", " ") if row.unit != "bytes" else f"  {row.name.replace('_', ' ')}"
    )


def _cells(row: Comparison) -> tuple[str, str, str]:
    return show(row.estimate, row.unit), show(row.measured, row.unit), show_difference(row)


def _sample(pair: SamplePair) -> Table:
    """Prompt and reference over both answers side by side."""
    table = Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        show_edge=False,
        expand=True,
        title=Text("prompt: ", "bold").append(_short(pair.prompt, 5), "none"),
        title_justify="left",
        title_style="none",
    )
    table.add_column("before", ratio=1, overflow="fold")
    table.add_column("after", ratio=1, overflow="fold")
    table.add_row(Text(_short(pair.before or "-", 12)), Text(_short(pair.after or "-", 12)))
    if pair.reference:
        table.caption = Text("reference: ").append(_short(pair.reference, 4))
        table.caption_justify = "left"
        table.caption_style = "dim"
    return table


def _short(text: str, lines: int, width: int = 400) -> str:
    """The first lines, an ellipsis where something is left out."""
    kept = printable(text.expandtabs(4)).strip().splitlines() or [""]
    shown = [line if len(line) <= width else line[: width - 1] + "…" for line in kept[:lines]]
    return "\n".join(shown) + ("\n…" if len(kept) > lines else "")


def runs_text(views: list[RunView]) -> Table:
    """What `shardwise runs` prints, newest first."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("run", overflow="fold")
    for name in ("state", "steps", "loss", "peak", "time"):
        table.add_column(name, justify="left" if name == "state" else "right", no_wrap=True)
    for view in views:
        s = view.summary
        peak = next((r.measured for r in view.memory if r.name == "peak allocated"), None)
        before, after = s.evaluation_before or s.loss_first, s.evaluation_after or s.loss_last
        table.add_row(
            view.name,
            Text(view.status.state, STYLES[view.status.state]),
            show(s.steps, "tokens_per_second"),
            f"{before:.2f} > {after:.2f}" if before is not None and after is not None else "-",
            show(peak, "bytes"),
            show(s.seconds.total, "seconds"),
        )
    return table
