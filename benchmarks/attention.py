"""How exact and how fast attention on processors is: `python benchmarks/attention.py --model FOLDER`.

A LoRA step over one sequence of Python's standard library gives the queries, keys, values and output gradients of
every layer in bf16. On some of these layers our matrix products, torch's scaled_dot_product_attention and attention
written out, as transformers' "eager" does it, are compared with fp64: the norm of the difference, of the output and
of each gradient, by the norm of the fp64 result. Then ours and torch's are timed in turn, forward and backward
together.
"""

# ruff: noqa: PLC0415

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

from rows import functions

Attention = Callable[..., Any]


def captured(model: Path, tokens: int) -> list[dict[str, Any]]:
    """query, key, value, scale and the output's gradient of every layer, first layer first."""
    import torch

    from shardwise.recipe import parse_recipe
    from shardwise.training import attention
    from shardwise.training.batches import pack
    from shardwise.training.build import build_engine
    from shardwise.training.engines.protocol import Ranks
    from shardwise.training.model import ModelFolder

    recipe = parse_recipe(
        f"model: {model}\ndata: none\nmethod: lora\noptimizer: {{learning_rate: 1e-4}}\nengine: single\n"
        "training: {max_steps: 1, micro_batch_size: 1, global_batch_size: 1, precision: bf16,\n"
        "  activation_checkpointing: none}\n"
    )
    source = ModelFolder(model, recipe)
    engine = build_engine(recipe, source, torch.device("cpu"), Ranks(), 1)
    found, ours = [], attention.document_products

    def recorder(query: Any, key: Any, value: Any, lengths: Any, scale: float) -> Any:
        out = ours(query, key, value, lengths, scale)
        layer = {"q": query.detach(), "k": key.detach(), "v": value.detach(), "scale": scale}
        out.register_hook(lambda grad: layer.update(grad=grad.clone()))
        found.append(layer)
        return out

    attention.document_products = recorder
    batch = pack(OneRow(model, tokens), ((0,),))
    engine.backward(engine.forward(batch), 1.0 / batch.trained_tokens, True)
    attention.document_products = ours
    return found


class OneRow:
    """Functions of the standard library, one after the other, as one document."""

    def __init__(self, model: Path, tokens: int) -> None:
        import numpy as np
        from transformers import AutoTokenizer

        ids = AutoTokenizer.from_pretrained(model)("\n\n".join(functions())[: 8 * tokens])["input_ids"]
        self.ids = np.array(ids[:tokens], np.int32)
        self.lengths = np.array([len(self.ids)])
        self.trained = self.lengths - 1
        self.sources = np.zeros(1, np.int64)

    def __len__(self) -> int:
        return 1

    def row(self, i: int) -> Any:
        return self.ids, self.ids

    def source(self, i: int) -> Any:
        return "standard library", 1


def ours(q: Any, k: Any, v: Any, scale: float) -> Any:
    from shardwise.training.kernels.attention import document_products

    return document_products(q, k, v, (q.shape[2],), scale)


def torchs(q: Any, k: Any, v: Any, scale: float) -> Any:
    from torch.nn.functional import scaled_dot_product_attention

    out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
    return out.transpose(1, 2).contiguous()


def written_out(q: Any, k: Any, v: Any, scale: float) -> Any:
    """Scores in the inputs' dtype, softmax in fp32 (in fp64 for the reference)."""
    import torch

    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    T, wide = q.shape[2], torch.promote_types(q.dtype, torch.float32)
    scores = q @ k.transpose(2, 3) * scale + torch.full((T, T), float("-inf"), dtype=q.dtype).triu(1)
    return (torch.softmax(scores, -1, dtype=wide).to(q.dtype) @ v).transpose(1, 2)


def passed(attention: Attention, layer: dict[str, Any], double: bool = False) -> list[Any]:
    """Output and gradients of q, k and v."""
    q, k, v, grad = (layer[n].double() if double else layer[n] for n in ("q", "k", "v", "grad"))
    inputs = [t.detach().requires_grad_() for t in (q, k, v)]
    out = attention(*inputs, layer["scale"])
    out.backward(grad)
    return [out.detach(), *(t.grad for t in inputs)]


def over(number: Callable[[Any], float], errors: list[list[float]]) -> dict[str, float]:
    """One number for those of all layers: of the output and of each gradient."""
    kinds = zip(*errors, strict=True)
    return dict(zip(("output", "grad_q", "grad_k", "grad_v"), map(number, kinds), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=6, help="how many, spread over the model")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()

    import torch

    layers = captured(args.model, args.tokens)
    some = layers[:: max(1, len(layers) // args.layers)]
    ways = {"ours": ours, "torch": torchs, "written out": written_out}
    errors: dict[str, list[list[float]]] = {name: [] for name in ways}
    for layer in some:
        wanted = passed(written_out, layer, double=True)
        for name, way in ways.items():
            off = zip(passed(way, layer), wanted, strict=True)
            errors[name].append([float((a.double() - b).norm() / b.norm()) for a, b in off])
    seconds: dict[str, list[float]] = {"ours": [], "torch": []}
    for layer in some * args.rounds:
        for name, found in seconds.items():
            began = time.perf_counter()
            passed(ways[name], layer)
            found.append(time.perf_counter() - began)
    ratios = [b / a for a, b in zip(seconds["ours"], seconds["torch"], strict=True)]
    result = {
        "kind": "attention",
        "date": date.today().isoformat(),
        "platform": platform.platform(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "model": args.model.name,
        "tokens": args.tokens,
        "layers": len(some),
        "off_from_fp64_median": {name: over(statistics.median, e) for name, e in errors.items()},
        "off_from_fp64_largest": {name: over(max, e) for name, e in errors.items()},
        "milliseconds_median": {name: 1e3 * statistics.median(s) for name, s in seconds.items()},
        "torch_by_ours_median_and_range": [statistics.median(ratios), min(ratios), max(ratios)],
    }
    print(json.dumps(result, indent=1))
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
