"""paper_published.py: what the paper and the original program published, for paper.py. No figure of ours is in here.

The paper is arXiv 2303.06865; a comment names the place in it. The policies are those of its appendix A.4 and of the original
program's benchmarks; so are the throughputs for prompts of 256 tokens, which the paper does not print."""
from typing import NamedTuple

LENGTHS = 256, 512, 1024  # tokens of a prompt
OUTPUT = 32  # tokens for each prompt (section 6)
MODELS = "opt-6.7b", "opt-30b", "opt-175b"
ALL_GPU = "100 0 100 0 100 0"
CPU_ATTENTION, PACKED = "--cpu-cache-compute", "--compress-weight --compress-cache"


class Policy(NamedTuple):
    model: str
    s: int
    bits: int  # of what is packed; 16: nothing
    gbs: int
    batches: int
    percent: str  # wg wc cg cc hg hc
    more: str  # flags
    rate: float  # token/s, published

    def flags(self):
        return f"--gpu-batch-size {self.gbs} --num-gpu-batches {self.batches} --percent {self.percent} {self.more}"


def _policies(model, bits, percents, more, *cases):
    percents = percents if isinstance(percents, tuple) else (percents,) * len(LENGTHS)
    return [Policy(model, s, bits, gbs, batches, p, more, rate) for s, p, (gbs, batches, rate) in zip(LENGTHS, percents, cases)]


POLICIES = [  # appendix A.4; the throughputs for 512 and 1024 are Table 2's
    *_policies("opt-6.7b", 16, ALL_GPU, "--no-overlap", (4, 1, 53.29), (2, 1, 25.26), (1, 1, 13.72)),
    *_policies("opt-6.7b", 4, ALL_GPU, PACKED, (128, 1, 56.72), (72, 1, 29.12), (28, 1, 13.18)),
    *_policies("opt-30b", 16, ("10 90 0 100 0 100", "20 80 0 100 0 100", "4 96 0 100 0 100"), CPU_ATTENTION,
               (160, 2, 16.01), (48, 3, 7.32), (20, 4, 3.50)),
    *_policies("opt-30b", 4, "0 100 0 100 0 100", "--compress-cache", (128, 8, 16.86), (64, 8, 8.38), (20, 12, 3.98)),
    *_policies("opt-175b", 16, "0 50 0 0 0 100", CPU_ATTENTION, (64, 8, 1.36), (32, 8, 0.69), (12, 12, 0.35)),
    *_policies("opt-175b", 4, "0 100 0 100 0 100", PACKED, (96, 3, 2.26), (48, 3, 1.12), (12, 4, 0.42)),
]
BASELINES = {  # Table 2: token/s for 512 and 1024 tokens; None: out of memory
    "Accelerate": {"opt-6.7b": (25.12, 13.01), "opt-30b": (0.62, 0.31), "opt-175b": (0.01, 0.01)},
    "DeepSpeed": {"opt-6.7b": (9.28, 4.59), "opt-30b": (0.60, 0.29), "opt-175b": (0.01, None)},
}
BASELINE_BATCH = {  # sequences, for 512 tokens (the table at the head of the original program's documentation)
    "Accelerate": {"opt-6.7b": 2, "opt-30b": 8, "opt-175b": 2}, "DeepSpeed": {"opt-6.7b": 16, "opt-30b": 4, "opt-175b": 1}}
# Section 6: both row by row, cache and activations on the GPU; DeepSpeed offloads whole weights, Accelerate a share of them.
# Section 6.1: Accelerate fits OPT-6.7B into the GPU; OPT-30B's weights are on the CPU, OPT-175B's begin to go to the disk.
BASELINE_PERCENT = {
    "Accelerate": {"opt-6.7b": ALL_GPU, "opt-30b": "- - 100 0 100 0", "opt-175b": "- - 100 0 100 0"},
    "DeepSpeed": {"opt-6.7b": "0 100 100 0 100 0", "opt-30b": "0 100 100 0 100 0", "opt-175b": "0 0 100 0 100 0"}}
PETALS = {"opt-175b": (0.05, 0.05)}  # Table 2
PETALS_GPUS = 14  # section 6.1: 0.68 token/s of 14 servers
SPEEDUPS = {16: 69, 4: 112}  # section 6.1: FlexGen and FlexGen (c) over the baselines, OPT-175B, 512 tokens

