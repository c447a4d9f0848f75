"""Kubernetes: a ConfigMap with the recipe, and a Kubeflow Trainer v2 TrainJob or a plain JobSet that runs it."""

import re
import shlex
import subprocess
from pathlib import Path

from shardwise.errors import MissingDependencyError, RecipeError, RunError, UsageError
from shardwise.launch.environment import variables
from shardwise.launch.targets.parts import (
    PORT,
    RECIPE,
    Launched,
    Seen,
    comment,
    one_line,
    torchrun,
    wrapper,
    yaml,
)

SCRIPT = "job.yaml"
RECIPE_FOLDER = "/etc/shardwise"
SPARE_SECONDS = 30  # of the grace period beyond what torchrun waits
# Longest name that leaves room for what JobSet appends to pods (-node-0-123-abcde) within a label's 63.
LONGEST_NAME = 43
_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
# By their full names: other groups may have kinds of the same short one.
RESOURCES = {"trainjob": "trainjobs.trainer.kubeflow.org", "jobset": "jobsets.jobset.x-k8s.io"}
_LABEL = "jobset.sigs.k8s.io/jobset-name"  # of every pod; a TrainJob's JobSet has the TrainJob's name
# The label JobSet gives every pod: a new number for each restart of the whole set.
_ATTEMPT = "metadata.labels['jobset.sigs.k8s.io/restart-attempt']"


def render(run: Launched) -> str:
    """The manifest. Raises RecipeError for what Kubernetes could not take or would ignore."""
    _check(run)
    launch = run.recipe.launch
    head = f"""# Run {comment(run.name)} on {comment(run.size)}. Written by: shardwise launch --on kubernetes
# Submit it again with: kubectl create -f {SCRIPT}
apiVersion: v1
kind: ConfigMap
metadata:
  name: {yaml(run.name)}
  namespace: {yaml(launch.kubernetes.namespace)}
data:
  {RECIPE}: |
{_indent(run.recipe_text, 4)}
---
"""
    return head + (_trainjob(run) if launch.kubernetes.kind == "trainjob" else _jobset(run))


def _trainjob(run: Launched) -> str:
    """The Trainer sets torchrun's rendezvous (PET_NNODES, PET_NODE_RANK, PET_MASTER_ADDR ...) itself."""
    asked = run.recipe.launch.kubernetes
    command = wrapper(run, _python(run), f"{RECIPE_FOLDER}/{RECIPE}", f"trainjob-{run.name}", "$(SHARDWISE_ATTEMPT)",
                      f"--directory {asked.mount}")  # fmt: skip
    command += torchrun(run, None, "")
    command = [part for part in command if not part.startswith(("--nnodes", "--nproc-per-node"))]
    return f"""apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainJob
metadata:
  name: {yaml(run.name)}
  namespace: {yaml(asked.namespace)}
{_labels(run)}\
spec:
  runtimeRef:
    name: {yaml(asked.runtime)}   # its torch policy hands torchrun nodes, ranks and rendezvous (PET_*)
  trainer:
    image: {yaml(asked.image)}
    numNodes: {run.nodes}
    numProcPerNode: {run.ranks_per_node}
    command:
{_list(command, 6)}
    env:
{_env(run, 6)}
{_resources(run, 4, "resourcesPerNode")}\
  runtimePatches:                     # what the runtime's pods get beside: volumes, time to save
    - manager: shardwise.io/launch
      trainingRuntimeSpec:
        template:
          spec:
            replicatedJobs:
              - name: node            # the runtime's own name of it, and of its container
                template:
                  spec:
                    template:
                      spec:
{_grace(run, 24)}
{_selector(run, 24)}{_tolerations(run, 24)}\
                        containers:
                          - name: node
                            volumeMounts:
{_volume_mounts(run, 30)}
                        volumes:
{_volumes(run, 26)}
"""


