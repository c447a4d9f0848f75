"""The recipe: every key a person can write, its type, its default and one line of help.

`auto` means "shardwise chooses"; the planner replaces every `auto` by a value before a run starts, and the
run folder keeps that resolved copy.
"""

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

AUTO: Literal["auto"] = "auto"
Auto = Literal["auto"]

PositiveInt = Annotated[int, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
_VARIABLE = re.compile("[A-Za-z_][A-Za-z0-9_]*")  # what a shell takes as a name
Names = Annotated[tuple[str, ...], Field(strict=False, min_length=1)]


class Section(BaseModel):
    """Frozen; strict about types ("8" is not a number, "false" no boolean); no unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


def _help(text: str, default: Any = ..., **constraints: Any) -> Any:
    return Field(default, description=text, **constraints)


class Model(Section):
    source: str = _help("a local folder or a hub id", min_length=1)
    revision: str | None = _help("hub revision (branch, tag or commit)", None)
    trust_remote_code: bool = _help("run Python code that the model folder brings along", False)
    attention: Literal["auto", "sdpa", "eager", "flash_attention_2", "flex_attention"] = _help(
        "attention implementation; auto: the best one installed for the device", AUTO
    )
    chat_template: str | None = _help(
        "replaces the model's own chat template: a Jinja file, or chatml, gemma, llama3, mistral, qwen, zephyr",
        None,
    )


class Source(Section):
    path: str = _help("a file, folder, glob or hub dataset id", min_length=1)
    format: Literal["auto", "messages", "sharegpt", "alpaca", "prompt_completion", "preference", "text"] = (
        _help("how rows are read; auto: recognised by their fields and said aloud", AUTO)
    )
    weight: PositiveFloat = _help("how often this source is drawn per epoch: 0.5 half of it, 2 twice", 1.0)


class Data(Section):
    train: tuple[Source, ...] = _help("where the training rows are", strict=False, min_length=1)
    validation: (
        tuple[Source, ...] | Annotated[int, Field(ge=0)] | Annotated[float, Field(ge=0, lt=1)] | Auto
    ) = _help(
        "held-out rows: a source, a count (integer), a share (0.05) of the training rows, 0 for none; "
        "auto: 5 %, at most 200 rows, none below 20 rows",
        AUTO,
    )
    sequence_length: PositiveInt | Auto = _help(
        "tokens in one packed sequence; auto: fits the longest rows, at most what the model was built for",
        AUTO,
    )
    packing: bool = _help("put several rows into one sequence; attention never crosses rows", True)
    train_on: Literal["assistant", "all"] = _help("which turns of a chat carry a label", "assistant")
    overlong: Literal["truncate", "drop", "refuse"] = _help("rows longer than sequence_length", "truncate")
    streaming: bool = _help(
        "read and tokenize rows during the run, for sets larger than the disk; needs max_steps or max_tokens",
        False,
    )
    buffer_rows: PositiveInt = _help("streaming: rows that are shuffled and packed together", 4096)

    @field_validator("validation", mode="before")
    @classmethod
    def _count_or_share(cls, value: Any) -> Any:
        """One message for a number that is neither, in place of one for each kind of value."""
        if isinstance(value, float) and not 0 <= value < 1:
            count = (
                f"write {int(value)} without a decimal point to hold out a count of rows"
                if value >= 1
                else ""
            )
            raise ValueError(f"a share lies between 0 and 1{'; ' + count if count else ''}")
        if isinstance(value, int) and not isinstance(value, bool) and value < 0:
            raise ValueError("a count of rows is 0 or more")
        return value


class Lora(Section):
    rank: PositiveInt = _help("rank of the low-rank update", 16)
    alpha: PositiveFloat = _help("scale: the update is multiplied by alpha / rank", 32.0)
    dropout: float = _help("dropout before the adapter", 0.0, ge=0, lt=1)
    targets: Literal["all-linear", "attention"] | Names = _help(
        "which linear layers get an adapter: all-linear, attention, or a list of layer names", "all-linear"
    )
    rslora: bool = _help("scale by alpha / sqrt(rank) instead", False)
    dora: bool = _help("weight-decomposed adapters (DoRA)", False)


class Quantization(Section):
    """Only read with `method: qlora`."""

    type: Literal["nf4", "fp4"] = _help("4-bit data type of the frozen base", "nf4")
    double_quantization: bool = _help("quantise the quantisation constants too", True)


class Optimizer(Section):
    name: Literal["adamw", "adamw_8bit", "paged_adamw_8bit", "sgd", "adafactor", "muon"] = _help(
        "update rule", "adamw"
    )
    learning_rate: PositiveFloat | Auto = _help("peak; auto: 2e-4 for adapters, 1e-5 for full", AUTO)
    weight_decay: float = _help("decoupled; never on norms and biases", 0.0, ge=0)
    betas: tuple[float, float] = _help("Adam's decay rates", (0.9, 0.999), strict=False)
    eps: PositiveFloat = _help("Adam's denominator term", 1e-8)
    momentum: float = _help("of sgd and muon", 0.9, ge=0, lt=1)
    max_grad_norm: PositiveFloat | None = _help("clip the global gradient norm to this; null: never", 1.0)
    master_weights: bool = _help("keep fp32 copies of trained bf16 weights", True)


class Schedule(Section):
    name: Literal["cosine", "linear", "constant"] = _help("shape of the learning rate after warmup", "cosine")
    warmup: Annotated[int, Field(ge=0)] | Annotated[float, Field(ge=0, le=1)] = _help(
        "steps (integer) or share of all steps (with a decimal point)", 0.03
    )
    final_ratio: float = _help("learning rate at the last step, as a share of the peak", 0.0, ge=0, le=1)


class Training(Section):
    epochs: PositiveFloat | None = _help("passes over the data; null when another length is given", None)
    max_steps: PositiveInt | None = _help("optimizer steps; null when another length is given", None)
    max_tokens: PositiveInt | None = _help(
        "tokens to train on, as the model sees them; the sequence that reaches this number is the last one",
        None,
    )
    global_batch_size: PositiveInt | Auto = _help("sequences per optimizer step, all GPUs", AUTO)
    micro_batch_size: PositiveInt | Auto = _help("sequences one GPU puts through one forward", AUTO)
    precision: Literal["auto", "bf16", "fp32"] = _help("auto: bf16 where the device has it and it pays", AUTO)
    activation_checkpointing: Literal["auto", "none", "selective", "full"] | PositiveInt = _help(
        "recompute activations in the backward pass to save memory: of every layer (full; selective keeps the output "
        "of attention), or of so many layers; auto: of as few as fit",
        AUTO,
    )
    loss: Literal["auto", "chunked", "full"] = _help("chunked: logits of a few tokens at a time", AUTO)
    compile: bool = _help("torch.compile, one region per layer", False)
    seed: NonNegativeInt = _help("of row order, adapters and dropout", 0)
    non_finite: Literal["stop", "skip", "rollback"] = _help(
        "a loss or gradient that is NaN or infinite: stop; skip this update; or go back to the last checkpoint and "
        "skip it on the way",
        "stop",
    )
    non_finite_limit: PositiveInt = _help(
        "updates that may be skipped in a run before it stops all the same", 3
    )

    @model_validator(mode="after")
    def _one_length(self) -> "Training":
        given = [k for k in ("epochs", "max_steps", "max_tokens") if getattr(self, k) is not None]
        if len(given) > 1:
            both = "both" if len(given) == 2 else "all"
            raise ValueError(
                f"{', '.join(given[:-1])} and {given[-1]} are {both} given; the run can have only one length: "
                "delete one" + (" of them" if len(given) > 2 else "")
            )
        return self


class Fsdp2(Section):
    dp_replicate: PositiveInt = _help("replicas of the sharded group (HSDP); 1: shard over all ranks", 1)
    reshard_after_forward: bool = _help("free gathered parameters between forward and backward", True)
    cpu_offload: bool = _help("keep shards, gradients and optimizer states in host memory", False)


class DeepSpeed(Section):
    zero_stage: Literal[1, 2, 3] = _help("1: shard optimizer states, 2: gradients too, 3: parameters too", 2)
    offload_optimizer: Literal["none", "cpu", "nvme"] = _help("where optimizer states live", "none")
    offload_parameters: Literal["none", "cpu", "nvme"] = _help("where parameters live (stage 3)", "none")
    nvme_path: str | None = _help("folder on the NVMe disk for swapped states", None)
    reduce_bucket_size: PositiveInt | Auto = _help("elements per gradient reduction", AUTO)
    allgather_bucket_size: PositiveInt | Auto = _help("elements per parameter gather (stages 1, 2)", AUTO)
    prefetch_bucket_size: NonNegativeInt | Auto = _help("elements fetched ahead (stage 3)", AUTO)
    param_persistence_threshold: NonNegativeInt | Auto = _help(
        "smaller parameters stay whole (stage 3)", AUTO
    )
    max_live_parameters: PositiveInt | Auto = _help("elements kept gathered (stage 3)", AUTO)


class Engine(Section):
    name: Literal["auto", "single", "ddp", "fsdp2", "deepspeed"] = _help("what runs the step", AUTO)
    device: Literal["auto", "cpu", "cuda", "mps"] = _help("where tensors live", AUTO)
    processes: PositiveInt | Auto = _help(
        "ranks on this machine, or on each of launch.nodes; auto: one per GPU", AUTO
    )
    fsdp2: Fsdp2 = _help("read when name is fsdp2", Fsdp2())
    deepspeed: DeepSpeed = _help("read when name is deepspeed", DeepSpeed())


class Evaluation(Section):
    every_steps: NonNegativeInt | Auto = _help(
        "held-out loss every so many steps; 0: only at both ends", AUTO
    )
    samples: NonNegativeInt = _help("held-out prompts answered before and after training", 0)
    max_new_tokens: PositiveInt = _help("length limit of a sample answer", 64)


class Checkpoint(Section):
    every_steps: NonNegativeInt | Auto = _help("save every so many steps; 0: only at the end", AUTO)
    keep: PositiveInt = _help("how many of the latest checkpoints stay on disk; the best one always does", 2)
    background: bool | None = _help(
        "train on while a copy of the state in host memory is written; null: yes on GPUs, no on processors",
        None,
    )
    restarts: NonNegativeInt = _help(
        "how often in a row a run goes on by itself after a rank was killed or hung; a new checkpoint counts anew",
        3,
    )
    hang_seconds: PositiveFloat = _help(
        "a rank without progress for so long, and for three median steps, counts as hung", 10.0
    )


class Run(Section):
    folder: str = _help("where run folders are made", "runs")
    name: str | None = _help("name of the run folder; null: made from model, method and time", None)
    tracking: tuple[Literal["tensorboard", "wandb", "mlflow", "trackio"], ...] = _help(
        "send the run's events to these trackers too", (), strict=False
    )


class Slurm(Section):
    partition: str | None = _help("partition; null: the cluster's default", None)
    account: str | None = _help("account that pays", None)
    qos: str | None = _help("quality of service", None)
    time_limit: str | None = _help("longest run, as Slurm writes it: 12:00:00 or 2-00:00:00", None)
    constraint: str | None = _help("features the nodes must have", None)
    options: tuple[str, ...] = _help(
        "further options of sbatch, such as --cpus-per-gpu=12, --mem=0 or --exclusive", (), strict=False
    )
    container: str | None = _help("image every node runs in; null: no container", None)
    container_runtime: Literal["pyxis", "apptainer"] = _help("what starts the container", "pyxis")
    at_once: PositiveInt | None = _help(
        "of several recipes, how many run at the same time; null: as many as the cluster has room for", None
    )


class Kubernetes(Section):
    kind: Literal["trainjob", "jobset"] = _help("Kubeflow Trainer v2 TrainJob, or a plain JobSet", "trainjob")
    namespace: str = _help("namespace of the job", "default")
    image: str = _help("container image with shardwise in it", "shardwise:latest")
    runtime: str = _help("the TrainJob's ClusterTrainingRuntime", "torch-distributed")
    claim: str | None = _help("PersistentVolumeClaim, ReadWriteMany, for model, data and runs", None)
    mount: str = _help("where the claim is mounted; relative paths of the recipe start there", "/workspace")
    secret: str | None = _help("Secret that holds the variables of launch.environment", None)
    node_selector: dict[str, str] = _help("labels the nodes must have", {})
    tolerate: tuple[str, ...] = _help(
        "keys of taints whose nodes it may run on, such as nvidia.com/gpu", (), strict=False
    )
    labels: dict[str, str] = _help(
        "labels of the job, such as kueue.x-k8s.io/queue-name: team-a, by which Kueue admits it", {}
    )
    limits: dict[str, str] = _help(
        "limits of every node's container beside its GPUs, such as rdma/ib: '1' or memory: 200Gi", {}
    )


class Ray(Section):
    address: str = _help("address of the cluster; auto: the one this machine belongs to", AUTO)
    cpus_per_rank: PositiveInt = _help("processor cores reserved for each rank", 1)


class SkyPilot(Section):
    infra: str | None = _help(
        "cloud, region or Kubernetes context, as sky takes it; null: the cheapest", None
    )
    use_spot: bool = _help("spot machines; the managed job recovers and resumes", True)
    bucket: str | None = _help("bucket for the run folder, one node only", None)
    volume: str | None = _help("SkyPilot volume for the run folder, shared by all nodes", None)


class Launch(Section):
    """Read by `shardwise launch` only: where a run goes that needs more than this machine."""

    nodes: PositiveInt = _help("machines", 1)
    gpus: str | None = _help("GPUs of one node, such as 8xH100-80GB; null: ranks on processors", None)
    fabric: Literal["auto", "ethernet", "infiniband", "roce", "efa"] = _help(
        "network between the nodes; auto: the libraries look for themselves", AUTO
    )
    interface: str | None = _help("network interface between the nodes, such as eth0; null: found", None)
    max_restarts: NonNegativeInt = _help("how often a failed or pre-empted run is started again", 3)
    stop_seconds: PositiveInt = _help("time to save between a request to stop and the end", 120)
    environment: tuple[str, ...] = _help(
        "names of variables to hand on, never their values", (), strict=False
    )
    setup: tuple[str, ...] = _help("shell lines every node runs first, such as module load", (), strict=False)
    python: str | None = _help("Python on the nodes; null: this one (slurm, torchrun, ray), or python", None)
    cache: str | None = _help(
        "absolute folder for models and prepared rows: on a disk of each node, or shared by all; null: where "
        "HF_HOME and SHARDWISE_CACHE or the user's cache folder are on the node",
        None,
    )
    preflight: bool = _help("measure the links between the ranks before every start", False)
    slurm: Slurm = _help("read with --on slurm", Slurm())
    kubernetes: Kubernetes = _help("read with --on kubernetes", Kubernetes())
    ray: Ray = _help("read with --on ray", Ray())
    skypilot: SkyPilot = _help("read with --on skypilot", SkyPilot())

    @model_validator(mode="before")
    @classmethod
    def _names_only(cls, value: Any) -> Any:
        """A value given beside a name may be a secret: it is refused without being repeated."""
        names = value.get("environment", ()) if isinstance(value, dict) else ()
        for number, name in enumerate(names if isinstance(names, list | tuple) else ()):
            if not (isinstance(name, str) and _VARIABLE.fullmatch(name)):
                raise ValueError(
                    f"item {number + 1} of launch.environment is not the name of a variable; write names "
                    "alone and set their values in the shell, so that no secret stands in a file"
                )
        return value

    @field_validator("cache")
    @classmethod
    def _absolute(cls, value: str | None) -> str | None:
        if value is not None and not value.startswith("/"):
            raise ValueError(
                f"'{value}' would lie in another place on every node; write a path from the root"
            )
        return value


class Recipe(Section):
    """One training run, completely described."""

    model: Model = _help("which model")
    data: Data = _help("which rows, and how they become tokens")
    method: Literal["full", "lora", "qlora"] = _help("what is trained", "lora")
    lora: Lora = _help("read by lora and qlora", Lora())
    quantization: Quantization = _help("read by qlora", Quantization())
    optimizer: Optimizer = _help("update rule", Optimizer())
    schedule: Schedule = _help("learning rate over the steps", Schedule())
    training: Training = _help("length, batch, precision", Training())
    engine: Engine = _help("device, ranks, sharding, offload", Engine())
    evaluation: Evaluation = _help("held-out loss and sample answers", Evaluation())
    checkpoint: Checkpoint = _help("what is saved when", Checkpoint())
    run: Run = _help("where the run leaves its files", Run())
    launch: Launch = _help("how shardwise launch starts it elsewhere", Launch())

    @model_validator(mode="after")
    def _stream_with_an_end(self) -> "Recipe":
        if self.data.streaming and self.training.max_steps is None and self.training.max_tokens is None:
            raise ValueError(
                "data.streaming needs training.max_steps or training.max_tokens: how many rows there are is not "
                "known before they are read, and the learning rate needs to know the last step"
            )
        return self

    @model_validator(mode="before")
    @classmethod
    def _short_forms(cls, value: Any) -> Any:
        """`model: NAME`, `data: FILE` and `engine: NAME` stand for the section with that one key."""
        if not isinstance(value, dict):
            return value
        value = dict(value)
        for section, key in (("model", "source"), ("data", "train"), ("engine", "name")):
            if isinstance(value.get(section), str):
                value[section] = {key: value[section]}
        if isinstance(value.get("data"), list):
            value["data"] = {"train": value["data"]}
        if isinstance(value.get("data"), dict):
            data = value["data"] = dict(value["data"])
            for key in ("train", "validation"):
                if key in data and (key == "train" or data[key] != AUTO):
                    data[key] = _sources(data[key])
        return value


def _sources(value: Any) -> Any:
    """A path, a mapping or a list of either -> a tuple of mappings; numbers pass through."""
    if isinstance(value, str):
        return ({"path": value},)
    if isinstance(value, dict):
        return (value,)
    if isinstance(value, list | tuple):
        return tuple({"path": item} if isinstance(item, str) else item for item in value)
    return value