FOUR_GPUS = {  # Table 3: generation and decoding throughput on 1 GPU, on 4; DeepSpeed's on 4
    "opt-6.7b": ((25.26, 38.28), (201.12, 764.65), (50.00, 50.20)),
    "opt-30b": ((7.32, 11.52), (23.61, 48.94), (6.40, 6.40)),
    "opt-175b": ((0.69, 0.83), (2.33, 3.86), (0.05, 0.05))}

BREAKDOWN_PARTS = "total", "compute", "weight (R)", "cache (R)", "cache (W)"
BREAKDOWN = {"prefill": (2711, 2220, 768, 0, 261), "decode": (11315, 1498, 3047, 7046, 124)}  # Table 4, seconds
UTILIZATION = {"prefill": 82, "decode": 13}  # section 6.1: percent of the time in which the GPU computes

_30B, _175B = "--gpu-batch-size 64 --num-gpu-batches 2", "--gpu-batch-size 32 --num-gpu-batches 8"
_ROW = "--schedule row --num-gpu-batches 1"
ABLATION = [  # Table 5: token/s and policy for OPT-30B, for OPT-175B; None: out of memory
    ("All optimizations", (7.32, f"{_30B} --percent 20 80 0 100 0 100 {CPU_ATTENTION}"),
     (0.69, f"{_175B} --percent 0 50 0 0 0 100 {CPU_ATTENTION}")),
    ("No policy search", (6.93, f"{_30B} --percent 0 100 0 100 0 100 {CPU_ATTENTION}"),
     (0.27, f"--gpu-batch-size 32 --num-gpu-batches 1 --percent 0 50 0 0 0 100 {CPU_ATTENTION}")),
    ("No overlapping", (5.86, f"{_30B} --percent 20 80 0 100 0 100 {CPU_ATTENTION} --no-overlap"),
     (0.59, f"{_175B} --percent 0 50 0 0 0 100 {CPU_ATTENTION} --no-overlap")),
    ("No CPU compute", (4.03, f"{_30B} --percent 20 80 0 100 0 100"), (0.62, f"{_175B} --percent 0 50 0 0 0 100")),
    ("No disk", (7.32, f"{_30B} --percent 20 80 0 100 0 100 {CPU_ATTENTION}"),
     (None, f"{_175B} --percent 0 100 0 100 0 100 {CPU_ATTENTION}")),
    ("w/ DeepSpeed policy", (1.57, f"{_ROW} --gpu-batch-size 4 --percent 0 100 100 0 100 0"),
     (0.01, f"{_ROW} --gpu-batch-size 1 --percent 0 0 100 0 100 0")),
]
ACCURACY = {  # Table 6: Lambada (accuracy) and WikiText (perplexity), each for FP16, 4-bit, 4-bit-S
    "opt-30b": ((0.725, 0.724, 0.718), (12.72, 12.90, 12.90)), "opt-175b": ((0.758, 0.756, 0.756), (10.82, 10.94, 10.94))}

CHAIN = 12  # section 6.4: T4s of the Petals cluster, OPT-30B
NETWORKS = (10, 1), (100, 1), (10, 0.1), (100, 0.1)  # section 6.4: delay in ms, Gbit/s
# section 6.3: power of the machine at home, price of electricity; 8 A100 in the cloud: tokens and dollars of an hour
WATTS, DOLLARS_A_KWH, CLOUD_TOKENS, CLOUD_DOLLARS = 250, 0.2, 497355, 40.96
TIMES_THE_CLOUD = 4.2  # section 6.3
DISK_READ = 2e9  # section 6: bytes/s
SAME_LATENCY, ANY_LATENCY = 65, 100  # section 1: throughput over the baselines, OPT-175B; the latter with compression


def whole_tensors(percent):
    """The original program's rounding of wg, wc: within a sublayer, its matrices in their order go to disk, CPU, GPU, each to the
    one into whose share its middle falls. The attention's four have h1^2 numbers each, the MLP's two 4 h1^2 (h2 = 4 h1)."""
    wg, wc, *others = map(float, percent.split())
    middles = [(1, (i + .5) / 4) for i in range(4)] + [(4, (i + .5) / 2) for i in range(2)]
    on_gpu = sum(size for size, at in middles if at >= 1 - wg / 100)
    on_cpu = sum(size for size, at in middles if 1 - (wg + wc) / 100 <= at < 1 - wg / 100)
    shares = [f"{10000 * part // 12 / 100:g}" for part in (on_gpu, on_cpu)]  # rounded down: together at most 100
    return " ".join(shares + [f"{x:g}" for x in others])
