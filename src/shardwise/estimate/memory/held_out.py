"""An evaluation on paper: a batch of held-out rows, large as a micro-batch, through a forward that keeps nothing."""

from shardwise.estimate.memory.paper import Sheet
from shardwise.estimate.memory.play import Question, layers_forward, open_sheet


def play_evaluation(q: Question) -> Sheet:
    """The sheet of one batch. Nothing is recomputed: `q.checkpointing` is none."""
    sheet = Sheet()
    sheet.phase, sheet.grad_enabled = "evaluation", False
    forward = open_sheet(sheet, q)
    rotary = sheet.new(2 * q.tokens * q.block.head_dim * q.widths.compute)
    embedded = sheet.new(q.tokens * q.block.hidden * q.widths.residual)
    embedded.refs += 1
    segments = layers_forward(sheet, forward, q, embedded)
    last = segments[-1].exit
    forward.layer_name = ""
    x = forward.norm(last, q.block.hidden, q.tokens, "norm")
    sheet.drop(last, embedded)
    sheet.term = "loss"
    sheet.add(2 * q.around.head, "engine")
    c, v, labelled = q.widths.compute, q.vocabulary, q.labelled
    if q.trainer.loss == "fused":
        picked = sheet.new(labelled * q.block.hidden * c)
        sheet.flash(q.trainer.loss_tokens(labelled, v, q.on_cpu) * v * (c + 4 if c < 4 else 4), "loss")
        sheet.drop(picked)
    else:  # all logits, those with a label, in fp32, and their log-softmax
        logits = sheet.new(q.tokens * v * c)
        sheet.flash(labelled * v * ((c + 8) if c < 4 else 8), "loss")
        sheet.drop(logits)
    sheet.remove(2 * q.around.head, "engine")
    sheet.drop(x, rotary)
    return sheet
