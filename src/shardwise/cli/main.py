"""The `shardwise` command. Subcommands are imported when called, so that `--help` and `plan` stay light."""

import importlib
import sys

import click

from shardwise import __version__
from shardwise.errors import MissingDependencyError, ShardwiseError, nearest

# name -> (module, attribute, one line of help); in the order people meet them
COMMANDS = {
    "demo": ("shardwise.cli.demo", "demo", "A real fine-tuning run on this machine, start to end."),
    "plan": ("shardwise.cli.plan", "plan", "What fits, what it takes, which stack."),
    "trace": ("shardwise.cli.trace", "trace", "What one step allocates, on fake tensors."),
    "train": ("shardwise.cli.train", "train", "Run a recipe."),
    "launch": ("shardwise.cli.launch", "launch", "Run a recipe on several machines, by their scheduler."),
    "status": ("shardwise.cli.launch", "status", "Launched runs: state and progress."),
    "logs": ("shardwise.cli.launch", "logs", "Logs of a launched run."),
    "cancel": ("shardwise.cli.launch", "cancel", "Ask a launched run to save and stop."),
    "runs": ("shardwise.cli.runs", "runs", "List runs."),
    "show": ("shardwise.cli.runs", "show", "Show one run: estimate against measurement."),
    "web": (
        "shardwise.cli.web",
        "web",
        "The same on a local page: plan, look at data, watch and compare runs.",
    ),
    "chat": ("shardwise.cli.chat", "chat", "Talk to a trained model."),
    "eval": ("shardwise.cli.evaluate", "evaluate", "Held-out loss of a trained model."),
    "export": ("shardwise.cli.export", "export", "Adapter, merged model or GGUF, read back and compared."),
    "data": ("shardwise.cli.data", "data", "Check a data set before training on it."),
    "recipe": ("shardwise.cli.recipe", "recipe", "Every key of a recipe, or its JSON Schema."),
    "accuracy": ("shardwise.cli.accuracy", "accuracy", "Score the estimates against measured runs."),
    "calibrate": ("shardwise.cli.calibrate", "calibrate", "Measure this machine, for sharper plans."),
    "doctor": ("shardwise.cli.doctor", "doctor", "What can and cannot run on this machine, and why."),
}


# package -> the extra that brings it; plans need none of them
EXTRAS = {
    **dict.fromkeys(
        ("torch", "transformers", "peft", "numpy", "tokenizers", "safetensors", "psutil"), "train"
    ),
    "pyarrow": "data",
    "bitsandbytes": "qlora",
    "deepspeed": "deepspeed",
    "starlette": "web",
    "uvicorn": "web",
    "gguf": "export",
    "ray": "ray",
    "gpuhunt": "prices",
}


def _not_installed(package: str, extra: str) -> MissingDependencyError:
    return MissingDependencyError(
        f"this command needs the package {package}, which is not installed",
        "shardwise alone only plans; what trains comes with an extra",
        f"pip install 'shardwise[{extra}]'",
    )


class _Lazy(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        module, attribute, _ = COMMANDS[name]
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            close = nearest(args[0], COMMANDS)
            raise click.UsageError(
                f"no command '{args[0]}'" + (f", did you mean '{close[0]}'?" if close else ""), ctx
            )
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, _, line) in COMMANDS.items()])


@click.command(cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="shardwise")
def cli() -> None:
    """Plan a fine-tuning run, run exactly that plan, and see estimate against measurement."""


def main(args: list[str] | None = None) -> None:
    """Entry point: 0 success, 1 failure, 2 misuse, 75 interrupted with its state saved."""
    try:
        cli.main(args=args, prog_name="shardwise", standalone_mode=False)
    except ModuleNotFoundError as problem:
        extra = EXTRAS.get((problem.name or "").partition(".")[0])
        if extra is None:
            raise
        asked = (args if args is not None else sys.argv[1:])[:1]
        click.echo(str(_not_installed(str(problem.name), "demo" if asked == ["demo"] else extra)), err=True)
        sys.exit(2)
    except ShardwiseError as problem:
        click.echo(str(problem), err=True)
        sys.exit(problem.exit_code)
    except click.UsageError as problem:
        click.echo(f"error: {problem.format_message()}", err=True)
        command = problem.ctx.command_path if problem.ctx else "shardwise"
        click.echo(f" hint: {command} --help", err=True)
        sys.exit(2)
    except click.ClickException as problem:
        problem.show()
        sys.exit(2)
    except (click.Abort, KeyboardInterrupt):
        click.echo("stopped", err=True)
        sys.exit(130)


if __name__ == "__main__":
    main()
