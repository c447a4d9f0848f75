"""The table of a record that compare.py made: Markdown, ratios with their range over the rounds."""

import json
import platform
import statistics
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent.parent / "docs" / "benchmarks.md"
NEXT = "## Cost of a step by tokens and layers"  # the section after all comparisons
OURS = "shardwise"
PACKAGES = {
    "transformers": "transformers",
    "trl": "trl",
    "trl-packing": "trl",
    "llamafactory": "llamafactory",
    "ms-swift": "ms_swift",
    "litgpt": "litgpt",
    "unsloth": "unsloth",
}
TITLES = {
    "mixed": "64 chats of mixed length up to 512 tokens, 4 a step",
    "long": "one sequence of 2,048 tokens a step",
}


def processor() -> str:
    """The processor's own name."""
    path = Path("/proc/cpuinfo")
    for line in path.read_text().splitlines() if path.exists() else ():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def spread(values: list[float], digits: int = 2) -> str:
    """Median and, of more than one, the range."""
    if not values:
        return "-"
    middle = f"{statistics.median(values):.{digits}f}"
    return middle if len(values) == 1 else f"{middle} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def text(record: dict) -> str:
    """All cases of a record."""
    head = (
        f"{record['model']}, LoRA rank {record['settings']['rank']} on all linear layers or all weights, bf16, "
        f"learning rate {record['settings']['learning_rate']}, {record['settings']['steps']} steps (rates: all but "
        f"the first). {record['processor']}, {record['settings']['threads']} of {record['cores']} cores, torch "
        f"{record['torch']}, {record['date']}. Versions: {versions(record)}.\n"
    )
    return "\n".join([head, *(case_text(record, name) for name in record["cases"])])


def versions(record: dict) -> str:
    found = {}
    for run in record["runs"]:
        package = PACKAGES.get(run["peer"])
        own = {k.replace("-", "_"): v for k, v in run.get("versions", {}).items()}
        if package and package in own:
            found[run["peer"].removesuffix("-packing")] = own[package]
    return ", ".join(f"{k} {v}" for k, v in found.items())


def case_text(record: dict, name: str) -> str:
    case = record["cases"][name]
    by_peer: dict[str, list[dict]] = {}
    for run in sorted(record["runs"], key=lambda r: r["round"]):
        if run["case"] == name:
            by_peer.setdefault(run["peer"], []).append(run)
    order = [OURS, *(p for p in PACKAGES if p in by_peer)]
    unit = "tokens per processor second" if record["settings"]["threads"] == 1 else "tokens/s"
    lines = [
        f"### {case['method']}, {TITLES[case['data']]}",
        "",
        f"| trainer | rounds | {unit} | shardwise is faster by | first step after, s | its / shardwise's "
        "| peak resident, GiB | shardwise's peak above weights / its | losses |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    ours = {r["round"]: r for r in by_peer.get(OURS, []) if "error" not in r}
    for peer in order:
        good = [r for r in by_peer.get(peer, []) if "error" not in r]
        if not good:
            runs = by_peer.get(peer, [])
            why = runs[-1]["error"].splitlines()[-1][:160] if runs else "not run"
            lines.append(f"| {peer} | 0 | did not run: {why} | | | | | | |")
            continue
        lines.append(_row(record, peer, good, ours))
    loads = [r["load"] for r in record["runs"] if r["case"] == name and "error" not in r]
    if loads:
        lines += ["", f"Load of the machine before each run: {min(loads):.1f} to {max(loads):.1f}."]
    return "\n".join(lines) + "\n"


def _row(record: dict, peer: str, runs: list[dict], ours: dict[int, dict]) -> str:
    """A pair of runs is one of the same round."""
    weights = record["weights_bytes"]
    rate = "tokens_per_cpu_second" if record["settings"]["threads"] == 1 else "tokens_per_second"
    pairs = [(ours[r["round"]], r) for r in runs if r["round"] in ours]
    faster = [a[rate] / b[rate] for a, b in pairs]
    sooner = [b["first_step_seconds"] / a["first_step_seconds"] for a, b in pairs]
    above = [(a["peak_resident_bytes"] - weights) / (b["peak_resident_bytes"] - weights) for a, b in pairs]
    cells = [
        peer,
        str(len(runs)),
        spread([r[rate] for r in runs], 0),
        spread(faster),
        spread([r["first_step_seconds"] for r in runs], 1),
        spread(sooner),
        spread([r["peak_resident_bytes"] / 2**30 for r in runs]),
        spread(above),
        " ".join(f"{v:.3f}" for v in runs[0]["losses"]),
    ]
    return "| " + " | ".join(cells) + " |"


def write(record: dict, source: Path) -> None:
    """Put the record's tables between its two markers in the docs; a record that is new gets a section of its own."""
    begin, end = f"<!-- {source.name} -->", f"<!-- end of {source.name} -->"
    page = DOCS.read_text(encoding="utf-8")
    if begin not in page or end not in page:
        if NEXT not in page:
            sys.exit(
                f"{DOCS} has neither lines '{begin}' and '{end}' to write between nor a section '{NEXT}'"
            )
        title = f"## Against peers, {record['settings']['threads']} threads"
        page = page.replace(NEXT, f"{title}\n\n{begin}\n{end}\n\n{NEXT}", 1)
    before, rest = page.split(begin, 1)
    after = rest.split(end, 1)[1]
    DOCS.write_text(f"{before}{begin}\n{text(record)}\n{end}{after}", encoding="utf-8")


if __name__ == "__main__":
    print(text(json.loads(Path(sys.argv[1]).read_text())))
