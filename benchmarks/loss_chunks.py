"""Processor seconds of the chunked loss by size of its chunks: `python benchmarks/loss_chunks.py`.

Forward and gradients of 512 labelled positions at SmolLM2's output matrix (576 x 49,152) in bf16, with the matrix
frozen (adapters) and trained. Sizes take turns, and the fastest of several rounds counts.
"""

# ruff: noqa: PLC0415

import argparse
import json
import os
import platform
import time
from datetime import date
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
POSITIONS, HIDDEN, VOCABULARY = 512, 576, 49_152


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--powers", type=int, nargs="*", default=[20, 21, 22, 23, 24, 25])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()

    import torch

    from shardwise.training import loss

    torch.manual_seed(0)
    hidden = torch.randn(POSITIONS, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(0, VOCABULARY, (POSITIONS,))
    best: dict[str, dict[int, float]] = {"frozen": {}, "trained": {}}
    chosen = loss.CHUNK_LOGITS_CPU
    for _ in range(args.rounds):
        for kind, found in best.items():
            weight = (torch.randn(VOCABULARY, HIDDEN) / 24).bfloat16().requires_grad_(kind == "trained")
            for power in args.powers:
                loss.CHUNK_LOGITS_CPU = 2**power
                began = time.process_time()
                loss.chunked_cross_entropy(hidden, weight, targets).backward()
                found[power] = min(found.get(power, float("inf")), time.process_time() - began)
                hidden.grad = weight.grad = None
    result = {
        "kind": "loss_chunks",
        "date": date.today().isoformat(),
        "platform": platform.platform(),
        "torch": torch.__version__,
        "chosen_logits": chosen,
        "cpu_seconds_by_log2_of_logits": best,
    }
    print(json.dumps(result, indent=1))
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
