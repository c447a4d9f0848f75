"""`shardwise calibrate`: measure this machine, so that plans for it stop assuming."""

import json
import subprocess
import sys

import click


@click.command()
@click.option(
    "--forget", is_flag=True, help="Delete what was measured, finished runs too: plan from data sheets again."
)
def calibrate(forget: bool) -> None:
    """Measure matrix products, bandwidth, links, disk and host speed of this machine; less than a minute.

    Finished runs add to it by themselves.
    """
    from shardwise.errors import MissingDependencyError, RunError
    from shardwise.facts.calibration import Calibration, calibration_path, save_calibration
    from shardwise.facts.experience import experience_path
    from shardwise.facts.machine import detect_machine
    from shardwise.facts.precision import rates_path
    from shardwise.units import format_bytes

    if forget:
        for path in (calibration_path(), rates_path(), experience_path()):
            path.unlink(missing_ok=True)
            click.echo(f"forgotten: {path}")
        return
    click.echo("measuring: leave the machine alone for a moment", err=True)
    done = subprocess.run(
        [sys.executable, "-m", "shardwise.training.calibrate"], capture_output=True, text=True, timeout=600
    )
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        if "No module named" in last:
            raise MissingDependencyError("calibrate needs torch", last, "pip install 'shardwise[train]'")
        raise RunError(
            "the measurement failed", last, "run python -m shardwise.training.calibrate to see more"
        )
    found = Calibration(**json.loads(done.stdout.strip().splitlines()[-1]))
    path = save_calibration(found)
    click.echo(f"device      {found.device}, {found.threads} threads")
    for precision, rate in found.matrix_flops_per_second.items():
        click.echo(f"matrix      {rate / 1e12:.2f} TFLOP/s in {precision}")
    click.echo(f"bandwidth   {format_bytes(found.bandwidth_bytes_per_second)}/s")
    for name, speed in (
        ("disk write", found.disk_write_bytes_per_second),
        ("disk read", found.disk_read_bytes_per_second),
        ("host to GPU", found.host_bytes_per_second),
        ("GPU to GPU", found.link_bytes_per_second),
    ):
        if speed is not None:
            click.echo(f"{name:11} {format_bytes(speed)}/s")
    click.echo(f"operation   {found.op_seconds * 1e6:.1f} us to issue one")
    cores = detect_machine().cores
    if found.busy > 0.5 * cores:
        click.echo(
            f"note: the load was {found.busy:.1f} on {cores} cores, so other work slowed this down; "
            "calibrate again when the machine is quiet",
            err=True,
        )
    click.echo(f"wrote {path}")
