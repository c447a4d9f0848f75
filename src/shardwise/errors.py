"""What can go wrong, as one tree. Every error says what, why, and how to go on.

ShardwiseError                exit 1   something failed
  UsageError                  exit 2   something asked for cannot be done; nothing was started or left behind
    RecipeError                        a recipe file or --set value
    DataError                          a data file or its rows
    ModelError                         a model folder, config or hub id
    UnknownNameError                   a name that is not in a list (GPU, method, column ...)
    RuleError                          a combination that is not legal here
    MissingDependencyError             a package that an extra would install
  RunError                    exit 1   a run failed after it had started
    OutOfMemoryError
    CheckpointError
      DiskFullError            exit 74  no room for a checkpoint; older ones are intact
    DivergedError                      NaN or infinity in the loss or the gradients
  Interrupted                 exit 75  stopped on request, state saved
"""

from collections.abc import Iterable
from difflib import get_close_matches


class ShardwiseError(Exception):
    """Base of the tree. `what` states the values, `why` the reason, `hint` the next thing to type."""

    exit_code = 1

    def __init__(self, what: str, why: str = "", hint: str = "") -> None:
        self.what, self.why, self.hint = what, why, hint
        super().__init__(what)

    def __reduce__(self) -> tuple[type, tuple[str, str, str]]:  # survives a trip between processes
        return type(self), (self.what, self.why, self.hint)

    def __str__(self) -> str:
        lines = [f"error: {self.what}"]
        if self.why:
            lines.append(f"  why: {self.why}")
        if self.hint:
            lines.append(f" hint: {self.hint}")
        return "\n".join(lines)


class UsageError(ShardwiseError):
    exit_code = 2


class RecipeError(UsageError):
    pass


class DataError(UsageError):
    pass


class ModelError(UsageError):
    pass


class UnknownNameError(UsageError):
    pass


class RuleError(UsageError):
    pass


class MissingDependencyError(UsageError):
    pass


class RunError(ShardwiseError):
    pass


class OutOfMemoryError(RunError):
    pass


class CheckpointError(RunError):
    pass


class DiskFullError(CheckpointError):
    exit_code = 74


class DivergedError(RunError):
    pass


class Interrupted(ShardwiseError):
    """A run that stopped on request, at a step boundary, with its state saved."""

    exit_code = 75


def nearest(name: str, known: Iterable[str], count: int = 3, cutoff: float = 0.5) -> list[str]:
    """The known names most like `name`, best first; empty when none is close."""
    by_fold = {k.casefold(): k for k in known}
    return [by_fold[m] for m in get_close_matches(name.casefold(), by_fold, n=count, cutoff=cutoff)]


def unknown_name(kind: str, name: str, known: Iterable[str], hint: str = "") -> UnknownNameError:
    """An error for a name outside a closed list, with the nearest names or, failing that, the list."""
    known = sorted(known)
    close = nearest(name, known)
    listed = ", ".join(known[:12]) + (f" and {len(known) - 12} more" if len(known) > 12 else "")
    return UnknownNameError(
        f"unknown {kind} '{name}'",
        f"it is not one of the known names: {listed}",
        hint or (f"did you mean {' or '.join(close)}?" if close else f"use one of: {listed}"),
    )
