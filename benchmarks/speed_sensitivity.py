"""Are the time estimate's constants fragile? `python benchmarks/speed_sensitivity.py [TABLE.csv] [--by 0.15]`.

Every constant of estimate/speed/constants.py is made smaller and larger by a share, one at a time, and the table of
measured runs is scored again: an error that jumps would mean a constant fitted to these rows. The table is the tests'
copy of the public one.
"""

import argparse
from pathlib import Path
from types import ModuleType

from shardwise.estimate.speed import constants, hooks, layer
from shardwise.plan.accuracy import Score, score_throughput
from shardwise.plan.rows import read_rows

TABLE = Path(__file__).parents[1] / "tests" / "plan" / "inputs" / "measured_runs.csv"


def forget(*modules: ModuleType) -> None:
    for module in modules:
        for each in vars(module).values():
            if hasattr(each, "cache_clear"):
                each.cache_clear()


def line(name: str, score: Score) -> str:
    assert score.median_signed is not None and score.median_absolute is not None
    assert score.p90_absolute is not None and score.range_coverage is not None
    return (
        f"| {name} | {score.median_signed:+.1%} | {score.median_absolute:.1%} | {score.p90_absolute:.1%} | "
        f"{score.range_coverage:.0%} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("table", nargs="?", type=Path, default=TABLE)
    parser.add_argument("--by", type=float, default=0.15)
    asked = parser.parse_args()
    rows = read_rows(asked.table)
    print("| constant | median | median of absolute | 90th percentile | inside the range |")
    print("|---|---|---|---|---|")
    print(line("as they are", score_throughput(rows)))
    for name, value in list(vars(constants).items()):
        if not name.isupper() or not isinstance(value, int | float):
            continue
        for factor in (1 - asked.by, 1 + asked.by):
            setattr(constants, name, value * factor)
            forget(layer, hooks)
            print(line(f"{name} x {factor:.2f}", score_throughput(rows)), flush=True)
        setattr(constants, name, value)


if __name__ == "__main__":
    main()
