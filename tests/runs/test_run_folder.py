"""The run folder: what is written there, by whom, and how it is read back whatever happened."""

import json
import math
import multiprocessing
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shardwise.errors import UnknownNameError, UsageError
from shardwise.runs import Evaluation, RunFolder, Step, create_run, list_runs, open_run, read_course

RECIPE = "model: tiny\ndata: rows.jsonl\n"


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return create_run(tmp_path / "runs", "first", RECIPE, {"steps": 3})


def lock_of_dead_process(run: RunFolder) -> int:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    fields = {"pid": ended.pid, "host": socket.gethostname(), "started": 1, "since_unix_seconds": 0}
    run.lock_path.write_text(json.dumps(fields))
    return ended.pid


def test_new_run_holds_recipe_plan_and_status(run: RunFolder) -> None:
    assert run.recipe_text() == RECIPE
    assert run.plan() == {"steps": 3}
    assert run.state == "running"
    assert {p.name for p in run.path.iterdir()} == {"recipe.yaml", "plan.json", "status.json", "lock"}


def test_default_name_carries_the_time_and_never_collides(tmp_path: Path) -> None:
    names = {create_run(tmp_path, None, RECIPE, {}, "tiny-lora").name for _ in range(3)}
    assert len(names) == 3
    for name in names:
        assert name.startswith("tiny-lora-20")


def test_existing_name_is_refused_and_nothing_in_it_touched(run: RunFolder) -> None:
    run.status("done")
    run.release()
    with pytest.raises(UsageError, match="exists already") as caught:
        create_run(run.path.parent, "first", "other: recipe\n", {})
    assert "--resume" in caught.value.hint
    assert run.recipe_text() == RECIPE


@pytest.mark.parametrize("name", ["../up", "a/b", ".hidden", "latest", "-x", "a b", "ä", "x" * 121])
def test_names_that_are_no_folder_names_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="cannot be used"):
        create_run(tmp_path / "runs", name, RECIPE, {})
    assert not (tmp_path / "runs").exists()


def test_unwritable_place_is_a_usage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="no run folder can be made") as caught:
        create_run(tmp_path / "file" / "runs", None, RECIPE, {})
    assert "run.folder" in caught.value.hint


def test_discard_leaves_no_trace(run: RunFolder) -> None:
    run.event("start")
    run.discard()
    assert not run.path.parent.exists()


def test_second_process_is_refused_by_name_of_the_first(run: RunFolder) -> None:
    code = "import sys; from shardwise.runs import open_run; open_run(sys.argv[1]).acquire()"
    second = subprocess.run([sys.executable, "-c", code, str(run.path)], capture_output=True, text=True)
    assert second.returncode != 0
    assert f"process {os.getpid()} on {socket.gethostname()}" in second.stderr
    with pytest.raises(UsageError, match="exists already") as caught:
        create_run(run.path.parent, "first", RECIPE, {})
    assert f"process {os.getpid()}" in caught.value.why


def test_lock_of_a_dead_process_is_taken_over(run: RunFolder) -> None:
    pid = lock_of_dead_process(run)
    status = run.read_status()
    assert status.state == "failed" and f"process {pid}" in status.reason
    run.acquire()
    assert run.state == "running"
    holder = run.holder()
    assert holder is not None and holder.pid == os.getpid()


def test_lock_of_a_number_used_again_is_taken_over(run: RunFolder) -> None:
    fields = {"pid": os.getppid(), "host": socket.gethostname(), "started": 1, "since_unix_seconds": 0}
    run.lock_path.write_text(json.dumps(fields))
    if not Path("/proc/self/stat").exists():
        pytest.skip("this system does not tell when a process started")
    run.acquire()
    assert run.holder() is not None


def test_lock_of_another_host_is_believed(run: RunFolder) -> None:
    fields = {"pid": 1, "host": "elsewhere", "started": 0, "since_unix_seconds": 0}
    run.lock_path.write_text(json.dumps(fields))
    with pytest.raises(UsageError, match="in use") as caught:
        run.acquire()
    assert "elsewhere" in caught.value.why and str(run.lock_path) in caught.value.hint


