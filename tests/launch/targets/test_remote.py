"""What is said to kubectl and sky, and what becomes of their answers: with stand-ins, no cluster."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from fakes import Fake
from made import launched

from shardwise.errors import RecipeError, UsageError
from shardwise.launch import submission
from shardwise.launch.targets import kubernetes, ray, skypilot

CLAIM = {"claim": "work", "namespace": "team"}


@pytest.fixture
def kubectl(tmp_path: Path, monkeypatch) -> Fake:
    return Fake(tmp_path, "kubectl", monkeypatch)


@pytest.fixture
def sky(tmp_path: Path, monkeypatch) -> Fake:
    return Fake(tmp_path, "sky", monkeypatch)


def test_a_manifest_is_checked_by_the_server_and_then_created(kubectl: Fake, tmp_path: Path) -> None:
    found = submission.submit(launched(tmp_path, kubernetes=CLAIM), "kubernetes", None)
    script = str(found.folder / "job.yaml")
    assert kubectl.calls == [
        ["create", "--dry-run=server", "--filename", script],
        ["create", "--filename", script, "--output", "name"],
    ]
    assert found.job_id == "trainjob/team/demo"


def test_a_manifest_that_the_server_refuses_leaves_nothing(kubectl: Fake, tmp_path: Path) -> None:
    kubectl.answer("--dry-run=server", err='configmaps "demo" already exists', code=1)
    run = launched(tmp_path, kubernetes=CLAIM)
    with pytest.raises(UsageError) as refused:
        submission.submit(run, "kubernetes", None)
    assert "already exists" in refused.value.why and "--name" in refused.value.hint
    assert len(kubectl.calls) == 1 and not (tmp_path / "runs").exists()


def test_what_was_created_before_a_failure_is_deleted_again(kubectl: Fake, tmp_path: Path) -> None:
    """The server took all of it a moment ago, and now a quota is used up."""
    kubectl.answer("create", "--output", out="configmap/demo\n", err="Error: exceeded quota", code=1)
    with pytest.raises(UsageError, match="does not take") as refused:
        submission.submit(launched(tmp_path, kubernetes=CLAIM), "kubernetes", None)
    assert "exceeded quota" in refused.value.why
    assert kubectl.calls[-1][:4] == ["delete", "configmap/demo", "--namespace", "team"]


@pytest.mark.parametrize(
    ("place", "program", "section"),
    [
        ("slurm", "sbatch", ""), ("kubernetes", "kubectl", "kubernetes: {claim: work}"),
        ("skypilot", "sky", "skypilot: {volume: work}"),
    ],
)  # fmt: skip
def test_a_cluster_that_refuses_is_told_in_three_lines_and_leaves_nothing(
    place: str, program: str, section: str, tmp_path: Path, monkeypatch, shardwise
) -> None:
    """Also where the program is not there at all."""
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "r.yaml").write_text(f"model: org/model\ndata: rows.jsonl\nlaunch: {{{section}}}\n")
    arguments = ("launch", "r.yaml", "--on", place, "--name", "demo")
    Fake(tmp_path, program, monkeypatch).answer(err=f"{program}: error: no such queue\nmore words\n", code=1)
    refused = shardwise(*arguments, cwd=tmp_path / "work")
    monkeypatch.setenv("PATH", str(tmp_path))
    absent = shardwise(*arguments, cwd=tmp_path / "work")
    for done, word in ((refused, "no such queue; more words"), (absent, f"'{program}' is not here")):
        lines = done.stderr[done.stderr.index("error: ") :].splitlines()
        if done is refused:  # the first line says that the model is not here
            lines = done.stderr[done.stderr.index("\nerror: ") + 1 :].splitlines()
        assert done.returncode == 2 and len(lines) == 3 and word in done.stderr, done.stderr
        assert lines[1].startswith("  why: ") and lines[2].startswith(" hint: ")
        assert [path.name for path in (tmp_path / "work").iterdir()] == ["r.yaml"]


@pytest.mark.parametrize("name", ["../x", "a/b", "$(touch x)", "latest", "launches", "-x", "a" * 121])
def test_a_name_that_is_no_folder_is_refused_before_anything(name: str, tmp_path: Path, monkeypatch) -> None:
    from click.testing import CliRunner

    from shardwise.cli.main import cli

    (tmp_path / "r.yaml").write_text("model: org/model\ndata: rows.jsonl\n")
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(cli, ["launch", "r.yaml", "--on", "slurm", f"--name={name}", "--dry-run"])
    assert isinstance(done.exception, UsageError) and "run name" in done.exception.what and not done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["r.yaml"]


@pytest.mark.parametrize(
    ("conditions", "pods", "state", "code"),
    [
        ("", "", "running", None),
        ("Suspended", "", "waiting", None),
        ("StartupPolicyCompleted", "", "running", None),
        ("Completed\nStartupPolicyCompleted", "", "ended", 0),
        ("Failed", "0\n2\n2\n", "ended", 2),
        ("Failed", "75 \n75\n", "ended", 75),
        ("Failed", "1\n75\n", "ended", 1),
    ],
)
def test_a_jobs_state_and_exit_code(kubectl: Fake, conditions, pods, state, code) -> None:
    kubectl.answer("get", "jobsets.jobset.x-k8s.io", "demo", out=conditions)
    kubectl.answer("get", "pods", "jobset.sigs.k8s.io/jobset-name=demo", out=pods)
    seen = kubernetes.look("jobset/team/demo")
    assert (seen.state, seen.exit_code) == (state, code)
    assert all(call[call.index("--namespace") + 1] == "team" for call in kubectl.calls)


def test_a_job_is_cancelled_with_time_to_save_or_at_once(kubectl: Fake) -> None:
    kubernetes.cancel("trainjob/team/demo", now=False)
    soft = kubectl.calls
    assert soft[0] == [
        "delete",
        "trainjobs.trainer.kubeflow.org",
        "demo",
        "--namespace",
        "team",
        "--wait=false",
    ]
    assert not any("--force" in call for call in soft)
    kubernetes.cancel("trainjob/team/demo", now=True)
    (forced,) = [call for call in kubectl.calls if "--force" in call]
    assert forced[:2] == ["delete", "pods"] and "--grace-period=0" in forced


def test_logs_of_a_run_whose_folder_is_elsewhere_come_from_its_pods(
    kubectl: Fake, tmp_path: Path, shardwise
) -> None:
    submission.submit(launched(tmp_path, kubernetes=CLAIM), "kubernetes", None)
    kubectl.answer("logs", out="[pod/demo-node-0-0/node] error: no such file\n")
    said = shardwise("logs", "demo", "--lines", 7, "--folder", tmp_path / "runs")
    assert said.returncode == 0 and "error: no such file" in said.stdout
    assert kubectl.calls[-1][-4:] == ["--tail", "7", "--prefix", "--ignore-errors"]


def test_progress_of_a_run_whose_folder_is_elsewhere_is_its_newest_line(
    kubectl: Fake, tmp_path, capsys
) -> None:
    from shardwise.cli.launch import _last_remote_line

    found = submission.submit(launched(tmp_path, kubernetes=CLAIM), "kubernetes", None)
    kubectl.answer("logs", out="[pod/demo-node-0-0/node] step 7/100  loss 2.31\n")
    line = _last_remote_line(found, "")
    assert _last_remote_line(found, line) == line, "the same line is not told twice"
    assert capsys.readouterr().err.count("step 7/100") == 1


def test_a_refused_kubernetes_run_ends_the_follower_with_2(kubectl: Fake, tmp_path: Path, shardwise) -> None:
    kubectl.answer("get", "trainjobs.trainer.kubeflow.org", out="Failed")
    kubectl.answer("get", "pods", out="2\n")
    kubectl.answer("logs", out="error: rows.jsonl is not there\n")
    (tmp_path / "r.yaml").write_text(
        "model: org/model\ndata: rows.jsonl\nlaunch: {kubernetes: {claim: work}}\n"
    )
    done = shardwise("launch", "r.yaml", "--on", "kubernetes", "--name", "demo", cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert "demo is refused" in done.stderr and "rows.jsonl is not there" in done.stderr


def test_the_follower_shows_the_log_of_the_rank_that_failed_first(tmp_path: Path, capsys) -> None:
    from shardwise.cli.launch import _ended
    from shardwise.launch.submission import Submission
    from shardwise.launch.targets.parts import Seen
    from shardwise.runs import create_run

    run = create_run(tmp_path, "bad", "model: m\ndata: d\n", {})
    run.logs_path.mkdir(exist_ok=True)
    for rank, text in enumerate(("Connection closed by peer", "ValueError: row 17")):
        (run.logs_path / f"rank-{rank}.log").write_text(text)
    run.status("failed", "rank 1 on n2: ValueError: row 17", 1)
    found = Submission("bad", "slurm", "7", str(run.path), 0.0, tmp_path)
    assert _ended(found, Seen("ended", "failed", 1)) == 1
    said = capsys.readouterr().err
    assert "bad is failed: rank 1 on n2" in said and "rank-1.log" in said and "Connection closed" not in said


@pytest.mark.parametrize("place", ["torchrun", "slurm", "kubernetes", "ray", "skypilot"])
def test_a_dry_run_prints_what_would_be_submitted_and_writes_nothing(
    place: str, tmp_path: Path, monkeypatch
) -> None:
    from click.testing import CliRunner

    from shardwise.cli.main import cli

    launch = "{nodes: 2, kubernetes: {claim: work}, skypilot: {volume: work}}"
    (tmp_path / "r.yaml").write_text(f"model: org/model\ndata: rows.jsonl\nlaunch: {launch}\n")
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(cli, ["launch", "r.yaml", "--on", place, "--name", "demo", "--dry-run"])
    assert done.exit_code == 0, done.output
    assert f"shardwise launch --on {place}" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["r.yaml"]


def test_several_recipes_are_an_array_and_only_slurm_has_those(tmp_path: Path, shardwise) -> None:
    (tmp_path / "r.yaml").write_text("model: org/model\ndata: rows.jsonl\n")
    done = shardwise("launch", "r.yaml", "r.yaml", "--on", "ray", cwd=tmp_path)
    assert done.returncode == 2 and "job array" in done.stderr and " hint: " in done.stderr
    done = shardwise("launch", "r.yaml", "--on", "local", "--nodes", 2, cwd=tmp_path)
    assert done.returncode == 2 and "this one machine" in done.stderr and " hint: " in done.stderr


def test_a_sky_job_gets_its_secrets_by_name(sky: Fake, tmp_path: Path, monkeypatch) -> None:
    run = launched(tmp_path, skypilot={"volume": "work"}, environment=["HF_TOKEN"])
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with pytest.raises(RecipeError, match="HF_TOKEN"):
        submission.submit(run, "skypilot", None)
    monkeypatch.setenv("HF_TOKEN", "hf_verysecret")
    found = submission.submit(run, "skypilot", None)
    (call,) = sky.calls
    assert call[:2] == ["jobs", "launch"] and call[call.index("--secret") + 1] == "HF_TOKEN"
    assert call[-1] == str(found.folder / "task.yaml") and "--detach-run" in call and "--async" not in call
    assert "hf_verysecret" not in "".join(p.read_text() for p in found.folder.iterdir()) + str(call)


@pytest.mark.parametrize(
    ("status", "state", "code"),
    [
        ("PENDING", "waiting", None),
        ("RECOVERING", "waiting", None),
        ("RUNNING", "running", None),
        ("WINDING_DOWN", "running", None),
        ("SUCCEEDED", "ended", 0),
        ("FAILED_SETUP", "ended", 1),
        ("CANCELLED", "ended", 1),
    ],
)
def test_a_sky_jobs_state(sky: Fake, status, state, code) -> None:
    told = [(3, "demo", "FAILED"), (4, "demo", status), (5, "other", "RUNNING")]  # 3: an earlier one
    jobs = [{"job_id": number, "job_name": name, "status": word} for number, name, word in told]
    sky.answer("jobs", "queue", out=json.dumps(jobs))
    seen = skypilot.look("demo")
    assert (seen.state, seen.exit_code) == (state, code)


def test_a_sky_job_is_cancelled_by_its_name(sky: Fake) -> None:
    skypilot.cancel("demo", now=False)
    skypilot.cancel("demo", now=True)
    assert sky.calls == [
        ["jobs", "cancel", "--yes", "--graceful", "--name", "demo"],
        ["jobs", "cancel", "--yes", "--name", "demo"],
    ]


def test_a_process_that_got_the_drivers_number_is_not_taken_for_it(tmp_path: Path) -> None:
    from shardwise.runs.lock import holder_of

    other = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    try:
        me = holder_of(other.pid)
        reused = f"{me.pid}@{me.host}@{me.started + 1}"
        ray.cancel(reused, now=True)
        assert other.poll() is None
        assert ray.look(f"{me.pid}@{me.host}@{me.started}").state == "running"
        assert ray.look(f"{me.pid}@elsewhere@{me.started}").state == "unknown"
        with pytest.raises(UsageError, match="elsewhere"):
            ray.cancel(f"{me.pid}@elsewhere@{me.started}", now=True)
        ray.cancel(f"{me.pid}@{me.host}@{me.started}", now=True)
        assert other.wait(10) == -9 and ray.look(f"{me.pid}@{me.host}@{me.started}").state == "ended"
    finally:
        other.kill()
        other.wait()


def test_a_driver_of_another_version_is_no_crash(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="names no driver"):
        ray.look("1234")


def test_what_a_place_has_no_use_for_is_refused_or_told(tmp_path: Path, shardwise) -> None:
    with pytest.raises(RecipeError, match=r"launch\.setup"):
        ray.render(launched(tmp_path, setup=["module load cuda"]))
    (tmp_path / "r.yaml").write_text(
        "model: ./none\ndata: rows.jsonl\nlaunch: {setup: [x], gpus: 8xH100-80GB}\n"
    )
    done = shardwise("launch", "r.yaml", "--on", "local", "--dry-run", cwd=tmp_path)
    assert "not used with --on local" in done.stderr and "launch.gpus, launch.setup" in done.stderr


def test_a_cancel_that_cannot_be_says_so_and_leaves_no_mark(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = submission.submit(launched(tmp_path), "torchrun", None)
    for now, word in ((False, "has not started"), (True, "at once")):
        with pytest.raises(UsageError, match=word):
            submission.cancel(found, now)
    slurm = submission.Submission("demo", "slurm", "7", "nowhere", 0.0, found.folder)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UsageError, match="squeue"):
        submission.cancel(slurm, False)
    assert not (found.folder / "cancelled").exists()
