"""Kubernetes manifests pass three layers, and each layer catches a mistake that both others let through.

1. The CustomResourceDefinitions kept in `schemas`, made strict: no unknown field, no value out of bounds.
2. The API's own models (package kubeflow-trainer-api), which also know the metadata that definitions leave open.
3. kubernetes-validate on the ConfigMap, the Job inside a JobSet and the pods of a TrainJob.
"""

import sys
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

sys.path.insert(0, str(Path(__file__).parent))
import crd
from made import launched

from shardwise.errors import RecipeError
from shardwise.launch.targets import kubernetes

models = pytest.importorskip("kubeflow_trainer_api.models", reason="needs the package kubeflow-trainer-api")
pytest.importorskip("jsonschema", reason="needs the package jsonschema")
pytest.importorskip("kubernetes_validate", reason="needs the package kubernetes-validate")

KINDS = ("trainjob", "jobset")
GPUS = {"gpus": "8xH100-80GB", "fabric": "infiniband", "environment": ["HF_TOKEN"]}


def manifest(tmp_path: Path, kind: str) -> tuple[Any, Any]:
    section = {"kind": kind, "claim": "work", "secret": "tokens", "node_selector": {"pool": "no"}}
    text = kubernetes.render(launched(tmp_path, kubernetes=section, **GPUS))
    config_map, job = YAML(typ="safe").load_all(text)
    return config_map, job


def model(kind: str) -> Any:
    return models.TrainerV1alpha1TrainJob if kind == "trainjob" else models.JobsetV1alpha2JobSet


def first_env(kind: str, job: Any) -> Any:
    if kind == "trainjob":
        return job["spec"]["trainer"]["env"]
    return inner(job)["spec"]["template"]["spec"]["containers"][0]["env"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_definition_accepts_ours_and_catches_a_misspelt_field(kind: str, tmp_path: Path) -> None:
    _, job = manifest(tmp_path, kind)
    crd.check(kind, job)
    spec = job["spec"]["trainer"] if kind == "trainjob" else job["spec"]["failurePolicy"]
    spec["numNode" if kind == "trainjob" else "maxRestart"] = 2
    assert model(kind).from_dict(job), "the API's models drop it without a word"
    with pytest.raises(crd.Mistake, match=r"numNode|maxRestart"):
        crd.check(kind, job)


def test_the_definition_catches_what_types_alone_allow(tmp_path: Path) -> None:
    _, job = manifest(tmp_path, "jobset")
    job["spec"]["failurePolicy"]["rules"][0]["action"] = "FailJob"
    assert models.JobsetV1alpha2JobSet.from_dict(job), "the API's models take any string"
    with pytest.raises(crd.Mistake, match=r"FailJob"):
        crd.check("jobset", job)
    _, job = manifest(tmp_path, "trainjob")
    job["spec"]["runtimePatches"][0]["manager"] = ""
    with pytest.raises(crd.Mistake, match="manager"):
        crd.check("trainjob", job)


@pytest.mark.parametrize("kind", KINDS)
def test_the_definition_catches_a_variable_given_twice(kind: str, tmp_path: Path) -> None:
    _, job = manifest(tmp_path, kind)
    first_env(kind, job).append({"name": "HF_TOKEN", "value": "x"})
    with pytest.raises(crd.Mistake, match="HF_TOKEN"):
        crd.check(kind, job)


@pytest.mark.parametrize("kind", KINDS)
def test_the_models_accept_ours_and_catch_a_label_that_is_no_string(kind: str, tmp_path: Path) -> None:
    _, job = manifest(tmp_path, kind)
    assert model(kind).from_dict(job).metadata.name == "demo"
    job["metadata"]["labels"] = {"team": 7}
    crd.check(kind, job)  # a definition says of metadata only that it is an object
    with pytest.raises(ValueError, match="team"):
        model(kind).from_dict(job)


def inner(job: Any) -> dict[str, Any]:
    template = job["spec"]["replicatedJobs"][0]["template"]
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "inner"}, **template}


def test_kubernetes_validate_accepts_the_inner_job_and_catches_a_mistake(tmp_path: Path) -> None:
    import kubernetes_validate as validate

    config_map, job = manifest(tmp_path, "jobset")
    validate.validate(config_map, "1.34", strict=True)
    whole = inner(job)
    validate.validate(whole, "1.34", strict=True)
    config_map["data"]["steps"] = 5  # no custom resource: nobody else looks at it
    with pytest.raises(validate.ValidationError, match="5"):
        validate.validate(config_map, "1.34", strict=True)
    whole["spec"]["template"]["spec"]["containers"][0]["volumeMounts"][0]["mountpath"] = "/x"
    with pytest.raises(validate.ValidationError, match="mountpath"):
        validate.validate(whole, "1.34", strict=True)


def test_pods_of_a_trainjob_are_valid(tmp_path: Path) -> None:
    import kubernetes_validate as validate

    _, job = manifest(tmp_path, "trainjob")
    patch = job["spec"]["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"][0]
    spec = patch["template"]["spec"]["template"]["spec"]
    trainer = job["spec"]["trainer"]
    spec["containers"][0] |= {key: trainer[key] for key in ("image", "command", "env")}
    spec["containers"][0]["resources"] = trainer["resourcesPerNode"]
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": spec}
    validate.validate(pod, "1.34", strict=True)


@pytest.mark.parametrize("kind", KINDS)
def test_the_manifest_says_what_a_run_needs(kind: str, tmp_path: Path) -> None:
    config_map, job = manifest(tmp_path, kind)
    recipe = YAML(typ="safe").load(config_map["data"]["recipe.yaml"])
    assert recipe["model"]["source"] == "org/model" and recipe["run"]["name"] == "demo"
    text = str(job)
    for needed in (
        "/dev/shm",
        "nvidia.com/gpu",
        "secretKeyRef",
        "'pool': 'no'",
        "NCCL_NET",
        "'claimName': 'work'",
    ):
        assert needed in text, needed
    assert ("PET_" in text) is False  # the Trainer sets them, and refuses them in trainer.env


def test_what_kubernetes_would_ignore_or_refuse_is_refused_here(tmp_path: Path) -> None:
    claim = {"claim": "work"}
    with pytest.raises(RecipeError, match="setup"):
        kubernetes.render(launched(tmp_path, kubernetes=claim, setup=["module load x"]))
    with pytest.raises(RecipeError, match="Secret"):
        kubernetes.render(launched(tmp_path, kubernetes=claim, environment=["HF_TOKEN"]))
    with pytest.raises(RecipeError, match="claim"):
        kubernetes.render(launched(tmp_path))
    with pytest.raises(RecipeError, match="Kubernetes object") as refused:
        kubernetes.render(launched(tmp_path, name="My_Run", kubernetes=claim))
    assert "my-run" in refused.value.hint


@pytest.mark.parametrize("kind", KINDS)
def test_the_python_of_the_image_can_be_named(kind: str, tmp_path: Path) -> None:
    section = {"kind": kind, "claim": "work"}
    text = kubernetes.render(launched(tmp_path, kubernetes=section, python="/opt/my env/bin/python"))
    assert text.count('- "/opt/my env/bin/python"') == 1 and '- "python"' not in text


def test_values_stay_strings_in_yaml(tmp_path: Path) -> None:
    evil = 'x", command: ["touch x"], y: "'
    text = kubernetes.render(launched(tmp_path, kubernetes={"claim": "work", "image": evil}))
    _, job = YAML(typ="safe").load_all(text)
    assert job["spec"]["trainer"]["image"] == evil