def _try(path: str, gate: "multiprocessing.synchronize.Event", won: "multiprocessing.Queue[int]") -> None:
    gate.wait()
    try:
        RunFolder(Path(path)).acquire()
        won.put(os.getpid())
    except UsageError:
        won.put(0)
    time.sleep(1)


def test_of_many_that_take_a_stale_lock_at_once_one_wins(run: RunFolder) -> None:
    lock_of_dead_process(run)
    context = multiprocessing.get_context("fork")
    gate, won = context.Event(), context.Queue()
    tries = [context.Process(target=_try, args=(str(run.path), gate, won)) for _ in range(6)]
    for one in tries:
        one.start()
    gate.set()
    winners = [pid for pid in (won.get(timeout=20) for _ in tries) if pid]
    for one in tries:
        one.join()
    assert len(winners) == 1


def test_release_gives_back_only_ones_own_lock(run: RunFolder) -> None:
    fields = {"pid": 1, "host": "elsewhere", "started": 0, "since_unix_seconds": 0}
    run.lock_path.write_text(json.dumps(fields))
    run.release()
    assert run.lock_path.exists()
    run.lock_path.unlink()
    run.acquire()
    run.release()
    assert not run.lock_path.exists()


def test_events_come_back_typed_and_in_order(run: RunFolder) -> None:
    run.event("start", steps=2)
    run.event("step", step=1, loss=3.5, tokens=100, note="unknown fields are kept")
    run.event("evaluation", step=1, loss=3.0)
    kinds = [e.kind for e in run.events()]
    assert kinds == ["start", "step", "evaluation"]
    step = next(run.events("step"))
    assert isinstance(step, Step) and step.loss == 3.5 and step.learning_rate is None
    assert step.model_dump()["note"] == "unknown fields are kept"
    assert step.time == pytest.approx(time.time(), abs=60)


def test_event_is_on_disk_at_once(run: RunFolder) -> None:
    run.event("step", step=1, loss=1.0)
    assert run.events_path.read_bytes().endswith(b"\n")


def test_wrong_events_are_refused(run: RunFolder) -> None:
    with pytest.raises(ValueError, match="unknown event kind 'stepp'"):
        run.event("stepp", step=1)
    with pytest.raises(ValueError, match="loss"):
        run.event("step", step=1)
    assert not run.events_path.exists()


def test_nan_is_valid_json_and_comes_back_as_nan(run: RunFolder) -> None:
    run.event("step", step=1, loss=math.nan, grad_norm=math.inf)
    fields = json.loads(run.events_path.read_text(), parse_constant=lambda name: pytest.fail(name))
    assert (fields["loss"], fields["grad_norm"]) == ("NaN", "Infinity")
    step = run.steps()[0]
    assert math.isnan(step.loss) and step.grad_norm == math.inf


def test_half_written_last_line_is_left_and_the_next_event_stands_alone(run: RunFolder) -> None:
    run.event("step", step=1, loss=1.0)
    run.release()
    with run.events_path.open("a") as file:
        file.write('{"kind": "step", "step": 2, "lo')
    assert [s.step for s in run.steps()] == [1]
    RunFolder(run.path).event("step", step=2, loss=0.5)
    assert [(s.step, s.loss) for s in run.steps()] == [(1, 1.0), (2, 0.5)]


def test_reader_continues_where_it_stopped(run: RunFolder) -> None:
    run.event("step", step=1, loss=1.0)
    offset = [behind for behind, _ in run.events_from(0)][-1]
    run.event("step", step=2, loss=2.0)
    assert [e.model_dump()["step"] for _, e in run.events_from(offset)] == [2]


def test_steps_undone_by_a_resume_are_left_out(run: RunFolder) -> None:
    for step in (1, 2, 3):
        run.event("step", step=step, loss=float(step))
    run.event("evaluation", step=3, loss=9.0)
    run.event("resume", step=1)
    run.event("step", step=2, loss=20.0)
    assert [(s.step, s.loss) for s in run.steps()] == [(1, 1.0), (2, 20.0)]
    assert run.history(Evaluation) == []


