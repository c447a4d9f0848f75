"""This machine, found without torch: cores, memory, disk, GPUs; the processor as a device of its own."""

import os
import platform
import shutil
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path

from shardwise.errors import UnknownNameError, UsageError
from shardwise.facts.calibration import load_calibration
from shardwise.facts.experience import experience_of
from shardwise.facts.gpus import Gpu, Link, Offer, catalogue, find_gpu, parse_offer
from shardwise.facts.precision import MatrixRates, rates_here

_GHZ_UNKNOWN = 2.5
# Share of a link's rate that one large copy reaches; links are kept as vendors state them.
COPY_SHARE = 0.85
# A model's own Python around each operation (modules, hooks, checks) takes about twice the bare operation.
_PYTHON = 3.0
_STREAMED = 0.8  # of a data sheet's bandwidth; estimates take as much off
# Matrix FLOPs per core and cycle: two fused multiply-add units of that width (Agner Fog's tables). Processors
# with narrower units are not told apart: the range of the estimate covers them.
_FP32_PER_CYCLE = {"avx512f": 64, "avx2": 32, "neon": 16, "": 8}
_BF16_PER_CYCLE = {"amx_bf16": 1024, "avx512_bf16": 128}


@dataclass(frozen=True, slots=True)
class Machine:
    """What one host has. `memory_bytes` respects a container's limit; `free_disk_bytes` is of `folder`."""

    cores: int
    memory_bytes: int
    available_bytes: int
    folder: str
    free_disk_bytes: int
    processor: str
    ghz: float
    flags: frozenset[str]
    gpus: tuple[Gpu, ...]
    device: str  # the best one: cuda, mps or cpu
    notes: tuple[str, ...] = ()

    @property
    def threads(self) -> int:
        """Threads a training process will use: the cores, or fewer where OMP_NUM_THREADS says so."""
        asked = os.environ.get("OMP_NUM_THREADS", "")
        return min(self.cores, int(asked)) if asked.isdigit() and int(asked) > 0 else self.cores

    @property
    def has_fast_bf16(self) -> bool:
        """bf16 matrix instructions: AMX or AVX512_BF16. Without them bf16 on a CPU is slower than fp32."""
        return bool(self.flags & _BF16_PER_CYCLE.keys())

    def flops_per_second(self, precision: str) -> float:
        """Matrix peak of all cores."""
        table = _BF16_PER_CYCLE if precision == "bf16" and self.has_fast_bf16 else _FP32_PER_CYCLE
        per_cycle = next((v for flag, v in table.items() if flag in self.flags), 8)
        return per_cycle * self.ghz * 1e9 * self.threads

    def processor_as_device(self) -> Gpu:
        """The processor (or Apple's GPU, which shares its memory) in the form plans are made for."""
        rates = {p: self.flops_per_second(p) for p in ("fp32", "bf16") if p == "fp32" or self.has_fast_bf16}
        none = Link("none", 1e9, False, "one device")
        mps = self.device == "mps"
        # Two to twelve channels of DDR4/DDR5: 10 GB/s per core holds for small and large machines alike.
        bandwidth = 100e9 if mps else max(20e9, 10e9 * self.cores)
        if mps:
            rates = {"fp32": 4e12, "bf16": 4e12}  # an M2's GPU; larger ones do more
        return calibrated(
            Gpu(
                name="Apple GPU" if mps else "CPU",
                vendor="apple" if mps else "cpu",
                nominal_bytes=self.memory_bytes,
                usable_bytes=self.memory_bytes,
                flops_per_second=rates,
                sustained=0.6,
                bandwidth_bytes_per_second=bandwidth,
                link=none,
                pcie=none,
                network=none,
                power_watts=15.0 * self.cores,
                capability="mps" if mps else "cpu",
                gpus_per_node=1,
                host_bytes_per_gpu=self.memory_bytes,
                dram_bytes_per_second=bandwidth,
                disk_bytes=self.free_disk_bytes,
                disk_read_bytes_per_second=1e9,
                disk_write_bytes_per_second=0.5e9,
                form="desktop",
                source="this machine",
                kind="mps" if mps else "cpu",
            ),
            self.threads,
        )

    def offer(self) -> Offer:
        """All GPUs of this machine, or its processor."""
        if self.gpus:
            gpu = replace(
                calibrated(min(self.gpus, key=lambda g: g.usable_bytes), self.threads),
                host_bytes_per_gpu=self.memory_bytes // len(self.gpus),
                disk_bytes=self.free_disk_bytes,
            )
            return Offer(gpu, len(self.gpus), len(self.gpus), (*self.notes, *_words(gpu)))
        gpu = self.processor_as_device()
        return Offer(gpu, 1, 1, (*self.notes, *_words(gpu)))


