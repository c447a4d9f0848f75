"""The definitions kept in `schemas`: field for field those of the published API, and every kind of mistake caught.

The models of the package kubeflow-trainer-api are generated from the same types as the published definitions: they
have every field, its type and whether it is required, but no bounds and no rules.
"""

import sys
import types
import typing
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

sys.path.insert(0, str(Path(__file__).parent))
import crd
from made import launched

from shardwise.launch.targets import kubernetes

models = pytest.importorskip("kubeflow_trainer_api.models", reason="needs the package kubeflow-trainer-api")
pytest.importorskip("jsonschema", reason="needs the package jsonschema")
pytest.importorskip("kubernetes_validate", reason="needs the package kubernetes-validate")

ROOTS = {"trainjob": "TrainerV1alpha1TrainJob", "jobset": "JobsetV1alpha2JobSet"}
PLAIN = {str: "string", int: "integer", bool: "boolean", datetime: "string"}
NOT_KEPT = {"status", "metadata"}  # what controllers write; what all resources have alike


def differences(schema: Any, model: Any, place: str) -> list[str]:
    """Where a definition and a model do not have the same fields, types and required names."""
    fields = {field.alias or name: field for name, field in model.model_fields.items()}
    names, theirs = set(schema["properties"]) - NOT_KEPT, set(fields) - NOT_KEPT
    found = [f"{place}.{name} is only in one of them" for name in sorted(names ^ theirs)]
    needed = {name for name, field in fields.items() if field.is_required()}
    if needed != set(schema.get("required", [])):
        found.append(f"{place} requires {schema.get('required')}, the model {sorted(needed)}")
    for name in sorted(names & theirs):
        found += unlike(schema["properties"][name], fields[name].annotation, f"{place}.{name}")
    return found


def unlike(schema: Any, annotation: Any, place: str) -> list[str]:
    """The same for one field."""
    origin, inside = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return unlike(schema, next(one for one in inside if one is not type(None)), place)
    if origin is typing.Annotated:
        return unlike(schema, inside[0], place)
    if origin is list:
        alike = schema.get("type") == "array"
        return unlike(schema["items"], inside[0], f"{place}[]") if alike else [f"{place} is a list"]
    if origin is dict:
        alike = schema.get("type") == "object" and "additionalProperties" in schema
        return [] if alike else [f"{place} is a map"]
    if crd.TYPE in schema:
        name = "".join(part[0].upper() + part[1:] for part in schema[crd.TYPE].split("."))
        return [] if name == annotation.__name__ else [f"{place} is {annotation.__name__}"]
    if hasattr(annotation, "model_fields"):
        return differences(schema, annotation, place)
    return [] if PLAIN[annotation] == schema.get("type") else [f"{place} is {annotation.__name__}"]


@pytest.mark.parametrize("kind", ROOTS)
def test_a_definition_has_the_fields_of_the_published_api(kind: str) -> None:
    schema = crd.schema_of(crd.definition(kind))
    assert differences(schema, getattr(models, ROOTS[kind]), kind) == []
    del schema["properties"]["spec"]["properties"]["suspend"]
    schema["properties"]["spec"]["required"] = ["managedBy"]
    assert len(differences(schema, getattr(models, ROOTS[kind]), kind)) == 2, "this comparison can fail"


def manifest(folder: Path, kind: str) -> dict[str, Any]:
    text = kubernetes.render(
        launched(folder, gpus="8xH100-80GB", kubernetes={"kind": kind, "claim": "work"}, cache="/cache")
    )
    job: dict[str, Any] = list(YAML(typ="safe").load_all(text))[1]
    return job