def test_summary_is_checked_and_comes_back(run: RunFolder) -> None:
    assert run.summary() is None
    run.write_summary(
        {
            "state": "done",
            "steps": 3,
            "estimate": {"peak_allocated_bytes": 10, "terms": [{"name": "weights", "bytes": 7}]},
            "measured": {"peak_allocated_bytes": 11, "terms": {"weights": 8}},
            "loss_last": math.nan,
        }
    )
    summary = run.summary()
    assert summary is not None and summary.measured.terms[0].bytes == 8
    assert summary.loss_last is not None and math.isnan(summary.loss_last)
    with pytest.raises(ValueError, match="state"):
        run.write_summary({"state": "finished"})
    assert not [p for p in run.path.iterdir() if p.name.endswith(".tmp")]


def test_checkpoints_without_their_marker_are_not_checkpoints(run: RunFolder) -> None:
    for step, whole in ((20, True), (3, True), (30, False)):
        path = run.checkpoint_path(step)
        path.mkdir(parents=True)
        if whole:
            (path / "complete").touch()
    assert [c.step for c in run.checkpoints()] == [3, 20]
    assert run.checkpoints()[0].path.name == "step-00000003"


def test_open_run_by_name_path_beginning_and_latest(tmp_path: Path) -> None:
    for age, name in ((30, "alpha-1"), (20, "alpha-2"), (10, "beta")):
        run = create_run(tmp_path, name, RECIPE, {})
        os.utime(run.recipe_path, (time.time() - age, time.time() - age))
    assert [r.name for r in list_runs(tmp_path)] == ["beta", "alpha-2", "alpha-1"]
    assert open_run("latest", tmp_path).name == "beta"
    assert open_run("alpha-1", tmp_path).name == "alpha-1"
    assert open_run("b", tmp_path).name == "beta"
    assert open_run(tmp_path / "alpha-2").name == "alpha-2"
    with pytest.raises(UsageError, match="begins the name of 2 runs"):
        open_run("alpha", tmp_path)
    with pytest.raises(UnknownNameError) as caught:
        open_run("betta", tmp_path)
    assert "beta" in caught.value.hint
    with pytest.raises(UnknownNameError):
        open_run("", tmp_path)


def test_open_run_where_there_are_none(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no run 'x'") as caught:
        open_run("x", tmp_path / "none")
    assert "shardwise train" in caught.value.hint


def test_folders_that_are_no_runs_are_not_listed(run: RunFolder) -> None:
    (run.path.parent / "notes").mkdir()
    (run.path.parent / "file.txt").write_text("")
    assert [r.name for r in list_runs(run.path.parent)] == ["first"]


def test_course_reads_only_what_is_new_and_follows_a_resume(run: RunFolder) -> None:
    seen = read_course(run)
    assert len(seen) == 0 and not seen.refresh()
    run.event("start", steps=4)
    for step in (1, 2, 3):
        run.event("step", step=step, loss=float(step), tokens=100, seconds=0.5)
    assert seen.refresh() and not seen.refresh()
    assert (list(seen.step), seen.last("loss"), seen.last("tokens_per_second")) == ([1, 2, 3], 3.0, 200.0)
    run.event("evaluation", step=3, loss=9.0)
    run.event("resume", step=1)
    run.event("step", step=2, loss=math.nan)
    assert seen.refresh()
    assert (list(seen.step), seen.last("loss"), seen.evaluations) == ([1, 2], None, [])
    assert seen.total("tokens") == 100 and seen.highest("grad_norm") is None


def test_course_starts_again_when_the_file_was_replaced(run: RunFolder) -> None:
    for step in (1, 2, 3):
        run.event("step", step=step, loss=1.0)
    seen = read_course(run)
    run.release()
    run.events_path.write_text('{"kind": "step", "step": 7, "loss": 2}\n')
    assert seen.refresh()
    assert list(seen.step) == [7]