def _words(gpu: Gpu) -> tuple[str, ...]:
    return (gpu.pace_words,) if gpu.pace_words else ()


def calibrated(gpu: Gpu, threads: int) -> Gpu:
    """The device as this machine is known to be: measured rates, where there are any, and finished runs' pace."""
    gpu = _with_rates(gpu, threads)
    found = experience_of(pace_key(gpu, threads), gpu.source)
    return gpu if found is None else replace(gpu, pace=found.factor, pace_words=found.words)


def pace_key(gpu: Gpu, threads: int) -> str:
    """What finished runs are kept under: a device, and on a processor as many threads."""
    return gpu.name if gpu.kind == "cuda" else f"{gpu.name}, {threads} threads"


def _with_rates(gpu: Gpu, threads: int) -> Gpu:
    """The device with the rates `shardwise calibrate` measured here, where it did; its peaks stay the vendor's."""
    found = load_calibration(gpu.kind, threads)
    if found is None:
        quick = rates_here(threads) if gpu.kind == "cpu" else None
        return gpu if quick is None else _with_quick_rates(gpu, quick)
    precision = "bf16" if gpu.has_bf16 else "fp32"
    rate = found.matrix_flops_per_second[precision]
    rates = gpu.flops_per_second
    if gpu.kind != "cuda":  # where peaks are guesses, the measured rates replace them
        rates = {p: found.matrix_flops_per_second[p] for p in rates if p in found.matrix_flops_per_second}
    pcie, link = found.host_bytes_per_second, found.link_bytes_per_second
    return replace(
        gpu,
        pcie=gpu.pcie if pcie is None else replace(gpu.pcie, bytes_per_second=pcie / COPY_SHARE),
        link=gpu.link if link is None else replace(gpu.link, bytes_per_second=link / COPY_SHARE),
        disk_read_bytes_per_second=found.disk_read_bytes_per_second or gpu.disk_read_bytes_per_second,
        disk_write_bytes_per_second=found.disk_write_bytes_per_second or gpu.disk_write_bytes_per_second,
        flops_per_second=rates,
        sustained=rate / gpu.peak_flops(precision) if gpu.kind == "cuda" else 1.0,
        bandwidth_bytes_per_second=found.bandwidth_bytes_per_second / _STREAMED,
        op_seconds=_PYTHON * found.op_seconds,
        measured=True,
        source=f"measured here on {found.measured}",
    )


def _with_quick_rates(gpu: Gpu, rates: MatrixRates) -> Gpu:
    """The processor with the rates that were measured to choose a precision; the rest stays assumed."""
    found = {"fp32": rates.fp32_flops_per_second, "bf16": rates.bf16_flops_per_second}
    streamed = rates.bandwidth_bytes_per_second
    return replace(
        gpu,
        flops_per_second={p: found[p] for p in gpu.flops_per_second},
        sustained=1.0,
        bandwidth_bytes_per_second=gpu.bandwidth_bytes_per_second
        if streamed is None
        else streamed / _STREAMED,
    )


def detect_machine(folder: str = ".") -> Machine:
    """Look at this machine. Takes milliseconds, or as long as nvidia-smi takes where it exists."""
    notes: list[str] = []
    gpus = _nvidia_gpus(notes)
    flags, processor, ghz = _processor()
    total, available = _memory()
    apple = platform.system() == "Darwin" and platform.machine() == "arm64"
    return Machine(
        cores=_cores(),
        memory_bytes=total,
        available_bytes=available,
        folder=folder,
        free_disk_bytes=_free_disk(Path(folder)),
        processor=processor,
        ghz=ghz,
        flags=flags,
        gpus=gpus,
        device="cuda" if gpus else "mps" if apple else "cpu",
        notes=tuple(notes),
    )


def _free_disk(folder: Path) -> int:
    folder = folder.resolve()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free


