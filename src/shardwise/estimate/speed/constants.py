"""The constants of the world that speed depends on. Few, physical, none per model or per source of measurements.

Each was set from public kernel benchmarks and then checked against the measured runs (`shardwise accuracy`).
"""

# Share of the vendor's matrix peak that large bf16 matrix products sustain in a long run, by architecture.
# Power limits and clocks decide it: an H100 SXM holds 600 to 700 of its 989 TFLOP/s, an A100 250 to 270 of 312.
SUSTAINED = {
    "7.0": 0.60,
    "7.5": 0.45,
    "8.0": 0.80,
    "8.6": 0.80,
    "8.9": 0.85,
    "9.0": 0.66,
    "10.0": 0.66,
    "10.3": 0.66,
    "12.0": 0.80,
    "gfx942": 0.45,
    "gfx950": 0.45,
    "cpu": 0.60,
    "mps": 0.55,
}
# FlashAttention-2 against the same peak, forward and backward (Dao 2023, arXiv 2307.08691, figures 4 and 5).
ATTENTION_FORWARD, ATTENTION_BACKWARD = 0.62, 0.50
# On Hopper and later the same kernel reaches less of a larger peak (arXiv 2407.08608, figure 5: 350 to 400 TFLOP/s).
ATTENTION_NEWER = 0.62
BANDWIDTH = 0.80  # share of DRAM bandwidth that element-wise kernels reach
TILE = 128  # rows of a matrix product that are computed together
OP_SECONDS = 7e-6  # time a host needs to issue one operation in eager PyTorch, forward or backward
OPS_PER_LAYER = 45  # operations of one eager decoder layer's forward; its backward issues twice as many
OPS_PER_ADAPTER = 8  # of one LoRA matrix's forward
OPS_PER_DEQUANTISED = 3
OPS_PER_EXPERT = 9  # a looped expert's forward
COMPILED_OPS = 0.3  # share of these that remain in a compiled layer
NVLINK, PCIE, NETWORK = 0.75, 0.70, 0.80  # share of a link's rate that NCCL's large messages reach
# Cards without peer-to-peer access (GeForce since 2020): every byte crosses the host's memory twice.
NO_PEER = 0.40
HOP_SECONDS = 3e-6  # added per rank of a ring
COLLECTIVE_SECONDS = 25e-6  # start of one collective
CONTENTION = 0.06  # slowdown of compute while collectives run beside it
DEQUANTISE_BANDWIDTH = 0.55  # of DRAM bandwidth, nf4 to bf16 with double quantisation
HOST_ADAM_BYTES = 32  # host memory traffic of Adam per element: reads w, g, m, v; writes w, m, v; bf16 copies
HOST_SHARE = 0.55  # share of DRAM bandwidth that a vectorised Adam on the host reaches
