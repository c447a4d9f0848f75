"""What a run costs: GPU-hours at a price, and energy. Every figure keeps its range and where it is from."""

from dataclasses import dataclass

from shardwise.facts.gpus import Offer, Prices

# Share of a GPU's power limit that a training step draws on average, and what the rest of the host adds.
POWER_SHARE, HOST_SHARE = 0.85, 0.35


@dataclass(frozen=True, slots=True)
class Cost:
    """Dollars, low to high: the range of the time and the range of the quotes multiplied.

    `usd_per_gpu_hour` is the price counted with; `purchase_usd` what the offer costs to buy (None: not known).
    """

    low_usd: float
    usd: float
    high_usd: float
    usd_per_gpu_hour: float
    source: str
    energy_kwh: float
    purchase_usd: float | None = None


def estimate_cost(
    offer: Offer, seconds: float, low_seconds: float, high_seconds: float, prices: Prices, buy: bool = False
) -> Cost | None:
    """Cost of `seconds` (with bounds) on an offer; None when no price of that GPU is known."""
    price = prices.own(offer.gpu) if buy else prices.rent(offer.gpu)
    if price is None:
        return None
    hours = offer.count / 3600
    each = prices.purchase_usd(offer.gpu)
    return Cost(
        low_usd=low_seconds * hours * price.low,
        usd=seconds * hours * price.typical,
        high_usd=high_seconds * hours * price.high,
        usd_per_gpu_hour=price.typical,
        source=price.source,
        energy_kwh=energy_kwh(offer, seconds),
        purchase_usd=None if each is None else each * offer.count,
    )


def energy_kwh(offer: Offer, seconds: float) -> float:
    """Energy at the wall of GPUs and their hosts."""
    watts = offer.gpu.power_watts * offer.count * POWER_SHARE * (1 + HOST_SHARE)
    return watts * seconds / 3.6e6
