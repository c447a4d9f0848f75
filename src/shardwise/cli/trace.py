"""`shardwise trace`: what one step of a recipe allocates, on fake tensors, without a GPU."""

import json

import click


@click.command()
@click.argument("recipe_file", metavar="RECIPE", type=click.Path())
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="Change one key of the recipe.")
@click.option("--processes", type=click.IntRange(1), help="Ranks of the run; the recipe's if not given.")
@click.option(
    "--device", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True, help="Whose kernels."
)
@click.option("--json", "as_json", is_flag=True, help="The result as JSON.")
def trace(
    recipe_file: str, settings: tuple[str, ...], processes: int | None, device: str, as_json: bool
) -> None:
    """Record one optimizer step of RECIPE on fake tensors, an evaluation and a save: live bytes per phase and term.

    Nothing is downloaded, no weights are read, no GPU is needed; the model's config must be in a local folder.
    Engines are the real ones, with ranks that are not there; of ddp the reducer is a stand-in.
    """
    from shardwise.recipe import load_recipe
    from shardwise.training.trace.report import trace_json, trace_recipe, trace_text

    recipe = load_recipe(recipe_file, settings)
    result = trace_recipe(recipe, processes, device, lambda line: click.echo(line, err=True))
    click.echo(json.dumps(trace_json(result), indent=1) if as_json else trace_text(result), nl=as_json)
