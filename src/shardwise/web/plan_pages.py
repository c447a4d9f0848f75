"""Plan: the controls, and the answer to them; a link holds the whole question."""

from dataclasses import asdict
from typing import Any
from urllib.parse import urlencode

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from shardwise.errors import ShardwiseError
from shardwise.facts.catalogue import known_models
from shardwise.facts.gpus import catalogue
from shardwise.plan.question import COUNTS, Answer
from shardwise.plan.write import recipe_of
from shardwise.recipe import dump_recipe
from shardwise.report.plan_json import plan_json
from shardwise.report.plan_text import assumptions, recommendation, rule_of_thumb
from shardwise.web.library import Library
from shardwise.web.pages import Json, page, wants_json
from shardwise.web.plan_question import (
    Controls,
    Sources,
    ask,
    ask_all_counts,
    command_of,
    flag_as_change,
    read_controls,
)
from shardwise.web.plan_view import scatter, stack_rows, term_names

MOST_OPTIONS = 60  # of plan.json


class PlanPages:
    """Routes below /plan."""

    def __init__(self, library: Library) -> None:
        self.library = library

    def routes(self) -> list[Route]:
        return [
            Route("/plan", self.plan),
            Route("/plan.json", self.plan),
            Route("/plan/answer", self.answer),
            Route("/plan/scatter", self.scatter),
        ]

    def plan(self, request: Request) -> Response:
        controls = read_controls(request.query_params)
        if wants_json(request):
            return Json(self._json(controls))
        return page(
            "plan.html",
            here="plan",
            c=controls,
            models=[*self.library.models(), *known_models()],
            data_files=self.library.data_files(),
            gpus=list(catalogue()),
            counts=[n for n in COUNTS if n <= 512],
            defaults=asdict(Controls()),
            **self._answer(controls),
            **self._scatter(controls),
        )

    def answer(self, request: Request) -> Response:
        """The part of the page that a control changes."""
        controls = read_controls(request.query_params)
        return page("plan_answer.html", c=controls, **self._answer(controls))

    def scatter(self, request: Request) -> Response:
        """Time against cost over all counts of the GPU; it is asked for after the bars."""
        controls = read_controls(request.query_params)
        return page("plan_scatter.html", c=controls, **self._scatter(controls))

    def _sources(self) -> Sources:
        return Sources(tuple(self.library.models()), tuple(self.library.data_files()))

    def _answer(self, controls: Controls) -> dict[str, Any]:
        try:
            found = ask(controls, self._sources())
        except ShardwiseError as problem:
            return {"problem": problem, "answer": None}
        rows = stack_rows(found)
        return {
            "problem": None,
            "answer": found,
            "verdict": _verdict(found),
            "sentence": recommendation(found),
            "fixes": _fixes(found, controls),
            "rows": rows,
            "term_names": term_names(rows),
            "rules": rule_of_thumb(found.question.shape),
            "assumptions": assumptions(found),
            "recipe": recipe_text(found, controls),
            "command": command_of(controls),
            "link": _link(controls.changed()),
        }

    def _scatter(self, controls: Controls) -> dict[str, Any]:
        try:
            found = ask_all_counts(controls, self._sources())
        except ShardwiseError:
            return {"graph": None, "wide": None, "point_link": None}
        return {"graph": scatter(found), "wide": found, "point_link": lambda o: _link(_point(controls, o))}

    def _json(self, controls: Controls) -> dict[str, Any]:
        found = ask(controls, self._sources())
        told = plan_json(found)
        return {
            **told,
            "options": told["options"][:MOST_OPTIONS],
            "options_total": len(told["options"]),
            "verdict": _verdict(found),
            "command": command_of(controls),
            "recipe": recipe_text(found, controls),
        }


def _verdict(answer: Answer) -> str:
    if answer.recommended is not None:
        return answer.recommended.plan.verdict
    return "misses the wish" if answer.options else "does not fit"


def _fixes(answer: Answer, controls: Controls) -> list[tuple[str, str]]:
    """(change, link) of what would make it fit; none where something does."""
    if answer.options:
        return []
    changes = dict.fromkeys(c for r in answer.rejected for c in r.changes)
    found = [(change, flag_as_change(change)) for change in changes]
    if controls.activation_checkpointing not in ("", "full") or controls.micro_batch_size not in ("", "1"):
        found.insert(0, ("leave micro-batch and checkpointing to the planner",
                         {"activation_checkpointing": "", "micro_batch_size": ""}))  # fmt: skip
    return [(change, _link(controls.changed(**values))) for change, values in found if values]


def _point(controls: Controls, option: Any) -> dict[str, str]:
    offer = option.plan.offer
    return controls.changed(gpu=offer.gpu.name, count=str(offer.count), method=option.plan.stack.method)


def _link(query: dict[str, str]) -> str:
    return "/plan" + (f"?{urlencode(query)}" if query else "")


def recipe_text(answer: Answer, controls: Controls) -> str:
    """The recommended option's recipe; empty where nothing is recommended."""
    if answer.recommended is None:
        return ""
    epochs = float(controls.epochs)
    recipe = recipe_of(answer.recommended, answer.question.shape.source, controls.data or None, epochs)
    return dump_recipe(recipe, recommendation(answer), full=False)
