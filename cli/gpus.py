"""GPUs by name: memory, bandwidth, NVLink, and what of the bandwidth a decoding step reaches.

    predicted step time = bytes read / (bandwidth of the GPU x READ_SHARE x step_share(bytes read))

The bandwidth of a GPU is that of its datasheet. READ_SHARE is the fraction of it that a plain read
of large buffers reaches; step_share is the fraction of that which a decoding step at batch 1
reaches. Both were measured, see docs/performance/h200.md and h100.md. Steps of small models reach
less because launches and waits do not shrink with the model, and so do steps of 4-bit weights,
which wait as often for fewer bytes. Below the smallest measured model its share is used, which is
too optimistic; above the largest, that one's. rank_speed.py predicts steps of several ranks.

Sources of `GPUS`, NVIDIA's datasheets: H200 (SXM and NVL), H100 (SXM, NVL, PCIe), GH200, DGX B200
for one of its GPUs, A100 (SXM), L40S, L4, A10, RTX 4090, RTX 5090, RTX PRO 6000 Blackwell. They
state NVLink both ways together, which is halved here. HGX boards join 8 GPUs by switches; NVL and
PCIe cards are joined by bridges, 2 of them, 4 of the H200 NVL. A GH200 reaches others over
whatever its server has, which is not known here.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TypeAlias

from llmctl.errors import BadConfig
from llmctl.plugins.schemes.scheme import WeightScheme

READ_SHARE = 4.488 / 4.8  # H200: `read` in docs/performance/h200.md over the datasheet; H100: 0.925
Shares: TypeAlias = tuple[tuple[float, float], ...]  # (bytes a step reads, share of the bandwidth)
# decode-1b, -3b, -8b, -70b of h200.md
STEP_SHARES: Shares = ((1.517e9, 0.837), (3.667e9, 0.846), (8.10e9, 0.955), (70.7e9, 0.995))
# 4-bit weights: steps of 1B and 3B in one launch, without sampling (tactics.json), 8b-mxfp4
FOUR_BIT_SHARES: Shares = ((1.061e9, 0.592), (2.348e9, 0.576), (4.832e9, 0.752))
CPU_STEP_SHARE = 0.83  # of the read bandwidth, docs/performance/cpu.md: 80 to 87 %
GB = 10**9


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU. read_bytes_s: datasheet bandwidth, None where it is not known. link_bytes_s: of
    NVLink, one way; 0 without. most_linked: GPUs that it joins. num_sms: multiprocessors, where
    there are fewer than the kernels for its generation need (arch.py); else None."""

    name: str
    compute_capability: str
    memory_bytes: int
    read_bytes_s: float | None
    link_bytes_s: float = 0.0
    most_linked: int = 1
    num_sms: int | None = None


# Memory: what is free on an idle H200; else the datasheet's, in powers of ten, which is a few
# percent less than drivers report.
GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("h200", "9.0", 149_500_000_000, 4.8e12, 450e9, 8),
        Gpu("h200-nvl", "9.0", 141 * GB, 4.8e12, 450e9, 4),
        Gpu("h100", "9.0", 80 * GB, 3.35e12, 450e9, 8),
        Gpu("h100-nvl", "9.0", 94 * GB, 3.9e12, 300e9, 2),
        Gpu("h100-pcie", "9.0", 80 * GB, 2.0e12, 300e9, 2, num_sms=114),
        Gpu("gh200", "9.0", 96 * GB, 4.0e12),
        Gpu("b200", "10.0", 180 * GB, 7.7e12, 900e9, 8),
        Gpu("a100", "8.0", 80 * GB, 2.039e12, 300e9, 8),
        Gpu("a100-40gb", "8.0", 40 * GB, 1.555e12, 300e9, 8),
        Gpu("l40s", "8.9", 48 * GB, 0.864e12),
        Gpu("l4", "8.9", 24 * GB, 0.3e12),
        Gpu("a10", "8.6", 24 * GB, 0.6e12),
        Gpu("rtx-4090", "8.9", 24 * GB, 1.008e12),
        Gpu("rtx-5090", "12.0", 32 * GB, 1.792e12),
        Gpu("rtx-pro-6000", "12.0", 96 * GB, 1.792e12),
    )
}


def find_gpu(name: str) -> Gpu:
    """The GPU of that name ("h200", "H100 NVL"). Raises BadConfig, listing the names."""
    gpu = GPUS.get(name.lower().replace(" ", "-").replace("_", "-"))
    if gpu is None:
        raise BadConfig(f"--gpu {name} is not known; known: {', '.join(GPUS)}")
    return gpu


def default_gpu(capabilities: Collection[str]) -> Gpu:
    """What to plan and predict for where no GPU is named or present: the first in the table that
    serves one of these compute capabilities; the first of all where the table has none."""
    fitting = (gpu for gpu in GPUS.values() if gpu.compute_capability in capabilities)
    return next(fitting, next(iter(GPUS.values())))


def present_gpu() -> Gpu | None:
    """The first GPU of this machine, with the memory that its driver reports; None without one."""
    import torch

    if not torch.cuda.is_available():
        return None
    found = torch.cuda.get_device_properties(0)
    return describe_device(found.name, found.total_memory, f"{found.major}.{found.minor}")


def describe_device(name: str, memory_bytes: int, capability: str) -> Gpu:
    """A GPU as its driver names it ("NVIDIA H100 80GB HBM3"): in the table, by the longest name
    whose parts all occur in it, or one of unknown bandwidth."""
    words = name.lower().replace("-", " ").split()
    fitting = [
        gpu
        for gpu in GPUS.values()
        if gpu.compute_capability == capability and set(gpu.name.split("-")) <= set(words)
    ]
    if not fitting:
        return Gpu(name, capability, memory_bytes, None)
    return replace(max(fitting, key=lambda gpu: len(gpu.name)), memory_bytes=memory_bytes)


def step_share(read_bytes: float, shares: Shares = STEP_SHARES) -> float:
    """The share of the read bandwidth that a decoding step reaches, between the measured models
    along the logarithm of the bytes it reads."""
    sizes = [size for size, _ in shares]
    size = min(max(read_bytes, sizes[0]), sizes[-1])
    for (low, low_share), (high, high_share) in pairwise(shares):
        if size <= high:
            part = math.log(size / low) / math.log(high / low)
            return low_share + part * (high_share - low_share)
    raise AssertionError("the last size is in no range")


def shares_of(scheme: WeightScheme | None) -> Shares:
    """The shares measured for engines with such weights; None: weights that are not quantized."""
    has_few_bits = scheme is not None and scheme.weight_bytes < 1
    return FOUR_BIT_SHARES if has_few_bits else STEP_SHARES


def effective_read_bytes_s(
    gpu: Gpu, step_bytes: float, shares: Shares = STEP_SHARES
) -> float | None:
    """Bytes a second that a step reading `step_bytes` is predicted to get; None if not known."""
    if gpu.read_bytes_s is None:
        return None
    return gpu.read_bytes_s * READ_SHARE * step_share(step_bytes, shares)