def _jobset(run: Launched) -> str:
    """One Job of `nodes` pods; its first pod is the rendezvous, by the name JobSet's service gives it."""
    launch, asked = run.recipe.launch, run.recipe.launch.kubernetes
    command = wrapper(run, _python(run), f"{RECIPE_FOLDER}/{RECIPE}", f"jobset-{run.name}", "$(SHARDWISE_ATTEMPT)",
                      f"--directory {asked.mount}")  # fmt: skip
    command += torchrun(run, f"{run.name}-node-0-0.{run.name}:{PORT}", "$(SHARDWISE_ATTEMPT)")
    return f"""apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: {yaml(run.name)}
  namespace: {yaml(asked.namespace)}
{_labels(run)}\
spec:
  network:
    enableDNSHostnames: true            # the rendezvous is found by the first pod's name
    publishNotReadyAddresses: true
  failurePolicy:
    maxRestarts: {launch.max_restarts}
    rules:
      - name: refused                   # exit code 2 (see podFailurePolicy): trying again cannot help
        action: FailJobSet
        onJobFailureReasons: [PodFailurePolicy]
  replicatedJobs:
    - name: node
      replicas: 1
      template:
        spec:
          parallelism: {run.nodes}
          completions: {run.nodes}
          completionMode: Indexed
          backoffLimit: 0               # one lost pod restarts the set, which resumes from its checkpoint
          podFailurePolicy:
            rules:
              - action: FailJob
                onExitCodes:
                  containerName: node
                  operator: In
                  values: [2]
          template:
            spec:
              restartPolicy: Never
{_grace(run, 14)}
{_selector(run, 14)}{_tolerations(run, 14)}\
              containers:
                - name: node
                  image: {yaml(asked.image)}
                  command:
{_list(command, 20)}
                  env:
{_env(run, 20)}
{_resources(run, 18, "resources")}\
                  volumeMounts:
{_volume_mounts(run, 20)}
              volumes:
{_volumes(run, 16)}
"""


def _check(run: Launched) -> None:
    launch, asked = run.recipe.launch, run.recipe.launch.kubernetes
    if not _NAME.fullmatch(run.name) or len(run.name) > LONGEST_NAME:
        near = re.sub("[^a-z0-9]+", "-", run.name.lower()).strip("-0123456789")[:LONGEST_NAME].strip("-")
        raise RecipeError(
            f"run name '{run.name}' cannot name a Kubernetes object",
            f"allowed: at most {LONGEST_NAME} of a-z, 0-9 and '-', first a letter, last no '-'",
            f"use --name {near or 'run'}",
        )
    if launch.environment and asked.secret is None:
        raise RecipeError(
            f"launch.environment names {', '.join(launch.environment)}, but no Secret holds them",
            "pods do not inherit a shell's variables, and a manifest is no place for their values",
            "kubectl create secret generic NAME --from-literal=..., then launch.kubernetes.secret: NAME",
        )
    if launch.setup:
        raise RecipeError(
            "launch.setup is not run on Kubernetes",
            "pods start from an image",
            "do it in the image's Dockerfile",
        )
    if asked.claim is None:
        raise RecipeError(
            "launch.kubernetes.claim is missing",
            "without a shared volume the run folder would vanish with its pods",
            "name a ReadWriteMany PersistentVolumeClaim",
        )


def _python(run: Launched) -> str:
    return shlex.quote(run.recipe.launch.python or "python")


def _list(parts: list[str], indent: int) -> str:
    """A command as a YAML list, one word an item: no shell ever reads it."""
    words = [word for part in parts for word in shlex.split(part)]
    return "\n".join(f"{' ' * indent}- {yaml(word)}" for word in words)


