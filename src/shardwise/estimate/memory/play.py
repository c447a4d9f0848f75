"""One training step on paper: forward, loss, backward, update, with what an engine adds around each layer.

Of layers that are alike only four are played (two at each end); the ones between are like the second, so what they
keep is added at once, and the moments in between lie on a straight line between those that are played. Layers are
alike when they are all recomputed or none is: where a recipe asks for a number of layers, there are two such groups.
"""

from dataclasses import dataclass

from shardwise.estimate.memory.around import NOTHING, Around
from shardwise.estimate.memory.block import Forward
from shardwise.estimate.memory.layer import Block, Widths
from shardwise.estimate.memory.paper import Paper, Sheet
from shardwise.estimate.memory.reduction import Reducer
from shardwise.estimate.memory.trainer import Trainer
from shardwise.estimate.stack import Checkpointing


@dataclass(frozen=True, slots=True)
class Question:
    """Everything the dynamic part of a step's memory depends on."""

    block: Block
    layers: int
    vocabulary: int
    tied: bool
    tokens: int
    labelled: int  # of them with a label: only these reach the head where the loss is fused
    sequence: int
    widths: Widths
    trainer: Trainer
    checkpointing: Checkpointing
    attention: str
    on_cpu: bool
    hook_takes_gradients: bool
    kept_gradients: int
    around: Around = NOTHING
    softcap: bool = False
    quantised_head: bool = False
    every_layer: bool = False  # play all layers, for a replay of every single allocation


@dataclass
class _Segment:
    """A layer that was played: where its nodes begin, its input and output.

    skipped: how many like it come after it and are not played; between: what one of these keeps, by term.
    """

    name: str
    recomputed: bool
    skipped: int
    start: int
    entry: Paper
    exit: Paper
    between: dict[str, int]


def play(q: Question, sheet: Sheet | None = None) -> Sheet:
    """The sheet after forward, loss and backward; the step is added by the caller, who knows the states."""
    sheet = sheet or Sheet()
    forward, around = open_sheet(sheet, q), q.around
    sheet.drop_weight_gradients = q.hook_takes_gradients
    if q.kept_gradients and around.shard is None:
        sheet.gradients = dict.fromkeys(_weight_names(q), 0)
    if q.trainer.outlived_inputs:
        sheet.add(_outlived(q), "loss")
    rotary = sheet.new(2 * q.tokens * q.block.head_dim * q.widths.compute)
    trained = q.block.trained
    size = q.tokens * q.block.hidden * q.widths.residual
    table = q.vocabulary * q.block.hidden * q.widths.weight
    embedded = sheet.op(size, [], weights=[("embedding", table)] if trained else [])
    embedded.needs_grad = trained or q.trainer.input_gradients
    reducer = None if around.buckets is None else Reducer(around.buckets)
    sheet.take = None if reducer is None else reducer.take
    embedded.refs += 1  # a variable of the model's forward, until the last norm
    segments = layers_forward(sheet, forward, q, embedded)
    logits = _loss(sheet, forward, q, segments[-1].exit, embedded)
    sheet.add(around.bucket, "engine")
    _layers_backward(sheet, forward, q, segments, reducer)
    sheet.drop(rotary)
    if reducer is not None:
        if trained:
            sheet.add(table, "temporaries")
            if q.tied:  # the head's gradient waited for this one
                sheet.remove(table, "temporaries")
            sheet.ready.append(table)
        if embedded.grad is not None:
            sheet.drop(embedded.grad)
            embedded.grad = None
        sheet.hand_over()
        reducer.finish(sheet)
    elif trained:
        sheet.flash(table, "gradients" if not q.hook_takes_gradients else "temporaries")
        if not (q.hook_takes_gradients or q.kept_gradients or q.tied) or around.root_reduced:
            sheet.add(0 if q.tied else table, "gradients")
    if embedded.grad is not None:
        sheet.drop(embedded.grad)
    if around.shard is not None:
        _reduce_root(sheet, q)
    sheet.remove(around.bucket + around.live, "engine")
    if logits is not None:
        sheet.drop(logits)
    return sheet


def open_sheet(sheet: Sheet, q: Question) -> Forward:
    """What an engine holds around the layers, and a micro-batch's inputs."""
    around = q.around
    sheet.add(around.constant + around.root + around.live, "engine")
    sheet.add(around.root if around.gathered else 0, "engine")  # the buffer the root was gathered into
    sheet.add(32 * q.tokens, "inputs")  # ids, positions, labels, indices: 4 x int64
    return Forward(sheet, q.block, q.trainer, q.widths, q.tokens, q.attention, q.sequence, q.on_cpu,
                   around.hooked)  # fmt: skip