def _cores() -> int:
    """Cores this process may use: its affinity, and a container's quota."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # macOS
        cores = os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        if quota != "max":
            cores = min(cores, max(1, int(quota) // int(period)))
    except (OSError, ValueError):
        pass
    return cores


def _memory() -> tuple[int, int]:
    """Total and available bytes, within a container's limit."""
    total = available = 0
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            key, _, value = line.partition(":")
            if key == "MemTotal":
                total = int(value.split()[0]) * 1024
            elif key == "MemAvailable":
                available = int(value.split()[0]) * 1024
    except OSError:
        total = available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        if limit < total:
            total, available = limit, min(available, limit - used)
    except (OSError, ValueError):
        pass
    return total, available


def _processor() -> tuple[frozenset[str], str, float]:
    """Instruction sets, name and clock in GHz."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        flags = frozenset({"neon"} if platform.machine() == "arm64" else set())
        return flags, platform.processor() or platform.machine(), 3.2
    fields: dict[str, str] = {}
    for line in text.split("\n\n", 1)[0].splitlines():
        key, _, value = line.partition(":")
        fields[key.strip()] = value.strip()
    flags = frozenset((fields.get("flags") or fields.get("Features") or "").split())
    if "asimd" in flags:
        flags |= {"neon"}
    ghz = float(fields["cpu MHz"]) / 1000 if "cpu MHz" in fields else _GHZ_UNKNOWN
    return flags, fields.get("model name", platform.machine()), ghz


def _nvidia_gpus(notes: list[str]) -> tuple[Gpu, ...]:
    """GPUs as nvidia-smi lists them; one that is not in the catalogue is left out, and that is said."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ()
    query = [tool, "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError) as problem:
        notes.append(f"nvidia-smi is there but fails ({type(problem).__name__}): no GPU is planned for")
        return ()
    wanted = os.environ.get("CUDA_VISIBLE_DEVICES")
    rows = [line.rsplit(",", 1) for line in done.stdout.splitlines() if "," in line]
    if wanted is not None:
        keep = {int(i) for i in wanted.split(",") if i.strip().isdigit()}
        rows = [row for i, row in enumerate(rows) if i in keep]
    found = []
    for name, mib in rows:
        size = int(mib) * 2**20
        try:
            found.append(replace(identify_gpu(name, size), usable_bytes=size))
        except UnknownNameError:
            notes.append(f"GPU '{name.strip()}' is not in the catalogue: name one with --gpus to plan for it")
    return tuple(found)


# Words in drivers' names that do not tell cards apart.
_FILLER = {"hbm3", "hbm2e", "hbm2", "sxm", "sxm2", "sxm4", "sxm5", "generation", "laptop", "gpu"} | {
    *("blackwell", "server", "workstation", "edition", "max", "q"),
}


def identify_gpu(driver_name: str, memory_bytes: int) -> Gpu:
    """The catalogue's GPU for a name as the driver prints it ('NVIDIA A100-SXM4-80GB', 'NVIDIA H200').

    Raises UnknownNameError.
    """
    text = driver_name.casefold().replace("nvidia", "").replace("geforce", "").strip()
    words = text.replace("-", " ").split()
    core = "".join(w for w in words if w not in _FILLER and not w.endswith("gb"))
    gib = memory_bytes / 2**30
    near = [
        gpu
        for gpu in catalogue().values()
        if gpu.name.casefold().replace("-", "").startswith(core.replace("-", ""))
        and abs(gpu.usable_bytes / 2**30 - gib) < 0.12 * gib
    ]
    if "pcie" in core or not near:
        return find_gpu(driver_name) if not near else near[0]
    return min(near, key=lambda g: len(g.name))


def as_offer(gpus: str | None, nodes: int | None = None) -> Offer:
    """`--gpus` as an offer; 'cpu' and None mean this machine. Raises UsageError."""
    if gpus is None or gpus.casefold() in ("cpu", "here", "this"):
        machine = detect_machine()
        if gpus is not None and gpus.casefold() == "cpu":
            machine = replace(machine, gpus=(), device="cpu")
        if nodes not in (None, 1):
            raise UsageError(
                "--nodes with this machine", "it is one node", "say which GPUs: --gpus 8xH100-80GB"
            )
        return machine.offer()
    return parse_offer(gpus, nodes)
