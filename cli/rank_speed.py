"""The time of a step that several ranks share: computed.

docs/performance/tensor_parallel.md has the steps that were measured, too.

    step = bytes a rank reads / (bandwidth of the GPU x READ_SHARE)
           + layers x exposed time of a layer (bytes of the rank's part of it)
           + the meetings of the ranks: a latency, and bytes that come in over NVLink

The exposed time of a layer is what reading does not hide of its launches, waits and attention. It
was measured on one H200 with kernels in launches of their own, as ranks run them: 1B, 3B and 8B in
plugins/fused/decoder_layers/tactics.json ("launches"), 70B in docs/performance/h200.jsonl. A rank's
part of a layer of 70B is as large as a layer of those models, so it is taken to wait as long. (One
rank runs small models faster, all layers in one launch: gpus.py predicts that.)

A meeting is a sum over ranks, or the merging of their best ids. Its least time is that of
TensorRT-LLM's all-reduce alone, in CUDA graphs on H200s (AIConfigurator's data: 16 to 256 KB and 2,
4 and 8 ranks), to which latency and share of the link were fitted, within 7 %; on two H100s the sum
of 8,192 numbers took 5 % less, and of 11 such rows 4 % more. A norm in the launch of the sum makes
it 0.84 us longer there, and saves the 2.15 us that a norm takes in a layer of one GPU. With so much
steps of 8B and 70B on two H100s are within 2 % of what was measured (tests/cli/test_rank_speed.py).
More than two ranks were not measured: a meeting of theirs may take 2 us more. Large sums of theirs
are done in two hops, a row's owner adding and handing on a byte a number, where that is faster.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

from llmctl.cli.gpus import READ_SHARE, Gpu
from llmctl.plugins.ops.rank_argmax.chunks import PEER_CHUNK
from llmctl.plugins.schemes.scheme import WeightScheme

Waits: TypeAlias = tuple[tuple[float, float], ...]  # (bytes a step reads a layer, exposed seconds)
# 1B, 3B, 8B in launches (1,024 tokens of context), 70B (1,000)
WHOLE_WAITS: Waits = (
    (94.8e6, 11.8e-6),
    (131.0e6, 11.2e-6),
    (253.2e6, 11.5e-6),
    (884.3e6, 1.1e-6),
)
# a rank's part, alone on one H200 (`scripts.bench.slices`): 8B on 8, 4, 2, and 70B on 8, 4, 2 ranks
PART_WAITS: Waits = (
    *((31.7e6, 12.5e-6), (63.3e6, 15.0e-6), (126.6e6, 12.1e-6)),
    *((110.6e6, 11.5e-6), (221.2e6, 12.5e-6), (442.2e6, 9.6e-6)),
)
LAYER_WAITS: Waits = tuple(sorted(WHOLE_WAITS + PART_WAITS))
# 1B, 3B, 8B with 4-bit weights; nothing larger was measured
FOUR_BIT_WAITS: Waits = ((66.3e6, 21.8e-6), (83.9e6, 31.2e-6), (151.0e6, 26.4e-6))
MEETING_S = {2: 2.7e-6, 4: 2.9e-6, 8: 3.1e-6}
MORE_S = {1: 0.0, 2: 0.0, 4: 2e-6, 8: 2e-6}  # of a meeting at most
NORM_S = 0.84e-6 - 2.15e-6  # of a norm in the launch of a sum, beside what a layer waits
BEST_BYTES = 8  # of the best of PEER_CHUNK ids
# What a step of a ReDrafter head waits beside reading and meetings: of 70B on H200s (4 beams) 29 us
# on one rank, 34 on two, 28 to 36 on four.
HEAD_WAIT_S = 32e-6
LINK_SHARE = 0.64  # of NVLink's bandwidth one way: 290 of 450 GB/s


@dataclass(frozen=True, slots=True)
class Meeting:
    """num_bytes: what a rank gives. is_sum: every rank gets the sum; else all parts.
    has_norm: the norm behind the sum is part of it."""

    num_bytes: int
    is_sum: bool = True
    has_norm: bool = False


@dataclass(frozen=True, slots=True)
class RankStep:
    """A step as one of several ranks takes it."""

    num_ranks: int
    num_layers: int
    read_bytes: int
    meetings: Sequence[Meeting]


@dataclass(frozen=True, slots=True)
class RankTime:
    """Seconds: what a rank computes alone, and what all meetings take at least and at most."""

    alone_s: float
    least_s: float
    most_s: float

    @property
    def bounds_s(self) -> tuple[float, float]:
        """Of the whole step."""
        return self.alone_s + self.least_s, self.alone_s + self.most_s


def head_meeting(share: int, rows: int) -> Meeting:
    """Behind the output projection, of greedy requests: the best ids of `rows` rows of logits, of
    which a rank has `share` columns. (Draws without filters take 32 bytes a row;
    with filters logits are gathered, 4 bytes each.)"""
    return Meeting(BEST_BYTES * rows * -(-share // PEER_CHUNK), is_sum=False)


def listing_meeting(share: int, rows: int, count: int) -> Meeting:
    """Behind the output projection of a draft head: the `count` likeliest of each PEER_CHUNK of a
    rank's ids, and the sum of exponentials, of so many rows."""
    return Meeting(BEST_BYTES * rows * (count + 1) * -(-share // PEER_CHUNK), is_sum=False)


def head_time(
    gpu: Gpu, num_ranks: int, read_bytes: int, meetings: Sequence[Meeting]
) -> RankTime | None:
    """The time of a step of a ReDrafter head of which each rank reads so much; None as for
    `rank_time`."""
    if gpu.read_bytes_s is None or num_ranks > gpu.most_linked:
        return None
    alone = read_bytes / (gpu.read_bytes_s * READ_SHARE) + HEAD_WAIT_S
    least = sum(meeting_s(gpu, num_ranks, meeting) for meeting in meetings)
    return RankTime(alone, least, least + MORE_S[num_ranks] * len(meetings))


def rank_time(gpu: Gpu, step: RankStep, waits: Waits = LAYER_WAITS) -> RankTime | None:
    """The time of a step on so many GPUs; None where their bandwidth is not known, or NVLink does
    not join them."""
    if gpu.read_bytes_s is None or step.num_ranks > gpu.most_linked:
        return None
    alone = step.read_bytes / (gpu.read_bytes_s * READ_SHARE)
    alone += step.num_layers * layer_wait_s(step.read_bytes / step.num_layers, waits)
    least = sum(meeting_s(gpu, step.num_ranks, meeting) for meeting in step.meetings)
    return RankTime(alone, least, least + MORE_S[step.num_ranks] * len(step.meetings))


def layer_wait_s(layer_bytes: float, waits: Waits = LAYER_WAITS) -> float:
    """The exposed time of a layer of which a step reads so much, between the measured ones along
    the logarithm of the bytes; outside, that of the nearest."""
    sizes = [size for size, _ in waits]
    size = min(max(layer_bytes, sizes[0]), sizes[-1])
    for (low, low_s), (high, high_s) in pairwise(waits):
        if size <= high:
            return low_s + math.log(size / low) / math.log(high / low) * (high_s - low_s)
    raise AssertionError("the last size is in no range")


def meeting_s(gpu: Gpu, num_ranks: int, meeting: Meeting) -> float:
    """Its least time, among GPUs that NVLink joins."""
    if num_ranks == 1:
        return 0.0
    latency, part_s = MEETING_S[num_ranks], meeting.num_bytes / (gpu.link_bytes_s * LINK_SHARE)
    norm = NORM_S if meeting.has_norm else 0.0
    one_hop = latency + (num_ranks - 1) * part_s + norm
    two_hops = 2 * latency + (num_ranks - 1) / num_ranks * (4 + 1) / 4 * part_s + norm
    return min(one_hop, two_hops) if meeting.has_norm and num_ranks > 2 else one_hop


def waits_of(scheme: WeightScheme | None) -> Waits:
    """Those measured for such weights; None: weights that are not quantized."""
    has_few_bits = scheme is not None and scheme.weight_bytes < 1
    return FOUR_BIT_WAITS if has_few_bits else LAYER_WAITS