def _reduce_root(sheet: Sheet, q: Question) -> None:
    """The gradients of embedding, head and last norm are reduced after all layers', their weights let go before."""
    around = q.around
    assert around.shard is not None
    whole = sheet.terms["gradients"] - (0 if q.kept_gradients else around.shard * q.layers)
    sheet.remove(around.root, "engine")
    sheet.remove(around.reduced, "engine")
    sheet.add(around.root_reduced, "engine")
    sheet.remove(whole, "gradients")
    sheet.add(around.root_shard, "gradients")
    if q.kept_gradients:
        sheet.remove(around.root_shard, "gradients")
    sheet.remove(around.root_reduced, "engine")
    sheet.add(around.root, "engine")


def _played(q: Question) -> list[tuple[str, bool, int]]:
    """Layers that are played: (name, whether it is recomputed, how many after it are not played).

    Of each group of layers that are alike two at each end, or all where there are no more.
    """
    recomputed = (
        q.checkpointing if isinstance(q.checkpointing, int) else q.layers * (q.checkpointing != "none")
    )
    found: list[tuple[str, bool, int]] = []
    for first, end, again in ((0, recomputed, True), (recomputed, q.layers, False)):
        count = end - first
        if count <= 4 or q.every_layer:
            found += [(f"{i}.", again, 0) for i in range(first, end)]
        else:
            shown = ((first, 0), (first + 1, count - 4), (end - 2, 0), (end - 1, 0))
            found += [(f"{i}.", again, skipped) for i, skipped in shown]
    return found


def _four_bit_inputs(q: Question) -> int:
    """Bytes of the inputs of one layer's 4-bit products; q, k and v share theirs, and so do gate and up."""
    b = q.block
    if not any(m.quantised for m in b.attention_in):
        return 0
    mlp = b.mlp_out.inputs if b.mlp_out is not None else 0
    norms = 1 if b.parallel and b.norms == 1 else 2
    return q.tokens * (norms * b.hidden + b.attention_out.inputs + mlp) * q.widths.compute


def _outlived(q: Question) -> int:
    """Bytes of the step before that live until this one's logits are there: its logits, and what 4-bit products
    keep of their inputs outside autograd's books."""
    kept = _four_bit_inputs(q) * q.layers if q.trainer.quantised_inputs else 0
    return kept + q.tokens * q.vocabulary * (q.trainer.logits_bytes or q.widths.compute)


def _weight_names(q: Question) -> list[str]:
    """Every parameter gradient that will come up, so that it is added to instead of made."""
    b = q.block
    names = ["embedding", "head", "norm"]
    for layer, _, _ in _played(q):
        for m in (*b.attention_in, b.attention_out, *b.mlp_in, *((b.mlp_out,) if b.mlp_out else ())):
            names += [layer + m.name, f"{layer}{m.name}.A", f"{layer}{m.name}.B"]
        names += [layer + n for n in ("norm1", "norm2", "norm1b", "norm2b", "q_norm", "k_norm", "experts")]
        names += [f"{layer}experts{i}" for i in range(16)] if q.trainer.looped_experts else []
    return names


def layers_forward(sheet: Sheet, forward: Forward, q: Question, h: Paper) -> list[_Segment]:
    """Play the layers that are played; add what the ones between keep."""
    segments: list[_Segment] = []
    around, buffer = q.around, q.around.root if q.around.gathered else 0
    for name, recomputed, skipped in _played(q):
        before = dict(sheet.terms)
        sheet.add(
            around.gathered, "engine"
        )  # the buffer of this layer's gather; the one before goes after the copy
        sheet.add(around.gathered, "engine")
        sheet.remove(buffer, "engine")
        buffer = around.gathered
        segment = _Segment(name, recomputed, skipped, len(sheet.nodes), h, h, {})
        if not recomputed:
            out = forward.layer(h, name)
            sheet.drop(h)
        else:  # only the layer's input is kept
            sheet.grad_enabled = False
            out = forward.layer(h, name)
            sheet.grad_enabled = True
            out.needs_grad = True
            if q.checkpointing == "selective":  # and what attention kept: its inputs are made again, not it
                sheet.add(forward.kept_when_selective(), "activations")
            sheet.add(_four_bit_inputs(q) if q.trainer.unhooked_inputs else 0, "activations")
            if q.trainer.offloads_activations:
                sheet.remove(segment.entry.bytes, segment.entry.term)
        segment.exit = h = out
        segments.append(segment)
        if not around.kept:
            sheet.remove(around.gathered, "engine")
        if skipped:
            segment.between = {t: v - before[t] for t, v in sheet.terms.items() if v != before[t]}
            for term, size in segment.between.items():
                sheet.add(size * skipped, term)
    return segments  # the last gather's buffer is let go after the loss


