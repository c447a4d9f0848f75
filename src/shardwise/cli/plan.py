"""`shardwise plan`: the question as flags, the answer as text or JSON, the choice as a recipe."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from shardwise.facts.gpus import Offer
    from shardwise.facts.model import ModelShape
    from shardwise.plan.model import DataFacts
    from shardwise.plan.search import Answer


@click.command()
@click.argument("model")
@click.option("--method", type=click.Choice(["full", "lora", "qlora"]), help="Only this method.")
@click.option(
    "--at-least-quality",
    type=click.Choice(["full", "lora", "qlora"]),
    help="This method or one that can teach more.",
)
@click.option(
    "--goal",
    type=click.Choice(["steer", "teach"]),
    default="steer",
    show_default=True,
    help="steer what the model knows (style, format, tasks: adapters), or teach it (all weights).",
)
@click.option(
    "--gpus",
    multiple=True,
    metavar="OFFER",
    help="Like 8xH100-80GB, 'RTX 4090' or cpu; may be given several times. "
    "'any' searches the catalogue. Without it: this machine's GPUs, or the catalogue.",
)
@click.option("--nodes", type=click.IntRange(1), help="Spread the GPUs over so many nodes.")
@click.option("--network", metavar="LINK", help="Between nodes, like ib-ndr400, roce-200, eth-25.")
@click.option("--data", type=click.Path(), help="The training file: its rows are counted.")
@click.option("--tokens", metavar="N", help="Training tokens of one epoch, like 10M.")
@click.option("--epochs", type=click.FloatRange(0, min_open=True), default=1.0, show_default=True)
@click.option("--sequence-length", type=click.IntRange(1), help="Tokens per packed sequence.")
@click.option("--global-batch-size", type=click.IntRange(1), help="Sequences per optimizer step, all GPUs.")
@click.option("--micro-batch-size", type=click.IntRange(1), help="Only this many sequences per GPU at once.")
@click.option(
    "--activation-checkpointing",
    metavar="none|selective|full|LAYERS",
    help="Only this kind, or so many layers.",
)
@click.option("--budget", metavar="USD", help="At most this much, like 500usd.")
@click.option("--deadline", metavar="TIME", help="At most this long, like 12h.")
@click.option("--buy", is_flag=True, help="Count owning the GPUs instead of renting them.")
@click.option("--prices", type=click.Path(), metavar="FILE", help="Your own prices (JSON).")
@click.option("--live-prices", is_flag=True, help="Today's rent quotes through the gpuhunt package.")
@click.option("--rank", type=click.IntRange(1), default=16, show_default=True, help="Of LoRA adapters.")
@click.option(
    "--targets",
    default="all-linear",
    show_default=True,
    help="Adapted layers: all-linear, attention, or names with commas.",
)
@click.option("--no-master-weights", is_flag=True, help="Pure bf16: no fp32 copies of trained weights.")
@click.option("--revision", help="Hub revision of the model.")
@click.option("--explain", is_flag=True, help="Every term of memory and time with its formula.")
@click.option("--json", "as_json", is_flag=True, help="The answer as JSON.")
@click.option("--write", type=click.Path(), metavar="RECIPE", help="Write the recommended recipe there.")
def plan(model: str, as_json: bool, explain: bool, write: str | None, **flags: Any) -> None:
    """What fits, how long, how much: stacks for fine-tuning MODEL, ranked and explained.

    MODEL is a local folder, a config.json, or a hub id. Weights are never loaded.
    """
    from shardwise.facts.model import read_model
    from shardwise.plan.search import answer
    from shardwise.report.plan_json import plan_json
    from shardwise.report.plan_text import plan_text

    shape = read_model(model, flags["revision"])
    question, notes = _question(model, shape, flags)
    from dataclasses import replace

    found = answer(question)
    result = replace(found, notes=(*found.notes, *notes))
    if write is not None:
        _write(write, model, result, flags)
    if as_json:
        click.echo(json.dumps(plan_json(result, explain), indent=2))
    else:
        click.echo(plan_text(result, explain), nl=False)
    if write is not None:
        assert result.recommended is not None
        command = "launch" if result.recommended.plan.offer.nodes > 1 else "train"
        click.echo(f"wrote {write}: shardwise {command} {write}", err=True)
        if not flags["data"]:
            click.echo(f"note: data.train in {write} is a placeholder: put your file there", err=True)
        if result.recommended.plan.stack.offload_optimizer == "nvme":
            click.echo(
                f"note: engine.deepspeed.nvme_path in {write}: name a folder on the NVMe disk", err=True
            )


def _question(model: str, shape: "ModelShape", flags: dict[str, Any]) -> tuple[Any, tuple[str, ...]]:
    from shardwise.facts.gpus import load_prices
    from shardwise.plan.question import checkpointing_of
    from shardwise.plan.search import METHODS, Question
    from shardwise.units import parse_seconds, parse_usd

    notes: list[str] = []
    offers = _offers(flags, notes)
    methods: tuple[str, ...] = METHODS
    if flags["at_least_quality"]:
        methods = METHODS[: METHODS.index(flags["at_least_quality"]) + 1]
    if flags["method"]:
        methods = (flags["method"],)
    prices = load_prices(flags["prices"])
    if flags["live_prices"]:
        from shardwise.facts.live_prices import with_live_rent

        prices = with_live_rent(prices, notes)
    length = flags["sequence_length"] or min(2048, shape.max_position_embeddings)
    if length > shape.max_position_embeddings:
        notes.append(f"the model was built for {shape.max_position_embeddings:,} tokens, not {length:,}")
    data = _data(model, shape, length, flags, notes)
    targets: str | tuple[str, ...] = flags["targets"]
    if targets not in ("all-linear", "attention"):
        targets = tuple(t.strip() for t in str(targets).split(",") if t.strip())
    if methods != ("full",):
        shape.adapted(targets)  # a wrong name is told before anything is searched
    return Question(
        shape=shape,
        prices=prices,
        data=data,
        epochs=flags["epochs"],
        methods=methods,
        offers=offers,
        sequence_length=length,
        global_batch_size=flags["global_batch_size"],
        micro_batch_size=flags["micro_batch_size"],
        activation_checkpointing=checkpointing_of(flags["activation_checkpointing"] or "", shape),
        budget_usd=parse_usd(flags["budget"]) if flags["budget"] else None,
        deadline_seconds=parse_seconds(flags["deadline"]) if flags["deadline"] else None,
        buy=flags["buy"],
        goal=flags["goal"],
        lora_rank=flags["rank"],
        lora_targets=targets,
        master_weights=not flags["no_master_weights"],
    ), tuple(notes)


def _offers(flags: dict[str, Any], notes: list[str]) -> "tuple[Offer, ...]":
    from shardwise.facts.gpus import with_network
    from shardwise.facts.machine import as_offer, detect_machine

    if flags["gpus"] == ("any",):
        return ()
    if flags["gpus"]:
        offers = tuple(as_offer(text, flags["nodes"]) for text in flags["gpus"])
        if flags["network"]:
            offers = tuple(with_network(offer, flags["network"]) for offer in offers)
        return offers
    machine = detect_machine()
    notes += machine.notes
    if machine.gpus:
        notes.append("planned for this machine's GPUs; --gpus asks for others")
        return (machine.offer(),)
    notes.append("this machine has no GPU: the catalogue was searched (--gpus cpu plans for its processor)")
    return ()


def _data(
    model: str, shape: "ModelShape", length: int, flags: dict[str, Any], notes: list[str]
) -> "DataFacts":
    from shardwise.errors import UsageError
    from shardwise.plan.model import DataFacts
    from shardwise.units import parse_count

    if flags["data"] and flags["tokens"]:
        raise UsageError(
            "--data and --tokens together", "both say how much data there is", "give one of them"
        )
    if flags["tokens"]:
        tokens = parse_count(flags["tokens"])
        if tokens < 1:
            raise UsageError(
                f"--tokens {flags['tokens']}", "there must be at least one token", "like --tokens 10M"
            )
        return DataFacts(tokens=tokens)
    if flags["data"]:
        from shardwise.launch.counting import count_rows

        facts, note = count_rows(model, flags["revision"], shape, flags["data"], length, flags["epochs"])
        notes.append(note)
        return facts
    return DataFacts()


def _write(path: str, model: str, result: "Answer", flags: dict[str, Any]) -> None:
    from shardwise.errors import UsageError
    from shardwise.plan.write import recipe_of
    from shardwise.recipe.load import dump_recipe
    from shardwise.report.plan_text import recommendation

    if result.recommended is None:
        raise UsageError(f"nothing to write to {path}", "no stack fits", "see the answer without --write")
    recipe = recipe_of(result.recommended, model, flags["data"], flags["epochs"], flags["revision"])
    text = dump_recipe(recipe, recommendation(result), full=False)
    target = Path(path)
    if target.exists():
        raise UsageError(f"{path} exists", "it is not overwritten", "give another name")
    try:
        target.write_text(text, encoding="utf-8")
    except OSError as problem:
        raise UsageError(
            f"{path} cannot be written", str(problem), "give a path in a folder that exists"
        ) from None
