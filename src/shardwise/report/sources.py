"""Where in our own step a term of memory is made: the file and, looked up now, the line."""

from functools import cache
from importlib.resources import files

from shardwise.estimate.memory.parts import Part
from shardwise.estimate.stack import Stack

# kind of a part, else its term -> file under shardwise/training, and how the line begins
_KINDS = {
    "attention": ("attention.py", "def document_attention"),
    "loss": ("loss.py", "class _LinearCrossEntropy"),
    "norm": ("kernels/norm.py", "def rms_norm"),
}
_TERMS = {
    "weights": ("model.py", "class ModelFolder"),
    "master_weights": ("optimizers.py", "class Updater"),
    "gradients": ("optimizers.py", "class Updater"),
    "optimizer": ("optimizers.py", "def build_optimizer"),
    "inputs": ("batches.py", "def pack_documents"),
    "loss": ("loss.py", "class _LinearCrossEntropy"),
}
_ENGINES = {
    "single": ("engines/single.py", "class SingleEngine"),
    "ddp": ("engines/ddp.py", "class DdpEngine"),
    "fsdp2": ("engines/fsdp2.py", "class Fsdp2Engine"),
}
_DEEPSPEED = ("engines/deepspeed.py", "class DeepSpeedEngine")
_OWN = ("master_weights", "gradients", "optimizer", "temporaries")  # DeepSpeed makes them itself


def source_of(part: Part, stack: Stack) -> str:
    """ "shardwise/training/FILE:LINE" of the code that a part of the peak comes from, or whose code it is."""
    zero = stack.sharding.startswith("zero")
    if part.term == "engine" or (zero and not part.kind and part.term in _OWN):
        return line_of(*_ENGINES.get(stack.sharding, _DEEPSPEED))
    if part.kind == "loss" and stack.loss == "full":
        return line_of("loss.py", "def full_cross_entropy")
    if part.kind in _KINDS:
        return line_of(*_KINDS[part.kind])
    if part.term in _TERMS:
        return line_of(*_TERMS[part.term])
    if part.kind not in ("", "rotary", "residual") and stack.method != "full":
        return line_of("kernels/linear.py", "class _AdaptedLinear")
    return "the model's own forward, by transformers"


@cache
def line_of(file: str, text: str) -> str:
    """The line that begins with `text`. Raises LookupError when the code has gone elsewhere."""
    lines = files("shardwise").joinpath("training", file).read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, 1):
        if line.startswith(text):
            return f"shardwise/training/{file}:{number}"
    raise LookupError(f"{text!r} is not in shardwise/training/{file}")