def _layers_backward(
    sheet: Sheet, forward: Forward, q: Question, segments: list[_Segment], reducer: Reducer | None
) -> None:
    """The layers in reverse; those that were not played are taken away before the one they are like."""
    around = q.around
    reduced = per_layer = 0
    outlived: list[Paper] = []
    for index, segment in enumerate(reversed(segments)):
        skipped = segment.skipped
        if reducer is not None and not skipped and index:
            reducer.moments.clear()
        before = sheet.terms["gradients"]
        if skipped:
            if reducer is not None:
                reducer.skip(sheet, skipped, segment.between)
            for term, size in segment.between.items():
                sheet.remove(size * skipped, term)
            sheet.add(per_layer * skipped, "gradients")
            if q.trainer.outlived_recomputation and segment.recomputed:
                outlived.append(sheet.new(2 * segment.entry.bytes * skipped, "activations"))
        if not around.kept:  # copied out of the buffer it was gathered into, then the next one is gathered
            sheet.add(around.gathered, "engine")
            sheet.remove(around.gathered, "engine")
            sheet.add(around.gathered if index < len(segments) - 1 else 0, "engine")
        if segment.recomputed:
            outlived += _recompute(sheet, forward, q, segment)
        else:
            sheet.backward(segment.exit, segment.start)
        sheet.flash(around.reducing, "engine")
        sheet.remove(around.gathered, "engine")
        if around.shard is not None:
            made = sheet.terms["gradients"] - before - per_layer * skipped
            sheet.remove(reduced, "engine")  # the layer before has been reduced by now
            sheet.add(around.reduced, "engine")
            reduced = around.reduced
            sheet.remove(made, "gradients")
            sheet.add(around.shard, "gradients")
            sheet.remove(around.shard if q.kept_gradients else 0, "gradients")
        per_layer = 0 if reducer is not None else sheet.terms["gradients"] - before - per_layer * skipped
    sheet.drop(*outlived)
    if around.shard is None:
        sheet.remove(reduced, "engine")


def _recompute(sheet: Sheet, forward: Forward, q: Question, segment: _Segment) -> list[Paper]:
    """Run a checkpointed layer again, now keeping everything, and then its backward.

    Returns what lives until the end of the backward.
    """
    start, entry = len(sheet.nodes), segment.entry
    if q.trainer.offloads_activations:
        sheet.add(entry.bytes, entry.term)
    needed, entry.needs_grad = entry.needs_grad, True
    grad, segment.exit.grad = segment.exit.grad, None
    if q.checkpointing == "selective":
        sheet.remove(forward.kept_when_selective(), "activations")
    sheet.remove(_four_bit_inputs(q) if q.trainer.unhooked_inputs else 0, "activations")
    out = forward.layer(entry, segment.name)
    out.grad = grad
    sheet.drop(out)
    sheet.backward(out, start)
    entry.needs_grad = needed
    outlived = []
    if q.trainer.outlived_recomputation and entry.grad is not None:
        outlived = [entry, entry.grad]
        for tensor in outlived:
            tensor.refs += 1
    if not needed and entry.grad is not None:
        sheet.drop(entry.grad)
        entry.grad = None
    sheet.drop(entry)
    return outlived


def _loss(sheet: Sheet, forward: Forward, q: Question, h: Paper, embedded: Paper) -> Paper | None:
    """Final norm, head and loss, and their backward down to the last layer's output.

    Returns logits that somebody keeps alive through the backward.
    """
    start = len(sheet.nodes)
    forward.layer_name = ""
    x = forward.norm(h, q.block.hidden, q.tokens, "norm")
    sheet.drop(h, embedded)
    sheet.term, sheet.place = "loss", "loss"
    sheet.enter("loss")
    sheet.add(2 * q.around.head, "engine")  # and the buffer it was gathered into
    kept = _head(sheet, q, x, start)
    sheet.remove(2 * q.around.head, "engine")
    sheet.term, sheet.place = "activations", ""
    return kept


def _begin_backward(sheet: Sheet, q: Question) -> None:
    """The last layer's buffer goes with the end of the forward; where layers are gathered again, that of the last
    layer comes back at once."""
    if q.around.kept:
        sheet.remove(q.around.gathered, "engine")
    sheet.enter("backward")


