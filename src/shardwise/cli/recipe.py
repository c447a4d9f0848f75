"""`shardwise recipe`: the keys of a recipe."""

import json

import click


@click.command()
@click.option("--schema", is_flag=True, help="Print the JSON Schema, for editors.")
def recipe(schema: bool) -> None:
    """Every key of a recipe with its default and meaning."""
    from shardwise.recipe.describe import describe
    from shardwise.recipe.schema import Recipe

    click.echo(json.dumps(Recipe.model_json_schema(), indent=2) if schema else describe())
