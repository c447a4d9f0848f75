"""A run folder as training leaves it, without training."""

import math

from shardwise.runs import RunFolder

HOSTILE = "</script><script>alert('x')</script><img src=x onerror=alert(1)> \x1b[2J\x1b]0;title\x07 {{ 7*7 }}"
MIB = 2**20
TERMS = {
    "weights": 257,
    "master_weights": 18,
    "gradients": 18,
    "optimizer": 37,
    "activations": 310,
    "loss": 96,
}


def fill(run: RunFolder, steps: int = 40, state: str = "done", hostile: str = "") -> RunFolder:
    """A finished run of plausible numbers; `hostile` text stands wherever other people's text can."""
    run.event("start", steps=steps, world_size=1, device="cpu")
    run.event("evaluation", step=0, loss=3.31)
    for step in range(1, steps + 1):
        run.event(
            "step",
            step=step,
            loss=2.6 + 0.7 * math.exp(-step / (steps / 4)) + (0.9 if step == steps // 2 else 0),
            learning_rate=2e-4 * (1 - step / steps),
            grad_norm=1.5 + math.sin(step),
            tokens=2048,
            trained_tokens=700,
            seconds=2.0,
            tokens_per_second=1024.0,
            allocated_bytes=330 * MIB,
            peak_allocated_bytes=740 * MIB,
            resident_bytes=1900 * MIB,
        )
    run.event("evaluation", step=steps, loss=2.62)
    run.event("warning", message=f"3 rows are longer than 2048 tokens {hostile}", step=1)
    run.event("end", state=state, step=steps)
    run.adapter_path.mkdir()
    run.write_summary(
        {
            "state": state,
            "steps": steps,
            "seconds": {"total": 95.0, "training": 80.0},
            "tokens": 2048 * steps,
            "loss_first": 3.29,
            "loss_last": 2.61,
            "evaluation_before": 3.31,
            "evaluation_after": 2.62,
            "estimate": {
                "peak_allocated_bytes": 725 * MIB,
                "terms": [{"name": n, "bytes": b * MIB, "formula": "x"} for n, b in TERMS.items()],
                "seconds": 70.0,
            },
            "measured": {
                "peak_allocated_bytes": 740 * MIB,
                "peak_phase": "backward",
                "terms": {**{n: b * MIB for n, b in TERMS.items()}, "activations": 325 * MIB},
                "peak_resident_bytes": 1900 * MIB,
                "training_seconds": 80.0,
                "tokens_per_second_per_gpu": 1024.0,
                "mfu": None,
            },
            "samples": [
                {
                    "prompt": f"def add(a, b):\n    return a + b {hostile}",
                    "reference": f"Add two numbers. {hostile}",
                    "before": f"Sure! This function is called add and it adds. {hostile}",
                    "after": f"Return the sum of a and b. {hostile}",
                }
            ],
            "device": "cpu",
        }
    )
    run.status(state, hostile)
    run.release()
    return run
