"""GPUs, the links between them, hosts and prices: gpus.json and prices.json, each figure with its source."""

import json
import re
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from shardwise.errors import UsageError, unknown_name


@dataclass(frozen=True, slots=True)
class Link:
    """Bytes per second in one direction, per GPU, as the vendor states it (no protocol losses)."""

    name: str
    bytes_per_second: float
    shared: bool = False  # one for all GPUs of a node
    note: str = ""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One device. `usable_bytes` is the total a process sees; `nominal_bytes` the vendor's name.

    `flops_per_second` are dense matrix rates by dtype; a dtype without an entry is not supported by the
    matrix units (T4 and V100 have no bf16). `sustained` is the share of that rate which large matrix products
    hold over a long run: power limits lower it, clocks above the stated boost (GeForce) raise it.
    """

    name: str
    vendor: str
    nominal_bytes: int
    usable_bytes: int
    flops_per_second: dict[str, float]
    sustained: float
    bandwidth_bytes_per_second: float
    link: Link
    pcie: Link
    network: Link
    power_watts: float
    capability: str
    gpus_per_node: int
    host_bytes_per_gpu: int
    dram_bytes_per_second: float  # of one host
    disk_bytes: int
    disk_read_bytes_per_second: float
    disk_write_bytes_per_second: float
    form: str
    source: str
    kind: Literal["cuda", "cpu", "mps"] = "cuda"
    op_seconds: float | None = None  # to issue one operation, where it was measured
    measured: bool = False  # rates are this machine's own
    pace: float = 1.0  # on an estimated time, from finished runs on this machine
    pace_words: str = ""  # which runs

    def peak_flops(self, precision: str) -> float:
        """Dense matrix rate; bf16 falls back to fp16's on cards without it, fp32 to the vector rate."""
        rates = self.flops_per_second
        return rates.get(precision) or rates.get("fp16" if precision == "bf16" else "fp32") or 1e12

    @property
    def has_bf16(self) -> bool:
        return "bf16" in self.flops_per_second


