"""A check of data -> text for the terminal. Readable without colour: trained text stands between 「 and 」."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from shardwise.data.check import Check, PairCheck, text_of_turns
from shardwise.data.report import DataReport, Finding
from shardwise.data.samples import Sample

BAR = 40
OPEN, CLOSE = "「", "」"


def check_text(check: Check) -> RenderableType:
    """The whole report, widest facts first."""
    report = check.report
    blocks: list[RenderableType] = [_files(report), Text(), _facts(check)]
    for title, found in (
        ("Refused rows", report.refused),
        ("Dropped rows", report.dropped),
        ("Used, with a remark", report.notes),
    ):
        if found:
            blocks += [Text(), _findings(title, found)]
    blocks += [Text(), _histogram(report)]
    if check.samples:
        blocks += [
            Text(),
            Text(f"Rows as the model sees them; trained text stands between {OPEN} and {CLOSE}", "bold"),
        ]
        for sample in check.samples:
            blocks += [Text(), *_sample(sample)]
    return Group(*blocks)


def facts(check: Check) -> list[tuple[str, str]]:
    """(name, sentence) for every line of the report; the same in terminal and HTML."""
    report, lengths = check.report, check.report.lengths
    share = report.trained_tokens / report.tokens if report.tokens else 0
    out = [
        (
            "rows",
            f"{report.rows_read:,} read = {report.rows_train:,} to train on + {report.rows_validation:,} held out "
            f"+ {report.rows_refused:,} refused + {report.rows_dropped:,} dropped",
        ),
        ("held out", report.validation),
        (
            "tokens",
            f"{report.tokens:,} to train on, {report.trained_tokens:,} of them with a label ({share:.1%})",
        ),
        (
            "length",
            f"median {lengths.median:,}, 95 % of rows up to {lengths.p95:,}, longest {lengths.longest:,} tokens",
        ),
        ("sequence", f"sequence_length {report.sequence_length:,}: {report.sequence_length_why}"),
        (
            "cut",
            f"{_count(report.truncated, 'row')} cut at sequence_length ({_percent(report.truncated, lengths.rows)})",
        ),
        (
            "packing",
            f"{_count(check.sequences, 'sequence')} an epoch, {check.efficiency:.1%} full",
        ),
    ]
    out += _of_some(report)
    if report.streamed:
        out.append(("streaming", report.streamed))
    out += [
        ("system", report.system),
        (
            "twice",
            f"{report.duplicates:,} training rows repeat another; {report.overlap:,} held-out rows are trained on",
        ),
    ]
    if report.template:
        out.append(("template", report.template))
    if report.passed_over:
        out.append(
            ("passed over", f"{_count(len(report.passed_over), 'file')}: {', '.join(report.passed_over[:5])}")
        )
    return out


def _of_some(report: DataReport) -> list[tuple[str, str]]:
    """Lines that only some data sets have."""
    out: list[tuple[str, str]] = []
    ending = report.rows_train - report.documents_train
    if ending:
        out.append(
            ("end token", f"{report.ended:,} of {_count(ending, 'training row')} end with a trained one")
        )
    plain = [f for f in report.files if f.format in ("alpaca", "prompt_completion")]
    if plain:
        rows = sum(f.rows_read - f.rows_refused for f in plain)
        out.append(
            (
                "plain text",
                f"{_count(rows, 'row')} of {' and '.join(dict.fromkeys(f.format for f in plain))} go without the "
                "chat template; for a model that chats, write them as messages",
            )
        )
    if report.documents:
        out.append(
            (
                "text",
                f"{_count(report.documents, 'document')} make {_count(report.text_sequences, 'sequence')}, an end "
                "token after each",
            )
        )
    if report.rewritten:
        out.append(
            (
                "answers",
                f"{report.answers:,} of {report.answers + report.rewritten:,} carry a label; the template writes the "
                f"other {report.rewritten:,} differently once turns follow (it drops reasoning there), so that they "
                "are not what the model has to write. A template that keeps them: --chat-template qwen, or chatml",
            )
        )
    return out


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"


def _percent(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "0 %"


def _files(report: DataReport) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name, side in (("file", "left"), ("read as", "left"), ("rows", "right"), ("refused", "right")):
        table.add_column(name, justify=side, overflow="fold")  # type: ignore[arg-type]
    for file in report.files[:20]:
        table.add_row(file.name, file.format, f"{file.rows_read:,}", f"{file.rows_refused:,}")
    if len(report.files) > 20:
        table.add_row(f"and {len(report.files) - 20} more files", "", "", "")
    return table


def _facts(check: Check) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, sentence in facts(check):
        table.add_row(name, Text(sentence))
    return table


def places(finding: Finding, count: int = 3) -> str:
    """a.jsonl lines 3, 7 and 12 more."""
    first = finding.places[:count]
    by_file: dict[str, list[str]] = {}
    for file, line in first:
        by_file.setdefault(file, []).append(str(line))
    text = "; ".join(f"{file} line{'s' * (len(n) > 1)} {', '.join(n)}" for file, n in by_file.items())
    return text + (f" and {finding.count - len(first):,} more" if finding.count > len(first) else "")


def _findings(title: str, found: Sequence[Finding]) -> Table:
    table = Table(
        title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, show_header=False
    )
    table.add_column(justify="right")
    table.add_column(overflow="fold")
    table.add_column(overflow="fold", style="dim")
    for finding in found:
        table.add_row(f"{finding.count:,}", Text(finding.reason), Text(places(finding)))
    return table


def _histogram(report: DataReport) -> Table:
    table = Table(
        title="Tokens per row",
        title_justify="left",
        title_style="bold",
        box=None,
        pad_edge=False,
        show_header=False,
    )
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(justify="right")
    most = max((count for _, _, count in report.lengths.histogram), default=1)
    for first, below, count in report.lengths.histogram:
        bar = "█" * round(BAR * count / most) or ("▏" if count else "")
        table.add_row(f"{first:,} to {below - 1:,}", bar, f"{count:,}")
    return table


def _sample(sample: Sample) -> list[Text]:
    head = Text(
        f"{sample.file} line {sample.line}: {sample.tokens:,} tokens, {sample.trained_tokens:,} trained",
        "underline",
    )
    body = Text()
    for text, trained in sample.parts:
        if trained:
            body.append(OPEN, "bold green").append(text, "green").append(CLOSE, "bold green")
        else:
            body.append(text)
    return [head, body]


def pairs_text(check: PairCheck) -> RenderableType:
    """What is known of preference pairs."""
    refused = sum(f.count for f in check.refused)
    blocks: list[RenderableType] = [
        Text(f"{', '.join(check.files)}: preference pairs (chosen, rejected)"),
        Text(f"rows  {check.rows_read:,} read = {check.pairs:,} pairs + {refused:,} refused"),
        Text("They can be checked here; training in this version is supervised and does not take pairs."),
    ]
    if check.refused:
        blocks += [Text(), _findings("Refused rows", check.refused)]
    if check.first is not None:
        for name, turns in (
            ("shared prompt", check.first.prompt),
            ("chosen", check.first.chosen),
            ("rejected", check.first.rejected),
        ):
            blocks += [Text(), Text(name, "bold"), Text(text_of_turns(turns))]
    return Group(*blocks)
