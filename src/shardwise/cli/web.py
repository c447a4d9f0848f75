"""`shardwise web`: the local page."""

import os
from pathlib import Path

import click


@click.command()
@click.option(
    "--folder",
    default="runs",
    show_default=True,
    type=click.Path(path_type=Path),
    help="Where run folders are.",
)
@click.option(
    "--data", multiple=True, type=click.Path(), help="A data file the Data page may show; repeatable."
)
@click.option(
    "--model", multiple=True, type=click.Path(), help="A model folder the Plan page may read; repeatable."
)
@click.option(
    "--host", default="127.0.0.1", show_default=True, help="Address to listen on; others need a password."
)
@click.option(
    "--port", default=8707, show_default=True, type=click.IntRange(0, 65535), help="Port; 0: a free one."
)
@click.option("--allow-host", multiple=True, help="A name browsers may reach the page by; repeatable.")
@click.option("--open/--no-open", "open_browser", default=False, help="Open a browser.")
def web(
    folder: Path,
    data: tuple[str, ...],
    model: tuple[str, ...],
    host: str,
    port: int,
    allow_host: tuple[str, ...],
    open_browser: bool,
) -> None:
    """Plan by moving sliders, watch runs, compare them; on this machine only.

    The address carries a token; without it nothing is served. From another machine: ssh -L 8707:127.0.0.1:8707 HOST.
    A --host others can reach needs the environment variable SHARDWISE_WEB_PASSWORD.
    """
    from shardwise.errors import MissingDependencyError

    try:
        from shardwise.web.server import serve
    except ModuleNotFoundError as problem:
        if problem.name not in ("starlette", "uvicorn"):
            raise
        raise MissingDependencyError(
            f"the page needs the package '{problem.name}'",
            "it is not installed",
            "pip install 'shardwise[web]'",
        ) from None
    serve(
        folder,
        data,
        model,
        host,
        port,
        os.environ.get("SHARDWISE_WEB_PASSWORD") or None,
        allow_host,
        open_browser,
    )
