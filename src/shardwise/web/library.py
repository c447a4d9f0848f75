"""What the page may read: the runs of one folder, and the data files their recipes or the command line name."""

import re
import threading
from dataclasses import dataclass, field
from pathlib import Path

from shardwise.errors import ShardwiseError, UnknownNameError
from shardwise.recipe import Recipe, parse_recipe
from shardwise.report.run_view import RunView, view_run
from shardwise.runs import Course, RunFolder, is_run, list_runs

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,119}")
LOG_BYTES = 64 * 1024
MOST_RECIPES = 100
MOST_COURSES = 50


@dataclass
class Library:
    """Runs are found by exact name; a name is never taken for a path. Courses are kept between requests."""

    folder: Path
    data: tuple[str, ...] = ()  # data files the command line named
    model_folders: tuple[str, ...] = ()  # and models
    _courses: dict[tuple[str, float], Course] = field(default_factory=dict)
    _parsed: dict[tuple[str, float], Recipe | None] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self, name: str) -> RunFolder:
        """Raises UnknownNameError for anything that is not a run inside the folder, links out of it included."""
        path = self.folder / name
        if not NAME.fullmatch(name) or not is_run(path) or not self._inside(path):
            raise UnknownNameError(f"no run '{name[:120]}'", "there is no such run here", "see /runs")
        return RunFolder(path)

    def runs(self) -> list[RunFolder]:
        return [r for r in list_runs(self.folder) if NAME.fullmatch(r.name) and self._inside(r.path)]

    def view(self, run: RunFolder, points: int) -> RunView:
        with self._lock:  # requests are answered in threads; a course is brought up to date by one at a time
            return view_run(run, points, self._course(run))

    def row(self, run: RunFolder) -> RunView:
        """For a list: a finished run's summary says it all, its events are left unread."""
        return view_run(run, 1, Course(run)) if run.summary() else self.view(run, 1)

    def seen(self, run: RunFolder) -> str:
        """Changes whenever the run's events or its state do."""
        with self._lock:
            return f"{self._course(run).offset}-{run.state}"

    def _course(self, run: RunFolder) -> Course:
        key = (run.name, run.created_unix_seconds)  # a name may be taken again by another run
        seen = self._courses.pop(key, None) or Course(run)
        self._courses[key] = seen  # the one asked for last stands last
        if len(self._courses) > MOST_COURSES:
            del self._courses[next(iter(self._courses))]
        seen.refresh()
        return seen

    def logs(self, run: RunFolder) -> list[str]:
        """Names of the log files of a run."""
        found = [p for p in run.logs_path.glob("*.log") if p.is_file() and self._inside(p)]
        return sorted((p.name for p in found), key=lambda n: (len(n), n))

    def log_tail(self, run: RunFolder, name: str) -> str:
        """The end of a log; progress bars leave only their last state."""
        if name not in self.logs(run):
            raise UnknownNameError(f"no log '{name[:120]}'", "the run has no such log", "see the run's page")
        with (run.logs_path / name).open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - LOG_BYTES))
            text = file.read().decode("utf-8", "replace")
        lines = [line.rsplit("\r", 1)[-1] for line in text.replace("\r\n", "\n").split("\n")]
        return "\n".join(lines[-200:])

    def data_files(self) -> list[str]:
        """The command line's, then those of the runs' recipes, each once; only what is there."""
        named = (source.path for recipe in self._recipes() for source in recipe.data.train)
        return [path for path in dict.fromkeys((*self.data, *named)) if Path(path).is_file()]

    def models(self) -> list[str]:
        """Model folders of the command line and of the runs' recipes, each once; only what is there."""
        named = (recipe.model.source for recipe in self._recipes())
        return [path for path in dict.fromkeys((*self.model_folders, *named)) if Path(path).exists()]

    def recipe_with(self, data: str) -> Recipe | None:
        """The newest run's recipe that trains on a data file."""
        return next((r for r in self._recipes() if any(s.path == data for s in r.data.train)), None)

    def _recipes(self) -> list[Recipe]:
        """Recipes of the newest runs, newest first; parsed once."""
        found = []
        for run in self.runs()[:MOST_RECIPES]:
            key = (run.name, run.created_unix_seconds)
            if key not in self._parsed:
                try:
                    self._parsed[key] = parse_recipe(run.recipe_text(), run.name)
                except ShardwiseError:
                    self._parsed[key] = None
            recipe = self._parsed[key]
            if recipe is not None:
                found.append(recipe)
        return found

    def _inside(self, path: Path) -> bool:
        return path.resolve().is_relative_to(self.folder.resolve())
