"""How a trainer's code spends memory beyond what a recipe says: its loss, its dtypes, what it leaves alive.

Our own step is `OURS`. The others describe programs whose measured runs the estimates are scored against; each
difference is something their source does, never a number fitted to their measurements.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Trainer:
    """Knobs of a training program.

    loss
      fused: gradients of a chunk of logits formed in the forward (ours, Liger); `full`: one fp32 copy and its
      log-softmax; `checkpointed`: chunks whose logits are recomputed in the backward; `split`: all logits in
      compute dtype, cross-entropy chunk by chunk (torchtune, litgpt).
    loss_bytes
      bytes per element in which `split` computes its cross-entropy.
    keeps_logits
      the compute-dtype logits stay alive through the backward (the output object of transformers).
    picks_logits
      labelled rows of the logits are copied out before the loss.
    adapter_bytes
      bytes per adapter element: 2 in the base's dtype, 4 as PEFT casts them by default.
    fp32_leftovers
      `prepare_model_for_kbit_training`: embeddings, head and norms in fp32, and with them the residual stream.
    norm
      upcast: written out in fp32 as transformers does; fused: one kernel that keeps its input and 1/rms.
    state_bytes
      bytes of each of Adam's two states per element; None: 4.
    whole_step
      the optimizer updates all parameters at once, so that foreach temporaries are as large as all of them.
    gradients_alive
      gradients of the step before are still there in the next forward (accumulation, or zeroing in place).
    input_gradients
      the embedding's output needs a gradient although nothing before it is trained (re-entrant checkpointing).
    bucket_logits
      logits (elements) of one chunk of the loss.
    """

    name: str = "shardwise"
    loss: Literal["fused", "full", "checkpointed", "split"] = "fused"
    keeps_logits: bool = False
    picks_logits: bool = False
    loss_bytes: int = 4
    adapter_bytes: int | None = None
    fp32_leftovers: bool = False
    autocast: bool = False
    weight_bytes: int | None = None
    norm: Literal["upcast", "fused"] = "upcast"
    state_bytes: int = 4
    masters: bool = True
    whole_step: bool = False
    gradients_alive: bool = False
    input_gradients: bool = False
    bucket_logits: int = 2**25
    splits_documents: bool = False


OURS = Trainer(splits_documents=True)
OURS_FULL_LOSS = Trainer(splits_documents=True, loss="full", picks_logits=True)
