"""Causal attention over the paged cache, in float32, rounded once to the model dtype.

A query at position p sees keys j <= p and, with a window W > 0, j > p - W. With `sink_tokens` S the
first S keys are always seen and count towards the window: j < S or j > p - (W - S). Checked against
torch's scaled_dot_product_attention with an explicit mask.

With `tree_mask` [B, T, ceil(T/32)], a request of up to T tokens is a tree: its token i sees the
context before the step, and token j of the step where bit j % 32 of word j // 32 of row i is set.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from llmctl.plugins.core.calls import StepInputs
from llmctl.plugins.ops.quantize.reference import quantize_static


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    softmax_scale: float,
    window: int,
    sinks: int = 0,
    tree: torch.Tensor | None = None,
) -> torch.Tensor:
    """q [heads, Q, D] at absolute `positions` [Q]; k, v [heads, L, D] -> [heads, Q, D] float32."""
    scores = (q @ k.transpose(-1, -2)) * softmax_scale
    keys = torch.arange(k.shape[1], device=q.device)
    visible = keys <= positions[:, None]
    is_near = torch.ones_like(visible)
    if window > 0:
        is_near = (keys > positions[:, None] - (window - sinks)) | (keys < sinks)
    visible &= is_near
    if tree is not None:  # [Q, Q] bool: the step's own tokens
        first = k.shape[1] - len(tree)
        visible[:, :first] = is_near[:, :first]
        visible[:, first:] = tree
    return torch.softmax(scores.masked_fill(~visible, float("-inf")), dim=-1) @ v


def gather_keys(cache: torch.Tensor, blocks: torch.Tensor, kv_len: int) -> torch.Tensor:
    """One layer's K or V [num_blocks, heads, tokens_per_block, D] -> float32 [heads, kv_len, D]."""
    _, num_kv_heads, _, size = cache.shape
    pages = cache[blocks].float().transpose(0, 1)  # [heads, blocks, tokens_per_block, D]
    return pages.reshape(num_kv_heads, -1, size)[:, :kv_len]


def tree_bits(words: torch.Tensor, count: int) -> torch.Tensor:
    """int32 [T, ceil(T/32)] -> bool [count, count]: what a tree's tokens see of each other."""
    bits = torch.arange(count, device=words.device)
    return (words[:count, bits // 32] >> (bits % 32)) & 1 == 1


def reference(
    inputs: Mapping[str, torch.Tensor],
    outputs: Mapping[str, torch.Tensor],
    attributes: Mapping[str, int | float | str | bool],
    step: StepInputs,
    kv_cache: torch.Tensor,
) -> None:
    """Attend request by request; the cache already holds this step's keys and values."""
    q, out = inputs["q"], outputs["out"]
    size = int(attributes["head_size"])
    num_heads, num_kv_heads = int(attributes["num_heads"]), int(attributes["num_kv_heads"])
    cache = kv_cache[int(attributes["layer"])]
    positions = torch.from_numpy(step.position_ids).to(q.device)
    for request in range(step.num_requests):
        start, stop = int(step.cu_q[request]), int(step.cu_q[request + 1])
        kv_len = int(step.kv_len[request])
        num_blocks = -(-kv_len // cache.shape[3])
        blocks = torch.from_numpy(step.block_tables[request, :num_blocks]).to(q.device, torch.int64)
        k = gather_keys(cache[:, 0], blocks, kv_len)
        v = gather_keys(cache[:, 1], blocks, kv_len)
        if "k_scale" in inputs:
            k = k * inputs["k_scale"]
        if "v_scale" in inputs:
            v = v * inputs["v_scale"]
        groups = num_heads // num_kv_heads
        tree = None
        if "tree_mask" in inputs and stop - start <= inputs["tree_mask"].shape[1]:
            tree = tree_bits(inputs["tree_mask"][request], stop - start)
        heads = q[start:stop].view(stop - start, num_heads, size).float().transpose(0, 1)
        result = attention(
            heads,
            k.repeat_interleave(groups, dim=0),
            v.repeat_interleave(groups, dim=0),
            positions[start:stop],
            float(attributes["softmax_scale"]),
            int(attributes["window"]),
            int(attributes.get("sink_tokens", 0)),
            tree,
        )
        rows = result.transpose(0, 1).reshape(stop - start, -1).to(q.dtype)
        out[start:stop] = (
            quantize_static(rows, inputs["out_scale"]) if "out_scale" in inputs else rows
        )
