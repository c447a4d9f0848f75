"""The constants of the world that speed depends on. Few, physical, none per model or per source of measurements.

Each was set from public kernel benchmarks and then checked against the measured runs (`shardwise accuracy`).
"""

# FlashAttention-2 against the same peak, forward and backward (Dao 2023, arXiv 2307.08691, figures 4 and 5).
ATTENTION_FORWARD, ATTENTION_BACKWARD = 0.62, 0.50
# On Hopper and later the same kernel reaches less of a larger peak (arXiv 2407.08608, figure 5: 350 to 400 TFLOP/s).
ATTENTION_NEWER = 0.62
# Our matrix products on processors, forward and backward together, as in a step of SmolLM2 over 2,048 tokens.
ATTENTION_CPU = 0.95
ATTENTION_SMALL_HEAD = 0.8  # heads of 64 elements
# A bias on the scores (ALiBi) has no FlashAttention-2 kernel; Triton's takes about this much longer.
ATTENTION_BIASED = 1.8
BANDWIDTH = 0.80  # share of DRAM bandwidth that element-wise kernels reach
# Ada and Blackwell desktop chips have 64 to 128 MB of cache: chains of element-wise kernels partly stay in it.
CACHED = {"8.9": 1.5, "12.0": 1.5}
EAGER = 1.1  # element-wise kernels of an eager layer beside those counted: copies, casts, transposes, masks
SHORT_SUM = 200  # elements: what starting and ending a matrix product costs, as length of its inner sum
TILE = 128  # rows of a matrix product that are computed together
OP_SECONDS = 12e-6  # time a host needs to issue one operation in eager PyTorch, forward or backward
OPS_PER_LAYER = 45  # operations of one eager decoder layer's forward; its backward issues twice as many
OPS_PER_ADAPTER = 8  # of one LoRA matrix's forward
OPS_PER_DEQUANTISED = 3
OPS_PER_EXPERT = 16  # a looped expert's forward
# What engines add per micro-batch (see hooks.py): per FSDP unit and per tensor in it; per tensor ZeRO-3 gathers and
# pass; per trained tensor that ZeRO-1 and ZeRO-2 copy into a bucket.
OPS_PER_UNIT, OPS_PER_SHARD = 110, 10
OPS_PER_GATHERED = 16
OPS_PER_BUCKETED = 15
COMPILED_OPS = 0.3  # share of these that remain in a compiled layer
NVLINK, PCIE, NETWORK = 0.75, 0.70, 0.80  # share of a link's rate that NCCL's large messages reach
# Cards without peer-to-peer access (GeForce since 2020): every byte crosses the host's memory twice.
NO_PEER = 0.40
HOP_SECONDS = 3e-6  # added per rank of a ring
COLLECTIVE_SECONDS = 25e-6  # start of one collective
# Share of a collective's time that really disappears behind compute of the same length: the two compete for
# memory bandwidth and multiprocessors, and gathers wait for memory to be freed.
OVERLAP = 0.45
# nf4 with double quantisation to bf16, parameters per second: bound by instructions, alike on today's cards.
DEQUANTISED_PER_SECOND = 8e10
ADAPTER_BYTES = 8  # moved per element of an adapter's input and output in eager mode: reads, scaling, sum
ADAPTER_FP32_BYTES = 18  # the same where adapters are fp32 on a bf16 base: casts and fp32 copies beside
HOST_ADAM_BYTES = 32  # host memory traffic of Adam per element: reads w, g, m, v; writes w, m, v; bf16 copies
HOST_SHARE = 0.55  # share of DRAM bandwidth that a vectorised Adam on the host reaches