def _head(sheet: Sheet, q: Question, x: Paper, start: int) -> Paper | None:
    tokens, v, c = q.tokens, q.vocabulary, q.widths.compute
    trained = q.block.trained
    table = v * q.block.hidden
    name = "embedding" if q.tied else "head"
    weights = [(name, table * q.widths.weight)] if trained else []
    kept: Paper | None = None
    dequantised = table * c * (2 if q.trainer.dequantised_twice else 1) if q.quantised_head else 0
    labelled = q.labelled if q.trainer.loss == "fused" else tokens
    chunk = q.trainer.loss_tokens(labelled, v, q.on_cpu) * v
    if q.trainer.loss == "fused":
        picked = sheet.op(labelled * q.block.hidden * c, [x])
        grad = sheet.new(picked.bytes, "loss")
        summed = sheet.new(4 * table if trained else 0, "loss")
        # Two buffers of a chunk, made once: logits as the product gives them, and in fp32. A softcap's slope comes on
        # top, and for a moment a square; and the gradient of the weights.
        buffers, cap = chunk * (c + 4 if c < 4 else 4), chunk * 4 if q.softcap else 0
        sheet.flash(buffers + cap + max(cap, table * c if trained else 0), "loss")
        root = sheet.op(4, [picked])
        sheet.drop(picked, x)
        _begin_backward(sheet, q)
        if c == 4:
            sheet.drop(summed)  # the sum is the gradient
        if trained and sheet.take is not None and q.tied:
            sheet.add(table * q.widths.weight, "temporaries")  # complete when the embedding's is
        elif trained:
            sheet.weight_gradient(name, table * q.widths.weight)
        if c < 4:
            sheet.drop(summed)
        sheet.hand_over()
        sheet.drop(grad, root)  # the gradient of `picked` is this one, scaled in place
    elif q.trainer.loss == "kernel":
        logits = sheet.op(tokens * v * c, [x], [x] if trained else [], weights=weights)
        sheet.drop(x)
        wide = sheet.op(tokens * v * 4, [logits])
        sheet.drop(logits)
        shifted = sheet.op(tokens * v * 4, [wide])
        sheet.drop(wide)
        _begin_backward(sheet, q)
        shifted.grad = shifted  # the kernel wrote the gradient over its input
        sheet.backward(shifted, start)
        return None
    elif q.trainer.loss == "split":  # the head and the loss run chunk by chunk, everything stays until then
        logits = sheet.new(tokens * v * (q.trainer.logits_bytes or c), "loss")
        sheet.flash(dequantised, "loss")
        if q.trainer.outlived_inputs:  # the new logits take the place of the old ones now
            sheet.remove(_outlived(q), "loss")
        saved = sheet.new(tokens * v * q.trainer.loss_bytes, "loss")
        scratch = chunk * (2 * q.trainer.loss_bytes + c) + dequantised
        root = sheet.op(4, [x], [x, logits, saved], weights=weights, backward_scratch=scratch)
        sheet.drop(x, saved)
        if q.trainer.keeps_logits:
            kept = logits
        else:
            sheet.drop(logits)
        _begin_backward(sheet, q)
        sheet.drop(root)
    elif q.trainer.loss == "full":
        logits = sheet.op(tokens * v * c, [x], [x] if trained else [], weights=weights)
        sheet.drop(x)
        held: list[Paper] = []  # variables of our forward until its end
        if q.trainer.picks_logits:
            picked = sheet.op(q.labelled * v * c, [logits])
            if q.trainer.kernels:
                held = [logits, picked]
                picked.refs += 1
            else:
                sheet.drop(logits)
            logits = picked
        width = max(c, q.trainer.loss_bytes)
        rows = logits.bytes // c
        wide = logits if c == width else sheet.op(rows * width, [logits])
        if q.trainer.keeps_logits:
            kept = wide if q.trainer.logits_bytes == width else logits
            kept.refs += 1
        if wide is not logits and not held:
            sheet.drop(logits)
        probabilities = sheet.op(rows * width, [wide], save_output=True)
        sheet.drop(wide)
        if wide is not logits and held:
            sheet.drop(logits)
        sheet.drop(*held)
        root = sheet.op(4, [probabilities])
        sheet.drop(probabilities)
        _begin_backward(sheet, q)
        sheet.drop(root)
    else:  # checkpointed chunks: logits are made twice, a chunk at a time
        scratch = chunk * (c + 12)
        root = sheet.op(4, [x], [x], weights=weights, scratch=chunk * (c + 8), backward_scratch=scratch)
        sheet.drop(x)
        _begin_backward(sheet, q)
        sheet.drop(root)
    root.grad = sheet.new(4, "temporaries")
    sheet.backward(root, start)
    return kept
