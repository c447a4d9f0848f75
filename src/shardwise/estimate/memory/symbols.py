"""Sizes that remember how they came about: a number, and the sum of monomials that it is.

The paper step is plain arithmetic on sizes. Played with these instead of integers it gives the formula of its own
answer: `tokens * hidden * 2` is 16,777,216 and 2 S H at once. Decisions (which of two is larger, does it fit into a
bucket) go by the number, so the formula holds as long as none of them would fall otherwise.
"""

from collections.abc import Mapping
from math import prod
from typing import Any

Monomial = tuple[tuple[str, int], ...]  # (symbol, exponent), sorted; () is the number 1
Sum = dict[Monomial, float]


class Size:
    """A number and the sum of monomials that it is the value of."""

    __slots__ = ("sum", "value")

    def __init__(self, value: float, monomials: Sum) -> None:
        self.value, self.sum = value, monomials

    def __add__(self, other: Any) -> "Size":
        total = dict(self.sum)
        for monomial, factor in _sum(other).items():
            total[monomial] = total.get(monomial, 0) + factor
        return Size(self.value + _value(other), {m: f for m, f in total.items() if f})

    def __mul__(self, other: Any) -> "Size":
        total: Sum = {}
        for one, factor in self.sum.items():
            for two, other_factor in _sum(other).items():
                monomial = _times(one, two, 1)
                total[monomial] = total.get(monomial, 0) + factor * other_factor
        return Size(self.value * _value(other), total)

    def __floordiv__(self, other: Any) -> Any:
        """A number without symbols where a rest is left: it is one of the step's decisions."""
        return _divided(self, other)

    def __rfloordiv__(self, other: Any) -> Any:
        return _divided(other, self)

    def __truediv__(self, other: Any) -> "Size":
        ((monomial, factor),) = _sum(other).items()
        divided = {_times(m, monomial, -1): f / factor for m, f in self.sum.items()}
        return Size(self.value / _value(other), divided)

    def __neg__(self) -> "Size":
        return self * -1

    def __sub__(self, other: Any) -> "Size":
        return self + (other * -1)

    def __rsub__(self, other: Any) -> "Size":
        return self * -1 + other

    def __pow__(self, exponent: int) -> "Size":
        power = self
        for _ in range(exponent - 1):
            power = power * self
        return power

    __radd__, __rmul__ = __add__, __mul__

    def __eq__(self, other: object) -> bool:
        return bool(self.value == _value(other))

    def __lt__(self, other: Any) -> bool:
        return bool(self.value < _value(other))

    def __le__(self, other: Any) -> bool:
        return bool(self.value <= _value(other))

    def __gt__(self, other: Any) -> bool:
        return bool(self.value > _value(other))

    def __ge__(self, other: Any) -> bool:
        return bool(self.value >= _value(other))

    def __hash__(self) -> int:
        return hash(("size", self.value))  # never taken for a plain number in a cache

    def __bool__(self) -> bool:
        return bool(self.value)

    def __str__(self) -> str:
        return str(self.value)

    def __int__(self) -> int:
        return int(self.value)

    __index__ = __int__


def symbol(name: str, value: float) -> Any:
    """A size that is one symbol; it stands wherever a number is asked for."""
    return Size(value, {((name, 1),): 1})


def scaled(value: float, like: Size) -> Any:
    """`value` as a multiple of `like`; padding and rounding go into the factor."""
    return like * (value / like.value) if value and like.value else Size(value, {(): value} if value else {})


def whole(value: Any) -> Any:
    """`int(value)` of a number."""
    return value if isinstance(value, Size) else int(value)


def evaluate(monomials: Sum, values: Mapping[str, float]) -> float:
    return sum(f * prod(values[name] ** power for name, power in m) for m, f in monomials.items())


def monomials_of(size: Any) -> Sum:
    """Those of a size, or a number as a multiple of 1."""
    return _sum(size)


def _sum(value: Any) -> Sum:
    return value.sum if isinstance(value, Size) else ({(): value} if value else {})


def _value(value: Any) -> Any:
    return value.value if isinstance(value, Size) else value


def _times(one: Monomial, two: Monomial, sign: int) -> Monomial:
    powers = dict(one)
    for name, power in two:
        powers[name] = powers.get(name, 0) + sign * power
    return tuple(sorted((n, p) for n, p in powers.items() if p))


def _divided(one: Any, two: Any) -> Any:
    value, rest = divmod(_value(one), _value(two))
    if rest or len(_sum(two)) != 1:
        return value
    return (one if isinstance(one, Size) else Size(one, _sum(one))) / two