@dataclass(frozen=True, slots=True)
class Offer:
    """Some number of one kind of GPU, and how they stand in nodes."""

    gpu: Gpu
    count: int
    gpus_per_node: int
    notes: tuple[str, ...] = ()

    @property
    def nodes(self) -> int:
        return -(-self.count // self.gpus_per_node)

    @property
    def name(self) -> str:
        return f"{self.count}x{self.gpu.name}"

    @property
    def host_bytes_per_node(self) -> int:
        return self.gpu.host_bytes_per_gpu * self.gpus_per_node


@dataclass(frozen=True, slots=True)
class Price:
    """Dollars per GPU and hour: the middle of the quotes, their range, and where they are from."""

    low: float
    typical: float
    high: float
    source: str


@cache
def _data() -> dict[str, Any]:
    data: dict[str, Any] = json.loads(files("shardwise.facts").joinpath("gpus.json").read_text("utf-8"))
    return data


def _link(name: str) -> Link:
    record = _data()["links"][name]
    return Link(name, record["bytes_per_second"], record["shared"], record["note"])


@cache
def catalogue() -> dict[str, Gpu]:
    """Every known GPU by name."""
    data, found = _data(), {}
    for name, r in data["gpus"].items():
        host = data["hosts"][r["form"]]
        disk = data["disks"][host["disk"]]
        found[name] = Gpu(
            name=name,
            vendor=r["vendor"],
            nominal_bytes=r["nominal_bytes"],
            usable_bytes=r["usable_bytes"],
            flops_per_second=r["flops_per_second"],
            sustained=r["sustained"],
            bandwidth_bytes_per_second=r["bandwidth_bytes_per_second"],
            link=_link(r["link"]),
            pcie=_link(r["pcie"]),
            network=_link(r["network"]),
            power_watts=r["power_watts"],
            capability=r["capability"],
            gpus_per_node=r["gpus_per_node"],
            host_bytes_per_gpu=host["memory_bytes_per_gpu"],
            dram_bytes_per_second=host["dram_bytes_per_second"],
            disk_bytes=host["disk_bytes"],
            disk_read_bytes_per_second=disk["read_bytes_per_second"],
            disk_write_bytes_per_second=disk["write_bytes_per_second"],
            form=r["form"],
            source=r["source"],
        )
    return found


def link_names() -> list[str]:
    return list(_data()["links"])


def find_link(name: str) -> Link:
    """A link by name (nvlink4, pcie5, ib-ndr400, roce-200, eth-100). Raises UnknownNameError."""
    if name not in _data()["links"]:
        raise unknown_name("link", name, link_names())
    return _link(name)


def _plain(name: str) -> str:
    """Spellings people and drivers use, reduced to what tells cards apart."""
    text = re.sub(r"nvidia|geforce|tesla|amd|instinct|graphics|[\s_-]", "", name.casefold())
    return text.replace("gib", "gb")


@cache
def _by_plain_name() -> dict[str, str]:
    found = {}
    for name, record in _data()["gpus"].items():
        for each in (name, *record["aliases"]):
            found[_plain(each)] = name
    return found


def find_gpu(name: str) -> Gpu:
    """A GPU by its name or another common spelling. Raises UnknownNameError with the nearest names."""
    known = _by_plain_name().get(_plain(name))
    if known is None:
        raise unknown_name("GPU", name, catalogue())
    return catalogue()[known]


_OFFER = re.compile(r"^\s*(?:(\d+)\s*[x×*]\s*)?(?:(\d+)\s*[x×*]\s*)?([A-Za-z0-9][\w\s.-]*?)\s*$")


def parse_offer(text: str, nodes: int | None = None) -> Offer:
    """'8xH100-80GB', 'H100' (one), '2x8xH100' (two nodes of eight) -> Offer. Raises UsageError."""
    match = _OFFER.match(text)
    if not match:
        raise UsageError(
            f"'{text}' is not an offer of GPUs", "expected a count and a name", "write it like 8xH100-80GB"
        )
    first, second, name = match.groups()
    outer, inner = (first, second) if second else (None, first)
    gpu = find_gpu(name)
    given_nodes = int(outer) if outer else nodes
    count = int(inner or 1) * (int(outer) if outer else 1)
    if count < 1 or (given_nodes is not None and given_nodes < 1):
        raise UsageError(f"'{text}' offers no GPU", "the count must be at least 1", "write it like 1xRTX4090")
    per_node = min(count, gpu.gpus_per_node)
    if given_nodes:
        if count % given_nodes:
            raise UsageError(
                f"{count} GPUs cannot be spread over {given_nodes} nodes",
                "every node must hold the same number",
                f"use {count - count % given_nodes or given_nodes} "
                f"or {count + given_nodes - count % given_nodes} GPUs",
            )
        per_node = count // given_nodes
    elif count > gpu.gpus_per_node and count % gpu.gpus_per_node:
        whole = count // gpu.gpus_per_node * gpu.gpus_per_node
        raise UsageError(
            f"{count}x{gpu.name} does not fill whole nodes",
            f"a node of this kind holds {gpu.gpus_per_node} of them",
            f"use {whole} or {whole + gpu.gpus_per_node}, or say how many nodes: --nodes N",
        )
    notes: tuple[str, ...] = ()
    if _plain(name) != _plain(gpu.name):
        notes = (f"'{name}' is read as {gpu.name} ({gpu.usable_bytes / 2**30:.1f} GiB)",)
    return Offer(gpu, count, per_node, notes)


def with_network(offer: Offer, link: str) -> Offer:
    """The same offer with another network between its nodes."""
    return replace(offer, gpu=replace(offer.gpu, network=find_link(link)))


@dataclass(frozen=True, slots=True)
class Prices:
    """Rent quotes and purchase prices by GPU name, and how owning is counted."""

    gpus: dict[str, Any]
    owning: dict[str, Any]

    def rent(self, gpu: Gpu) -> Price | None:
        quotes = self.gpus.get(gpu.name, {}).get("rent")
        if not quotes:
            return None
        values = sorted(q["usd_per_hour"] for q in quotes)
        middle = values[len(values) // 2] if len(values) % 2 else sum(values[len(values) // 2 - 1 :][:2]) / 2
        source = "; ".join(f"{q['source']} {q['usd_per_hour']:.2f} ({q['date']})" for q in quotes)
        return Price(values[0], middle, values[-1], source)

    def own(self, gpu: Gpu) -> Price | None:
        """Purchase spread over years of use, plus power; per GPU and hour of use."""
        record = self.gpus.get(gpu.name, {}).get("purchase")
        if not record:
            return None
        o = self.owning
        hours = o["years"] * 8766 * o["utilisation"]
        share = o["host_share"].get(gpu.form, 0.35)
        power = gpu.power_watts / 1000 * o["pue"] * o["usd_per_kwh"]
        per_hour = record["usd"] * (1 + share) / hours + power
        source = (
            f"{record['usd']:,} USD ({record['source']}, {record['date']}) + {share:.0%} for the host, over "
            f"{o['years']} years at {o['utilisation']:.0%} use, {o['usd_per_kwh']} USD/kWh"
        )
        return Price(per_hour * 0.8, per_hour, per_hour * 1.3, source)

    def purchase_usd(self, gpu: Gpu) -> float | None:
        """What one GPU with its share of a host costs."""
        record = self.gpus.get(gpu.name, {}).get("purchase")
        return None if not record else record["usd"] * (1 + self.owning["host_share"].get(gpu.form, 0.35))


def load_prices(path: str | None = None) -> Prices:
    """The built-in prices, or a JSON file of the same form that replaces them GPU by GPU.

    A file may be as short as {"gpus": {"H100-80GB": {"rent": [{"usd_per_hour": 2.1, "source": "our contract",
    "date": "2026-11"}]}}}. Raises UsageError.
    """
    data = json.loads(files("shardwise.facts").joinpath("prices.json").read_text("utf-8"))
    if path is not None:
        try:
            own = json.loads(Path(path).read_text(encoding="utf-8"))
            entries = own["gpus"].items()
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as problem:
            raise UsageError(
                f"prices '{path}' cannot be read",
                f"{type(problem).__name__}: {problem}",
                'write it like {"gpus": {"H100-80GB": {"rent": [{"usd_per_hour": 2.1, "source": "ours", '
                '"date": "2026-11"}]}}}',
            ) from None
        for name, entry in entries:
            data["gpus"][find_gpu(name).name] = _checked_price(path, name, entry)
        data["owning"] |= own.get("owning", {})
    return Prices(data["gpus"], data["owning"])


def _checked_price(path: str, name: str, entry: Any) -> dict[str, Any]:
    try:
        for quote in entry.get("rent", []):
            quote.setdefault("source", path)
            quote.setdefault("date", "given")
            if not quote["usd_per_hour"] > 0:
                raise ValueError("usd_per_hour must be above 0")
        if "purchase" in entry:
            entry["purchase"] = {"source": path, "date": "given"} | entry["purchase"]
            if not entry["purchase"]["usd"] > 0:
                raise ValueError("usd must be above 0")
        return dict(entry)
    except (KeyError, TypeError, AttributeError, ValueError) as problem:
        raise UsageError(
            f"prices '{path}', {name}: not a price",
            f"{type(problem).__name__}: {problem}",
            'rent is a list of {"usd_per_hour": number}, purchase is {"usd": number}',
        ) from None
