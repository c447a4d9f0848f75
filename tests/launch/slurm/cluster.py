"""A Slurm cluster of two nodes on this machine, for the time of a test: munged, slurmctld and two slurmd.

Nothing is installed: where Debian's packages slurmctld, slurmd, slurm-client, munge and slurm-wlm-basic-plugins are
not there, `missing()` says which. All files lie in one folder, all ports are free ones on loopback, and every daemon
is a child of this process, ended by its own process id.
"""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue")
CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
# cred_expire: a requeued job waits this long and a second, 121 s by default
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=sched_interval=2,bf_interval=2
SlurmdParameters=config_overrides
ReturnToService=2
InactiveLimit=0
KillWait=5
MinJobAge=300
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2 RealMemory=4000
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2 RealMemory=4000
PartitionName=low Nodes=n[1-2] Default=YES MaxTime=60 PriorityTier=1 PreemptMode=REQUEUE GraceTime=60
PartitionName=high Nodes=n[1-2] MaxTime=60 PriorityTier=10 PreemptMode=OFF
"""


@dataclass(frozen=True)
class Cluster:
    """`environment`: what the commands need to find it."""

    folder: Path
    environment: dict[str, str]

    def run(self, *command: str) -> str:
        """One of Slurm's commands; its output. Raises on failure."""
        return subprocess.run(
            command, env={**os.environ, **self.environment}, capture_output=True, text=True, check=True
        ).stdout

    def job(self, number: str) -> dict[str, str]:
        """`scontrol show job` as a dict."""
        words = self.run("scontrol", "--oneliner", "show", "job", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)


def missing() -> str:
    """Which programs are not installed; empty when the cluster can be started."""
    lacking = [name for name in PROGRAMS if not _program(name)]
    return f"not installed: {', '.join(lacking)}" if lacking else ""


@contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    """Start it, wait until both nodes are idle, and end every daemon on the way out."""
    host = socket.gethostname()
    folder.chmod(0o755)  # munged refuses a socket in a folder that others cannot enter
    (folder / "state").mkdir()
    (folder / "munge.key").write_bytes(os.urandom(1024))
    (folder / "munge.key").chmod(0o600)
    config = CONFIG.format(folder=folder, host=host, ports=_free_ports(3), user=_user())
    (folder / "slurm.conf").write_text(config)
    environment = {"SLURM_CONF": str(folder / "slurm.conf")}
    daemons: list[subprocess.Popen[bytes]] = []

    def daemon(*command: str) -> None:
        with (folder / "daemons.log").open("ab") as log:
            daemons.append(
                subprocess.Popen(
                    [_program(command[0]), *command[1:]],
                    env={**os.environ, **environment},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )
            )

    try:
        daemon(
            "munged", "--foreground", "--force", f"--key-file={folder}/munge.key", f"--socket={folder}/munge.socket",
            f"--pid-file={folder}/munged.pid", f"--log-file={folder}/munged.log", f"--seed-file={folder}/munged.seed",
        )  # fmt: skip
        _until(lambda: (folder / "munge.socket").exists(), folder)
        daemon("slurmctld", "-D")
        for node in ("n1", "n2"):
            (folder / node).mkdir()
            daemon("slurmd", "-D", "-N", node)
        found = Cluster(folder, environment)
        _until(lambda: _idle(found) == 2, folder)
        yield found
    finally:
        for process in reversed(daemons):
            process.terminate()
        for process in reversed(daemons):
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _idle(found: Cluster) -> int:
    try:
        return (
            found.run("sinfo", "--noheader", "--Node", "--partition=low", "--format=%T").split().count("idle")
        )
    except subprocess.CalledProcessError:
        return 0


def _until(ready, folder: Path, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > deadline:
            logs = "\n".join(
                path.read_text(errors="replace")[-2000:] for path in sorted(folder.glob("*.log"))
            )
            raise RuntimeError(f"Slurm did not start within {seconds} s\n{logs}")
        time.sleep(0.2)


def _program(name: str) -> str:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin") or ""


def _user() -> str:
    import pwd

    return pwd.getpwuid(os.getuid()).pw_name


def _free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]
    finally:
        for probe in probes:
            probe.close()
