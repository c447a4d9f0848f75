"""Machines for a test: Linux network namespaces on one switch, each with an address of its own.

Needs root, iproute2 and a kernel that lets us (`missing()` says what is not there). Nothing of this machine's own
network is touched: the switch is a namespace too, and every namespace made here is deleted by its name.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Host:
    """`run`: put in front of a command, it runs there."""

    name: str
    address: str
    interface: str = "eth0"

    @property
    def run(self) -> list[str]:
        return [_ip(), "netns", "exec", self.name] if self.name else []

    def limit(self, rate: str) -> None:
        """What this host sends leaves at this rate, such as 100mbit."""
        _do(*self.run, _tc(), "qdisc", "add", "dev", "eth0", "root", "tbf", "rate", rate, "burst", "64kb",
            "latency", "400ms")  # fmt: skip


HERE = Host("", "127.0.0.1", "lo")  # no namespace


def missing() -> str:
    """Why namespaces cannot be made here; empty when they can."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return "network namespaces need root"
    if not _ip() or not _tc():
        return "iproute2 (ip, tc) is not installed"
    name = f"sw{os.getpid()}probe"
    made = subprocess.run([_ip(), "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"this kernel makes no network namespaces: {made.stderr.strip()}"
    try:
        probe = [_ip(), "netns", "exec", name, _ip(), "link", "add", "b0", "type", "bridge"]
        bridged = subprocess.run(probe, capture_output=True, text=True, check=False)
        return f"no bridges here: {bridged.stderr.strip()}" if bridged.returncode else ""
    finally:
        _do(_ip(), "netns", "del", name)


@contextmanager
def hosts(count: int) -> Iterator[list[Host]]:
    """So many hosts, 10.77.0.1 and up, that reach each other and nothing else."""
    switch = f"sw{os.getpid()}"
    found = [Host(f"{switch}n{number}", f"10.77.0.{number + 1}") for number in range(count)]
    made = []
    try:
        _do(_ip(), "netns", "add", switch)
        made.append(switch)
        inside = [_ip(), "netns", "exec", switch, _ip()]
        _do(*inside, "link", "add", "bridge0", "type", "bridge")
        _do(*inside, "link", "set", "bridge0", "up")
        for number, host in enumerate(found):
            _do(_ip(), "netns", "add", host.name)
            made.append(host.name)
            _do(
                *inside,
                "link",
                "add",
                f"port{number}",
                "type",
                "veth",
                "peer",
                "name",
                "eth0",
                "netns",
                host.name,
            )
            _do(*inside, "link", "set", f"port{number}", "master", "bridge0", "up")
            _do(*host.run, _ip(), "address", "add", f"{host.address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _do(*host.run, _ip(), "link", "set", device, "up")
        yield found
    finally:
        for name in made:
            _do(_ip(), "netns", "del", name)


def _do(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=30)


def _ip() -> str:
    return shutil.which("ip", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin") or ""


def _tc() -> str:
    return shutil.which("tc", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin") or ""