def container(job: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = job["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    return found["containers"][0]  # type: ignore[no-any-return]


def patch(job: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = job["spec"]["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]
    return found["replicatedJobs"][0]  # type: ignore[no-any-return]


def pod(job: dict[str, Any]) -> dict[str, Any]:
    return patch(job)["template"]["spec"]["template"]["spec"]  # type: ignore[no-any-return]


# kind, what is done to a good manifest, what the message names
MISTAKES: dict[str, tuple[str, Callable[[dict[str, Any]], Any], str]] = {
    "unknown field": ("trainjob", lambda j: j["spec"].update(numNodes=2), "numNodes"),
    "unknown field of a patch": ("trainjob", lambda j: pod(j).update(hostNetwork=True), "hostNetwork"),
    "unknown field of a volume": ("trainjob", lambda j: pod(j)["volumes"][0].update(pvc={}), "pvc"),
    "missing required": ("trainjob", lambda j: j["spec"].pop("runtimeRef"), "runtimeRef"),
    "missing key of a patch": ("trainjob", lambda j: patch(j).pop("name"), "name"),
    "wrong type": ("trainjob", lambda j: j["spec"]["trainer"].update(numNodes="2"), "numNodes"),
    "too long": ("trainjob", lambda j: j["spec"]["trainer"].update(image="x" * 501), "image"),
    "too many": ("trainjob", lambda j: j["spec"]["trainer"].update(args=["x"] * 129), "args"),
    "too large": ("trainjob", lambda j: j["spec"]["trainer"].update(numNodes=2**31), "numNodes"),
    "too small": ("trainjob", lambda j: j["spec"].update(activeDeadlineSeconds=0), "activeDeadlineSeconds"),
    "bad pattern": ("trainjob", lambda j: patch(j).update(name="Node"), "Node"),
    "given twice": ("trainjob", lambda j: pod(j)["volumes"].append(pod(j)["volumes"][0]), "twice"),
    "name too long": ("trainjob", lambda j: j["metadata"].update(name="a" * 64), "63 characters"),
    "name no label": ("trainjob", lambda j: j["metadata"].update(name="1a"), "RFC 1035"),
    "rule with a list": ("trainjob", lambda j: j["spec"].update(managedBy="me"), "multikueue"),
    "wrong kind": ("trainjob", lambda j: j.update(kind="TrainJobs"), "is not TrainJob"),
    "wrong version": ("jobset", lambda j: j.update(apiVersion="jobset.x-k8s.io/v1"), "v1alpha2"),
    "wrong enumeration": (
        "jobset", lambda j: j["spec"]["failurePolicy"].update(restartStrategy="Restart"), "Recreate",
    ),
    "missing in a rule": ("jobset", lambda j: j["spec"]["failurePolicy"]["rules"][0].pop("name"), "name"),
    "wrong type in a list": (
        "jobset", lambda j: j["spec"]["failurePolicy"]["rules"][0].update(onJobFailureReasons=[1]), "1 is not",
    ),
    "wrong type of a limit": ("jobset", lambda j: container(j)["resources"].update(limits=[]), "limits"),
    "unknown field of a container": ("jobset", lambda j: container(j).update(gpus=8), "gpus"),
    "twice in a set": (
        "jobset", lambda j: j["spec"]["replicatedJobs"].append(j["spec"]["replicatedJobs"][0]), "twice",
    ),
    "two that exclude each other": (
        "jobset",
        lambda j: (
            j["spec"].update(startupPolicy={"startupPolicyOrder": "InOrder"}),
            j["spec"]["replicatedJobs"][0].update(dependsOn=[{"name": "a", "status": "Ready"}]),
        ),
        "mutually exclusive",
    ),
    "namespace of a shared claim": (
        "jobset",
        lambda j: j["spec"].update(
            volumeClaimPolicies=[
                {"templates": [{"metadata": {"name": "a", "namespace": "b"}, "spec": {}}]}
            ]
        ),
        "namespace cannot be set",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_planted_mistake_is_caught(name: str, tmp_path: Path) -> None:
    kind, plant, word = MISTAKES[name]
    job = manifest(tmp_path, kind)
    crd.check(kind, job)
    plant(job)
    with pytest.raises(crd.Mistake, match=word):
        crd.check(kind, job)


ORIGINAL = """\
---
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata:
  annotations: {controller-gen.kubebuilder.io/version: v0.18.0}
  name: trainjobs.trainer.kubeflow.org
spec:
  group: trainer.kubeflow.org
  names: {kind: TrainJob, listKind: TrainJobList, plural: trainjobs, singular: trainjob}
  scope: Namespaced
  versions:
  - name: v1alpha0
    served: false
    storage: false
    schema: {openAPIV3Schema: {type: object}}
  - additionalPrinterColumns:
    - {jsonPath: .metadata.creationTimestamp, name: Age, type: date}
    name: v1alpha1
    schema:
      openAPIV3Schema:
        description: TrainJob represents configuration of a training job.
        properties:
          apiVersion: {description: version, type: string}
          kind: {type: string}
          metadata: {type: object}
          spec:
            properties:
              runtimeRef:
                properties: {name: {minLength: 1, type: string}}
                required: [name]
                type: object
              runtimePatches: {items: {type: object, x-kubernetes-preserve-unknown-fields: true}, type: array}
              trainer:
                properties:
                  command: {items: {type: string}, type: array, x-kubernetes-list-type: atomic}
                  env:
                    items:
                      properties:
                        name: {type: string}
                        value: {type: string}
                        valueFrom: {type: object, x-kubernetes-preserve-unknown-fields: true}
                      required: [name]
                      type: object
                    type: array
                    x-kubernetes-list-map-keys: [name]
                    x-kubernetes-list-type: map
                  image: {maxLength: 500, type: string}
                  numNodes: {format: int32, type: integer}
                  numProcPerNode: {format: int32, type: integer}
                  resourcesPerNode:
                    properties:
                      limits:
                        additionalProperties:
                          anyOf: [{type: integer}, {type: string}]
                          pattern: ^[0-9]+([KMGTPE]i)?$
                          x-kubernetes-int-or-string: true
                        type: object
                    type: object
                type: object
            required: [runtimeRef]
            type: object
          status: {properties: {jobs: {type: integer}}, type: object}
        type: object
        x-kubernetes-validations:
        - message: metadata.name must be no more than 63 characters
          rule: size(self.metadata.name) <= 63
    served: true
    storage: true
    subresources: {status: {}}
"""


def test_a_folder_of_originals_takes_the_place_of_what_is_kept(tmp_path: Path, monkeypatch) -> None:
    """Shaped as controller-gen writes them: several versions, types of Kubernetes spelled out."""
    (tmp_path / "crds").mkdir()
    path = tmp_path / "crds" / "trainer.kubeflow.org_trainjobs.yaml"
    path.write_text(ORIGINAL)
    monkeypatch.setenv("SHARDWISE_CRDS", str(path.parent))
    job = manifest(tmp_path, "trainjob")
    crd.check("trainjob", job)
    for plant, word in (
        (lambda j: j["spec"]["trainer"].update(numNode=2), "numNode"),
        (lambda j: j["spec"]["trainer"]["resourcesPerNode"]["limits"].update(memory="much"), "much"),
        (lambda j: j["spec"]["trainer"]["env"].append(j["spec"]["trainer"]["env"][0]), "twice"),
        (lambda j: j["metadata"].update(name="a" * 64), "63"),
        (lambda j: j["spec"].update(initializer={}), "initializer"),  # not in this original
    ):
        wrong = manifest(tmp_path, "trainjob")
        plant(wrong)
        with pytest.raises(crd.Mistake, match=word):
            crd.check("trainjob", wrong)
    with pytest.raises(FileNotFoundError, match="jobset"):
        crd.check("jobset", manifest(tmp_path, "jobset"))
    path.write_text(ORIGINAL.replace("size(self.metadata.name) <= 63", "self.metadata.name != 'x'"))
    with pytest.raises(NotImplementedError, match="does not know the rule"):
        crd.check("trainjob", job)
