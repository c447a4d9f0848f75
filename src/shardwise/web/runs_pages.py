"""Runs: the list, one run, several over each other; start, stop and go on."""

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from shardwise.errors import ShardwiseError, UnknownNameError, UsageError
from shardwise.recipe import dump_recipe, parse_recipe
from shardwise.report.run_html import run_bars, run_html
from shardwise.report.run_json import run_json, run_row
from shardwise.runs import RunFolder
from shardwise.web.jobs import Jobs
from shardwise.web.library import Library
from shardwise.web.pages import Json, body, page, wants_json

POINTS = 600  # of a curve; a run of any length is sent as at most so many
MOST_COMPARED = 6


class RunsPages:
    """Routes below /runs. `library` says what may be read, `jobs` what may be started."""

    def __init__(self, library: Library, jobs: Jobs) -> None:
        self.library, self.jobs = library, jobs

    def routes(self) -> list[Route]:
        return [
            Route("/runs", self.index),
            Route("/runs.json", self.index),
            Route("/runs/{name}/report.html", self.report),
            Route("/runs/{name}/log.json", self.log),
            Route("/runs/{name}/live.json", self.live),
            Route("/runs/{name}/stop", self.stop, methods=["POST"]),
            Route("/runs/{name}/resume", self.resume, methods=["POST"]),
            Route("/runs/{name}.json", self.one),
            Route("/runs/{name}", self.one),
            Route("/compare", self.compare),
            Route("/compare.json", self.compare),
            Route("/start", self.start_page),
            Route("/start.json", self.start_page),
            Route("/start/check", self.check, methods=["POST"]),
            Route("/start/run", self.start, methods=["POST"]),
            Route("/start/{name}.json", self.started),
        ]

    def index(self, request: Request) -> Response:
        views = [self.library.row(run) for run in self.library.runs()]
        if wants_json(request):
            return Json([run_row(v) for v in views])
        return page("runs.html", here="runs", views=views, folder=str(self.library.folder))

    def one(self, request: Request) -> Response:
        run = self._run(request)
        view = self.library.view(run, POINTS)
        if wants_json(request):
            return Json(run_json(view))
        return page(
            "run.html",
            here="runs",
            view=view,
            bars=run_bars(view),
            data=run_json(view),
            logs=self.library.logs(run),
            can_resume=view.status.state in ("interrupted", "failed") and bool(view.checkpoints),
            can_stop=run.holder() is not None,
        )

    def live(self, request: Request) -> Response:
        """What changes while a run goes on; nothing (204) when nothing was written since `seen`."""
        run = self._run(request)
        mark = self.library.seen(run)
        if request.query_params.get("seen") == mark:
            return Response(status_code=204)
        view = self.library.view(run, POINTS)
        found = run_json(view)
        keep = ("name", "state", "series", "evaluations", "memory")
        return Json(
            {**{k: found[k] for k in keep}, "seen": mark, "logs": self.library.logs(run), **self._html(view)}
        )

    def _html(self, view: Any) -> dict[str, str]:
        """The parts of the page that are not curves, made by the same template."""
        whole = page("run_body.html", view=view, bars=run_bars(view)).body
        return {"body": bytes(whole).decode()}

    def report(self, request: Request) -> Response:
        run = self._run(request)
        name = f'attachment; filename="{run.name}.html"'
        return HTMLResponse(run_html(self.library.view(run, 1000)), headers={"Content-Disposition": name})

    def log(self, request: Request) -> Response:
        run = self._run(request)
        name = request.query_params.get("name", "")
        return Json({"name": name, "text": self.library.log_tail(run, name)})

    def compare(self, request: Request) -> Response:
        names = list(dict.fromkeys(request.query_params.getlist("run")))
        if len(names) > MOST_COMPARED:
            raise UsageError(
                f"{len(names)} runs to compare", f"at most {MOST_COMPARED} can be told apart", "choose fewer"
            )
        views = [self.library.view(self.library.run(name), POINTS) for name in names]
        data = [run_json(v) for v in views]
        if wants_json(request):
            return Json(data)
        return page("compare.html", here="runs", views=views, data=data, differences=differences(views))

    async def stop(self, request: Request) -> Response:
        return Json({"stopping": self.jobs.stop(self._run(request))})

    async def resume(self, request: Request) -> Response:
        return Json({"run": self.jobs.resume(self._run(request))})

    def start_page(self, request: Request) -> Response:
        text = ""
        if name := request.query_params.get("from"):
            text = again(self.library.run(name).recipe_text())
        if wants_json(request):
            return Json({"recipe": text})
        return page("start.html", here="start", recipe=text)

    async def check(self, request: Request) -> Response:
        recipe = str((await body(request)).get("recipe", ""))
        found = await asyncio.to_thread(self.jobs.check, recipe)
        return Json({"digest": found.digest, "plan": found.plan, "ok": found.exit_code == 0})

    async def start(self, request: Request) -> Response:
        sent = await body(request)
        if sent.get("confirmed") is not True:
            raise UsageError(
                "the plan is not confirmed", "a run is started only after its plan was seen", "tick the box"
            )
        return Json({"run": self.jobs.start(str(sent.get("digest", "")))})

    def started(self, request: Request) -> Response:
        """How a start goes: what the command said, and whether the run's folder is there."""
        name = request.path_params["name"]
        if name not in self.jobs.started:
            raise UnknownNameError(
                "nothing was started by this name", "the page may be a new one", "see /runs"
            )
        code, words = self.jobs.poll(name)
        run = next((r for r in self.library.runs() if r.name == name), None)
        state = run.state if run is not None else None
        return Json({"exit_code": code, "said": words, "exists": run is not None, "state": state})

    def _run(self, request: Request) -> RunFolder:
        return self.library.run(request.path_params["name"])


def again(recipe_text: str) -> str:
    """A run's recipe for a new run: all but its name, which is taken."""
    try:
        recipe = parse_recipe(recipe_text)
    except ShardwiseError:
        return recipe_text
    if recipe.run.name is None:
        return recipe_text
    run = recipe.run.model_copy(update={"name": None})
    return dump_recipe(recipe.model_copy(update={"run": run}), comment=f"as the run {recipe.run.name}")


def differences(views: list[Any]) -> list[tuple[str, list[str]]]:
    """Recipe lines in which the runs differ: (key, value in each)."""
    trees = [_flat(v.recipe_text) for v in views]
    keys = dict.fromkeys(k for tree in trees for k in tree)
    return [
        (key, [tree.get(key, "-") for tree in trees])
        for key in keys
        if len({tree.get(key) for tree in trees}) > 1
    ]


def _flat(recipe_text: str) -> dict[str, str]:
    try:
        tree = parse_recipe(recipe_text).model_dump(mode="json")
    except ShardwiseError:
        return {}
    found: dict[str, str] = {}

    def walk(node: Any, path: str) -> None:
        if isinstance(node, dict):
            for key, value in node.items():
                walk(value, f"{path}.{key}" if path else key)
        else:
            found[path] = str(node)

    walk(tree, "")
    return found
