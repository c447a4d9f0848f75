"""Routed experts on paper; symbols as in `block`."""

from typing import TYPE_CHECKING

from shardwise.estimate.memory.paper import Paper

if TYPE_CHECKING:
    from shardwise.estimate.memory.block import Forward


def _visits(forward: "Forward", x: Paper, rows: int, name: str, loops: int) -> Paper:
    """`rows` visits of tokens to experts: their weighted results."""
    sheet, b, c = forward.sheet, forward.block, forward.w.compute
    if (
        b.attention_out.quantised and forward.trainer.quantised_experts
    ):  # 4-bit layers return the dtype they get
        c = max(c, x.bytes // (forward.tokens * b.hidden))
    weights = [(name, b.expert_parameters * forward.w.weight // loops)] if b.trained else []
    inputs = sheet.op(rows * b.hidden * c, [x])
    gate_up = sheet.op(
        rows * 2 * b.expert_width * c, [inputs], [inputs] if b.trained else [], weights=weights
    )
    sheet.drop(inputs)
    act = sheet.op(rows * b.expert_width * c, [gate_up], [gate_up])
    product = sheet.op(rows * b.expert_width * c, [act, gate_up], [act, gate_up])
    sheet.drop(act, gate_up)
    down = sheet.op(rows * b.hidden * c, [product], [product] if b.trained else [])
    sheet.drop(product)
    weighted = sheet.op(down.bytes, [down], [down])
    sheet.drop(down)
    return weighted


def _in_turn(forward: "Forward", x: Paper, rows: int) -> Paper:
    """One expert after the other adds its rows to the sum, in place: what lives for a moment is one expert's.

    More than 16 are played as 16.
    """
    sheet = forward.sheet
    loops = min(forward.block.experts, 16)
    summed = sheet.new(x.bytes)
    parts = []
    for i in range(loops):
        weighted = _visits(forward, x, -(-rows // loops), f"{forward.layer_name}experts{i}", loops)
        parts.append(sheet.op(0, [weighted]))
        sheet.drop(weighted)
    sheet.drop(summed)
    out = sheet.op(x.bytes, parts)
    sheet.drop(*parts)
    return out


def experts(forward: "Forward", x: Paper) -> Paper:
    """Routed experts: every token is copied once per expert it visits; each visit passes a gated MLP."""
    sheet, b = forward.sheet, forward.block
    sheet.place = "experts"
    rows = forward.tokens * b.experts_per_token
    sheet.flash(forward.tokens * b.experts * 4)  # router probabilities
    if forward.trainer.looped_experts:
        out = _in_turn(forward, x, rows)
    else:
        weighted = _visits(forward, x, rows, f"{forward.layer_name}experts", 1)
        out = sheet.op(x.bytes, [weighted])
        sheet.drop(weighted)
    if b.mlp_out is not None:  # shared experts
        gate = forward.linear(x, b.mlp_in[0])
        width = forward.tokens * b.mlp_out.inputs * forward.w.compute
        act = sheet.op(width, [gate], [gate])
        up = forward.linear(x, b.mlp_in[1]) if len(b.mlp_in) > 1 else gate
        product = sheet.op(width, [act, up], [act, up])
        if up is not gate:
            sheet.drop(gate)
        sheet.drop(act, up)
        shared = forward.linear(product, b.mlp_out)
        sheet.drop(product)
        total = sheet.op(out.bytes, [out, shared], alias=True)
        sheet.drop(out, shared)
        out = total
    return out