def _env(run: Launched, indent: int) -> str:
    pad = " " * indent
    lines = [f"{pad}- name: SHARDWISE_ATTEMPT      # new for every restart of the whole job",
             f"{pad}  valueFrom: {{fieldRef: {{fieldPath: {yaml(_ATTEMPT)}}}}}"]  # fmt: skip
    for variable in variables(run.recipe):
        lines.append(f"{pad}- name: {variable.name}   # {comment(variable.reason)}")
        lines.append(f"{pad}  value: {yaml(variable.value)}")
    for name in run.recipe.launch.environment:
        secret = run.recipe.launch.kubernetes.secret
        lines.append(f"{pad}- name: {name}")
        lines.append(f"{pad}  valueFrom: {{secretKeyRef: {{name: {yaml(secret)}, key: {name}}}}}")
    return "\n".join(lines)


def _resources(run: Launched, indent: int, key: str) -> str:
    limits = dict(run.recipe.launch.kubernetes.limits)
    if run.recipe.launch.gpus is not None:
        limits = {"nvidia.com/gpu": str(run.ranks_per_node), **limits}
    if not limits:
        return ""
    pad = " " * indent
    lines = "".join(f"{pad}    {yaml(name)}: {yaml(amount)}\n" for name, amount in limits.items())
    return f"{pad}{key}:\n{pad}  limits:           # requests are the same\n{lines}"


def _grace(run: Launched, indent: int) -> str:
    seconds = run.recipe.launch.stop_seconds
    return (
        f"{' ' * indent}terminationGracePeriodSeconds: {seconds + SPARE_SECONDS}"
        f"   # longer than the {seconds} s in which ranks save"
    )


def _selector(run: Launched, indent: int) -> str:
    labels = run.recipe.launch.kubernetes.node_selector
    if not labels:
        return ""
    pad = " " * indent
    return f"{pad}nodeSelector:\n" + "".join(f"{pad}  {yaml(k)}: {yaml(v)}\n" for k, v in labels.items())


def _labels(run: Launched) -> str:
    labels = run.recipe.launch.kubernetes.labels
    lines = "".join(f"    {yaml(k)}: {yaml(v)}\n" for k, v in labels.items())
    return f"  labels:\n{lines}" if labels else ""


def _tolerations(run: Launched, indent: int) -> str:
    keys = run.recipe.launch.kubernetes.tolerate
    pad = " " * indent
    lines = "".join(f"{pad}  - {{key: {yaml(key)}, operator: Exists}}\n" for key in keys)
    return f"{pad}tolerations:\n{lines}" if keys else ""


def _volume_mounts(run: Launched, indent: int) -> str:
    pad = " " * indent
    return "\n".join(
        [
            f"{pad}- {{name: workspace, mountPath: {yaml(run.recipe.launch.kubernetes.mount)}}}",
            f"{pad}- {{name: recipe, mountPath: {RECIPE_FOLDER}, readOnly: true}}",
            f"{pad}- {{name: shm, mountPath: /dev/shm}}",
        ]
    )


def _volumes(run: Launched, indent: int) -> str:
    pad = " " * indent
    claim = yaml(run.recipe.launch.kubernetes.claim)
    return "\n".join(
        [
            f"{pad}- name: workspace       # model, data, runs; ReadWriteMany",
            f"{pad}  persistentVolumeClaim: {{claimName: {claim}}}",
            f"{pad}- name: recipe",
            f"{pad}  configMap: {{name: {yaml(run.name)}}}",
            f"{pad}- name: shm             # pods get 64 MB of /dev/shm, too little for NCCL and data loading",
            f"{pad}  emptyDir: {{medium: Memory}}",
        ]
    )


def _indent(text: str, indent: int) -> str:
    return "\n".join(f"{' ' * indent}{line}" if line else "" for line in text.splitlines())


def submit(script: Path, run: Launched) -> str:
    """kubectl create, once the server has checked all of it; returns kind/namespace/name.

    Raises UsageError with kubectl's own words; what was created until then is deleted again.
    """
    asked = run.recipe.launch.kubernetes
    try:
        _kubectl("create", "--dry-run=server", "--filename", str(script))
        _create(script, asked.namespace)
    except RunError as problem:
        raise UsageError("Kubernetes does not take the manifest", problem.why, problem.hint) from None
    return f"{asked.kind}/{asked.namespace}/{run.name}"


