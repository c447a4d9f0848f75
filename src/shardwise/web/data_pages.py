"""Data: what is in a file, and what training would see of it."""

import importlib
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from shardwise.errors import MissingDependencyError, ShardwiseError, UnknownNameError
from shardwise.recipe import parse_recipe
from shardwise.recipe.schema import Data
from shardwise.runs.jsonfile import to_json
from shardwise.web.library import Library
from shardwise.web.pages import Json, page, wants_json

ROWS_SHOWN = 8


class DataPages:
    """Routes below /data. Only files and models of the library are read."""

    def __init__(self, library: Library) -> None:
        self.library = library
        self._checks: dict[tuple[str, str, float], Any] = {}

    def routes(self) -> list[Route]:
        return [Route("/data", self.data), Route("/data.json", self.data)]

    def data(self, request: Request) -> Response:
        file, model = request.query_params.get("file", ""), request.query_params.get("model", "")
        files, models = self.library.data_files(), self.library.models()
        found, problem = None, None
        if file:
            model = model or self._model_of(file) or (models[0] if models else "")
            try:
                found = self._check(file, model, files, models)
            except ShardwiseError as error:
                problem = error
        if wants_json(request):
            if problem is not None:
                raise problem
            return Json(found.to_dict() if found else {"files": files, "models": models})
        shown = self._shown(found) if found else {"check": None}
        return page(
            "data.html",
            here="data",
            files=files,
            models=models,
            file=file,
            model=model,
            problem=problem,
            **shown,
        )

    def _model_of(self, file: str) -> str | None:
        recipe = self.library.recipe_with(file)
        return recipe.model.source if recipe and Path(recipe.model.source).exists() else None

    def _check(self, file: str, model: str, files: list[str], models: list[str]) -> Any:
        if file not in files:
            raise UnknownNameError(
                f"data file '{file[:200]}' is not shown here",
                "the page reads only files that runs trained on or that it was started with",
                "start it with: shardwise web --data FILE",
            )
        if model not in models:
            raise UnknownNameError(
                f"no tokenizer: model '{model[:200]}' is not among those the page may read",
                "rows become tokens only with a model's tokenizer",
                "start it with: shardwise web --model FOLDER",
            )
        key = (file, model, Path(file).stat().st_mtime)
        if key not in self._checks:
            self._checks[key] = _room("check").check(self._settings(file), model, rows=ROWS_SHOWN)
        return self._checks[key]

    def _settings(self, file: str) -> Data:
        """As the newest run read it, else the defaults."""
        recipe = self.library.recipe_with(file)
        if recipe is not None:
            return recipe.data.model_copy(
                update={"train": tuple(s for s in recipe.data.train if s.path == file)}
            )
        return parse_recipe(to_json({"model": "-", "data": file})).data

    def _shown(self, found: Any) -> dict[str, Any]:
        show, report = _room("show"), found.report
        named = (
            ("Refused rows", report.refused),
            ("Dropped rows", report.dropped),
            ("Used, with a remark", report.notes),
        )
        return {
            "check": found,
            "facts": show.facts(found),
            "findings": [
                (title, [(f, show.places(f, 10)) for f in group]) for title, group in named if group
            ],
            "most": max((count for _, _, count in report.lengths.histogram), default=1),
        }


def _room(name: str) -> Any:
    """A module of data/, which needs the tokenizer libraries."""
    try:
        return importlib.import_module(f"shardwise.data.{name}")
    except ModuleNotFoundError as problem:
        raise MissingDependencyError(
            f"reading data needs the package '{problem.name}'",
            "it is not installed",
            "pip install 'shardwise[data]'",
        ) from None
