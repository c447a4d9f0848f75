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
      compute dtype, cross-entropy chunk by chunk (torchtune, litgpt); `kernel`: one kernel on all logits
      that writes their gradient over them.
    loss_bytes
      bytes per element in which `split` computes its cross-entropy.
    logits_bytes
      bytes per element of the logits handed to `split` or `full`; None: compute dtype (Fabric casts outputs up).
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
    looped_experts
      experts run one after the other, each a module of its own (transformers before 5).
    quantised_experts
      expert matrices are quantised too, as they were when each was a linear layer of its own.
    quantised_bytes
      bytes per quantised element; None: NF4 as bitsandbytes stores it.
    quantised_inputs
      4-bit products keep their input (bitsandbytes before 0.43).
    unhooked_inputs
      they keep it as an attribute, so that a checkpoint that is not re-entrant does not see it and the inputs of all
      layers stay.
    quantised_head
      the output matrix is in 4 bits too.
    outlived_recomputation
      inputs of checkpointed layers and their gradients live until the end of the backward: FSDP1 hooks a unit without
      trained parameters to the gradient of its input, and where re-entrant checkpointing made that input a leaf, the
      hook holds it, until all hooks are removed (torch/distributed/fsdp/_runtime_utils.py,
      `_register_post_backward_reshard_only_hook` and `_finalize_params`; torch/autograd/graph.py,
      `register_multi_grad_hook`).
    dequantised_twice
      a 4-bit matrix is made whole in fp16 and then cast to bf16, so that two copies live for a moment.
    outlived_inputs
      the step before's logits, and through them its graph, live until the next forward has ended; of the graph
      only what autograd does not free is left: the inputs of 4-bit products (see `quantised_inputs`).
    padded_qkv
      an adapter on part of a fused q-k-v is copied into zeros of full width, and its result kept for that.
    fused_qkv
      q, k and v come out of one product and v stays a view of all of it.
    expands_groups
      keys and values are copied for every query head before attention.
    adapter_dropout
      adapters see a dropped-out copy of their input, and keep its mask.
    flat_gradients
      FSDP1 keeps one gradient per unit: whole until it is reduced, after the last of several micro-batches (no_sync).
      "whole": also of frozen elements that share a unit with trained ones (use_orig_params).
    trained_embeddings
      embedding and head are trained beside adapters, in copies of their own (modules_to_save of PEFT).
    root_units
      embedding and head are FSDP units of their own, gathered only while they run.
    sharded_scales
      FSDP splits the scales of 4-bit matrices too (NF4 tensors of torchao); bitsandbytes keeps them outside.
    paged_states
      optimizer states are in managed memory, which is neither allocated nor reserved by torch.
    fused_optimizer
      one kernel updates in place, without temporaries.
    gradient_buckets
      DistributedDataParallel copies gradients into buckets (gradient_as_bucket_view off).
    gradient_bytes
      bytes per element in which gradients are kept and added up; None: as our engines do.
    whole_buckets
      DeepSpeed's reduction buffers, two of `reduce_bucket_size` elements, however little is trained.
    loads
      weights alive at once while loading and sharding, over the whole model's; 0: never whole on a device.
    unties
      the output matrix is a tensor of its own even where the model ties it to the embedding.
    selective_products
      selective checkpointing also keeps every second matrix product.
    compiled
      torch.compile of every layer: norms are one kernel, activation functions are made again.
    offloads_activations
      inputs of checkpointed layers wait in host memory.
    kernels
      our own autograd functions (training/kernels): norms keep their input, adapters nothing twice, a gated
      MLP gate and up only, attention on the CPU neither output nor probabilities.
    bucket_logits, chunk_tokens, chunks (of bucket_logits a quarter on CPUs)
      size of one chunk of the loss: logits (elements), or tokens, or a share of all tokens; the first not 0.
    """

    name: str = "shardwise"
    loss: Literal["fused", "full", "checkpointed", "split", "kernel"] = "fused"
    keeps_logits: bool = False
    picks_logits: bool = False
    loss_bytes: int = 4
    logits_bytes: int | None = None
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
    chunk_tokens: int = 0
    chunks: int = 0
    splits_documents: bool = False
    looped_experts: bool = False
    quantised_experts: bool = False
    quantised_bytes: float | None = None
    quantised_inputs: bool = False
    unhooked_inputs: bool = False
    quantised_head: bool = False
    outlived_recomputation: bool = False
    dequantised_twice: bool = False
    outlived_inputs: bool = False
    padded_qkv: bool = False
    fused_qkv: bool = False
    expands_groups: bool = False
    adapter_dropout: bool = False
    flat_gradients: Literal["", "trained", "whole"] = ""
    trained_embeddings: bool = False
    root_units: bool = False
    sharded_scales: bool = False
    paged_states: bool = False
    fused_optimizer: bool = False
    gradient_buckets: bool = False
    gradient_bytes: int | None = None
    whole_buckets: bool = False
    loads: float = 1.0
    unties: bool = False
    selective_products: bool = False
    compiled: bool = False
    kernels: bool = False
    offloads_activations: bool = False

    def loss_tokens(self, tokens: int, vocabulary: int, on_cpu: bool = False) -> int:
        """Tokens whose logits go through the loss at a time."""
        if self.chunks:
            return -(-tokens // self.chunks)
        logits = self.bucket_logits // 4 if on_cpu else self.bucket_logits
        return min(tokens, self.chunk_tokens or max(16, logits // vocabulary))


OURS = Trainer(splits_documents=True, kernels=True)
OURS_FULL_LOSS = Trainer(splits_documents=True, kernels=True, loss="full", picks_logits=True)