def _create(script: Path, namespace: str) -> None:
    done = _run("create", "--filename", str(script), "--output", "name")
    if done.returncode:
        for created in done.stdout.split():
            _run("delete", created, "--namespace", namespace, "--ignore-not-found", "--wait=false")
        raise _failure("create", done.stderr)


def look(job_id: str) -> Seen:
    """The conditions of the job that are true; when it has ended, the worst exit code of its pods."""
    kind, namespace, name = job_id.split("/")
    query = "jsonpath={range .status.conditions[?(@.status=='True')]}{.type}{'\\n'}{end}"
    words = _kubectl("get", RESOURCES[kind], name, "--namespace", namespace, "--output", query).split()
    if not words:
        return Seen("running", "no condition yet")
    if any(word in ("Complete", "Completed") for word in words):
        return Seen("ended", "completed", 0)
    if "Failed" in words:
        return Seen("ended", "failed", _worst_exit_code(namespace, name))
    return Seen("waiting" if "Suspended" in words else "running", words[-1].lower())


def _worst_exit_code(namespace: str, name: str) -> int:
    """2 when a pod was refused, 75 when one stopped with the state saved and none failed, else 1."""
    query = "jsonpath={range .items[*]}{.status.containerStatuses[*].state.terminated.exitCode}{'\\n'}{end}"
    told = _kubectl(
        "get", "pods", "--namespace", namespace, "--selector", f"{_LABEL}={name}", "--output", query
    )
    codes = {int(word) for word in told.split() if word.isdigit()} - {0}
    return next((code for code in (2, 75) if codes == {code}), 1)


def log(job_id: str, lines: int) -> str:
    """The last lines of every pod, each with its pod's name in front."""
    _, namespace, name = job_id.split("/")
    return _kubectl(
        "logs", "--namespace", namespace, "--selector", f"{_LABEL}={name}", "--tail", str(lines), "--prefix",
        "--ignore-errors",
    )  # fmt: skip


def cancel(job_id: str, now: bool) -> None:
    """Delete the job; its pods get the grace period to save unless `now`. Its ConfigMap goes too."""
    kind, namespace, name = job_id.split("/")
    _kubectl("delete", RESOURCES[kind], name, "--namespace", namespace, "--wait=false")
    if now:
        _kubectl(
            "delete", "pods", "--namespace", namespace, "--selector", f"{_LABEL}={name}", "--grace-period=0",
            "--force", "--wait=false",
        )  # fmt: skip
    _kubectl("delete", "configmap", name, "--namespace", namespace, "--ignore-not-found")


def _kubectl(*arguments: str) -> str:
    """What it prints. Raises RunError when it fails."""
    done = _run(*arguments)
    if done.returncode:
        raise _failure(arguments[0], done.stderr)
    return done.stdout


def _run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    try:
        return subprocess.run(
            ["kubectl", *arguments], capture_output=True, text=True, check=False, timeout=60
        )
    except FileNotFoundError:
        raise MissingDependencyError(
            "'kubectl' is not here", "it talks to the cluster", "install it, or look with --dry-run"
        ) from None
    except subprocess.TimeoutExpired:
        raise RunError("kubectl does not answer", "waited 60 s", "try: kubectl cluster-info") from None


def _failure(verb: str, said: str) -> RunError:
    hint = "is the cluster the right one? try: kubectl cluster-info"
    if "already exists" in said:
        hint = "choose another --name"
    elif "no matches for kind" in said:
        hint = "install Kubeflow Trainer 2.3 or newer, or JobSet, or choose the other launch.kubernetes.kind"
    return RunError(f"kubectl {verb} failed", one_line(said), hint)
