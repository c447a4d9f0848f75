"""Does a step cost twice as much for twice the tokens, or twice the layers? `python benchmarks/linearity.py`.

LoRA steps of SmolLM2's shape with random weights, packed documents of 256 tokens, processor seconds of forward,
backward and update on one thread, the fastest of several. Writes measurements/linearity-DATE.json and the plot
docs/step-cost.svg: points, the least-squares line, and the largest distance from it as a share of the largest cost.
"""

# ruff: noqa: PLC0415

import argparse
import json
import os
import platform
import tempfile
import time
from datetime import date
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
HERE = Path(__file__).resolve().parent
DOCUMENT, LAYERS, TOKENS = 256, 12, 1024  # what stays the same while the other varies
CONFIG = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
}
RECIPE = """\
model: {folder}
data: none
method: lora
optimizer: {{learning_rate: 1e-4}}
training: {{max_steps: 9, global_batch_size: 1, micro_batch_size: 1, precision: {precision},
  activation_checkpointing: none}}
engine: single
"""


def engine(layers, precision, folder):
    """A live engine over random weights."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    from shardwise.recipe import parse_recipe
    from shardwise.training.build import build_engine
    from shardwise.training.engines.protocol import Ranks
    from shardwise.training.model import ModelFolder

    torch.manual_seed(0)
    config = LlamaConfig(**CONFIG, num_hidden_layers=layers)
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(folder)
    recipe = parse_recipe(RECIPE.format(folder=folder, precision=precision))
    return build_engine(recipe, ModelFolder(Path(folder), recipe), torch.device("cpu"), Ranks(), 1)


def step_seconds(live, tokens, repeats):
    """Processor seconds of one step, the fastest of `repeats`."""
    import numpy as np

    from shardwise.training.batches import pack_documents

    draw = np.random.default_rng(0)
    documents = []
    for length in [DOCUMENT] * (tokens // DOCUMENT):
        ids = draw.integers(5, 40000, length).astype(np.int32)
        documents.append((ids, ids))
    batch = pack_documents(documents)
    best = float("inf")
    for _ in range(repeats):
        began = time.process_time()
        live.backward(live.forward(batch), 1.0 / batch.trained_tokens, True)
        live.step(1e-4, 1.0)
        best = min(best, time.process_time() - began)
    return best


def line(points):
    """(slope, height at 0, largest distance from the line as a share of the largest value)."""
    n = len(points)
    mx, my = sum(x for x, _ in points) / n, sum(y for _, y in points) / n
    slope = sum((x - mx) * (y - my) for x, y in points) / sum((x - mx) ** 2 for x, _ in points)
    base = my - slope * mx
    off = max(abs(y - base - slope * x) for x, y in points) / max(y for _, y in points)
    return slope, base, off


def panel(points, left, title, unit):
    """One plot of 320 by 240 as SVG."""
    slope, base, off = line(points)
    top, high = max(x for x, _ in points), max(y for _, y in points) * 1.08

    def at(x, y):
        return left + 50 + 250 * x / top, 210 - 170 * y / high

    dots = "".join(f'<circle cx="{at(x, y)[0]:.1f}" cy="{at(x, y)[1]:.1f}" r="3.5"/>' for x, y in points)
    (x0, y0), (x1, y1) = at(0, base), at(top, base + slope * top)
    ticks = "".join(
        f'<text x="{at(x, 0)[0]:.1f}" y="226" text-anchor="middle">{x:,}</text>' for x, _ in points
    )
    ticks += "".join(
        f'<text x="{left + 46}" y="{at(0, high * k / 4)[1] + 3:.1f}" text-anchor="end">{high * k / 4:.1f}</text>'
        for k in range(5)
    )
    return (
        f'<text x="{left + 175}" y="20" text-anchor="middle" font-size="13">{title}</text>'
        f'<path d="M{left + 50} 40V210H{left + 300}" fill="none" stroke="#888"/>'
        f'<path d="M{x0:.1f} {y0:.1f}L{x1:.1f} {y1:.1f}" stroke="#2563eb" fill="none"/>'
        f'<g fill="#2563eb">{dots}</g>{ticks}'
        f'<text x="{left + 175}" y="242" text-anchor="middle">{unit}; within {100 * off:.1f} % of the line</text>'
    )


def svg(by_tokens, by_layers):
    """Both panels."""
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" width="680" height="256" viewBox="0 0 680 256" '
        'font-family="sans-serif" font-size="10" fill="#444"><rect width="680" height="256" fill="#fff"/>'
        + panel(by_tokens, 0, "processor seconds of a step by tokens", f"tokens, {LAYERS} layers")
        + panel(by_layers, 340, "processor seconds of a step by layers", f"layers, {TOKENS:,} tokens")
        + "</svg>\n"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--precision", default="bf16", choices=["bf16", "fp32"])
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--out", type=Path, default=HERE.parent / "measurements")
    parser.add_argument("--plot", type=Path, default=HERE.parent / "docs" / "step-cost.svg")
    args = parser.parse_args()
    import torch

    by_tokens, by_layers = [], []
    for layers in (6, LAYERS, 18, 24, 30):
        with tempfile.TemporaryDirectory() as folder:
            live = engine(layers, args.precision, folder)
        by_layers.append((layers, step_seconds(live, TOKENS, args.repeats)))
        if layers == LAYERS:
            sizes = (256, 512, 1024, 1536, 2048, 3072)
            by_tokens = [(tokens, step_seconds(live, tokens, args.repeats)) for tokens in sizes]
    args.plot.write_text(svg(by_tokens, by_layers), encoding="utf-8")
    result = {
        "kind": "linearity",
        "date": date.today().isoformat(),
        "platform": platform.platform(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "precision": args.precision,
        "load": os.getloadavg()[0],
        "seconds_by_tokens": by_tokens,
        "seconds_by_layers": by_layers,
        "off_the_line_tokens": line(by_tokens)[2],
        "off_the_line_layers": line(by_layers)[2],
    }
    args.out.mkdir(exist_ok=True)
    (args.out / f"linearity-{result['date']}.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
