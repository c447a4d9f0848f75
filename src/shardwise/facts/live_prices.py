"""Today's on-demand prices through the gpuhunt package (extra: `pip install gpuhunt`), by provider."""

from collections import defaultdict
from datetime import date
from typing import Any

from shardwise.errors import MissingDependencyError, UnknownNameError, UsageError
from shardwise.facts.gpus import Prices, find_gpu
from shardwise.facts.machine import identify_gpu


def with_live_rent(prices: Prices, notes: list[str]) -> Prices:
    """The same prices with rent quotes of today: per provider the cheapest on-demand instance of each GPU.

    GPUs without an offer keep their built-in quotes. Raises MissingDependencyError without gpuhunt, UsageError
    when its catalogue cannot be fetched.
    """
    try:
        import gpuhunt
    except ImportError:
        raise MissingDependencyError(
            "--live-prices needs the package gpuhunt",
            "it is not installed",
            "pip install gpuhunt; or give your own prices with --prices FILE",
        ) from None
    try:
        items = gpuhunt.query(spot=False, min_gpu_count=1)
    except Exception as problem:  # its providers fail in ways of their own
        raise UsageError(
            "live prices cannot be fetched",
            f"{type(problem).__name__}: {problem}",
            "try without --live-prices: built-in quotes carry their dates",
        ) from None
    quotes = cheapest_by_provider(items)
    today = date.today().isoformat()
    merged = dict(prices.gpus)
    for name, by_provider in quotes.items():
        rent = [
            {"usd_per_hour": round(usd, 4), "source": provider, "date": today}
            for provider, usd in sorted(by_provider.items())
        ]
        merged[name] = {**merged.get(name, {}), "rent": rent}
    notes.append(
        f"rent prices of {len(quotes)} GPUs are today's, through gpuhunt; the rest are built-in quotes"
    )
    return Prices(merged, prices.owning)


def cheapest_by_provider(items: list[Any]) -> dict[str, dict[str, float]]:
    """GPU name -> provider -> dollars per GPU and hour. Instances with GPUs outside our catalogue are left out."""
    found: dict[str, dict[str, float]] = defaultdict(dict)
    for item in items:
        if not item.gpu_count or not item.gpu_name or not item.price:
            continue
        try:
            name = _name(item.gpu_name, item.gpu_memory)
        except UnknownNameError:
            continue
        each = item.price / item.gpu_count
        found[name][item.provider] = min(each, found[name].get(item.provider, each))
    return dict(found)


def _name(name: str, memory_gb: float | None) -> str:
    """gpuhunt's 'A100' with 80 GB -> our A100-80GB."""
    if memory_gb:
        try:
            return find_gpu(f"{name}-{memory_gb:.0f}GB").name
        except UnknownNameError:
            return identify_gpu(name, int(memory_gb * 2**30)).name
    return find_gpu(name).name
