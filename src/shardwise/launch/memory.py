"""What the kernel says about memory: how much a process holds, and whether it killed one."""

import os
from pathlib import Path


def resident_bytes(pid: int) -> int:
    """Resident memory of a process now; 0 where the kernel does not tell (not Linux, or it has ended)."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def kernel_kills() -> int:
    """Processes killed for want of memory so far, on this machine and in our control groups.

    Only differences between two calls mean something. Sources: `oom_kill` of /proc/vmstat (Linux 4.13),
    `oom_kill` of memory.events (cgroup v2) or memory.oom_control (v1).
    """
    files = [Path("/proc/vmstat")]
    try:
        groups = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        groups = []
    for line in groups:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            files += [
                Path("/sys/fs/cgroup") / path.lstrip("/") / "memory.events",
                Path("/sys/fs/cgroup/memory.events"),
            ]
        elif "memory" in controllers.split(","):
            files.append(Path("/sys/fs/cgroup/memory") / path.lstrip("/") / "memory.oom_control")
    return sum(_count(file) for file in dict.fromkeys(files))


def _count(file: Path) -> int:
    try:
        for line in file.read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == "oom_kill":
                return int(value)
    except (OSError, ValueError):
        pass
    return 0
