"""Causal attention over the paged cache, in float32, rounded once to the model dtype.

A query at position p sees keys j <= p and, with a window W > 0, j > p - W. With `sink_tokens` S the
first S keys are always seen and count towards the window: j < S or j > p - (W - S). Checked against
torch's scaled_dot_product_attention with an explicit mask.

The tokens of a request with a tree (`StepInputs.trees`) see, after the context before the step,
the tokens on their own path alone, in the order of the path. So each gets what it would get if its
path were decoded token by token.

With `fp8_context` tokens before `StepInputs.context_end` have FP8 products
(chunk_fp8/reference.py), with `fp8_generation` beside it all tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import torch

from llmctl.plugins.core.calls import StepInputs
from llmctl.plugins.ops.paged_attention.chunk_fp8 import reference as fp8_reference
from llmctl.plugins.ops.paged_attention.fp8_context import Fp8Tokens, fp8_tokens
from llmctl.plugins.ops.quantize.reference import quantize_static

_ONE = torch.ones(1)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    softmax_scale: float,
    window: int,
    sinks: int = 0,
) -> torch.Tensor:
    """q [heads, Q, D] at absolute `positions` [Q]; k, v [heads, L, D] -> [heads, Q, D] float32."""
    scores = (q @ k.transpose(-1, -2)) * softmax_scale
    keys = torch.arange(k.shape[1], device=q.device)
    visible = keys <= positions[:, None]
    if window > 0:
        visible &= (keys > positions[:, None] - (window - sinks)) | (keys < sinks)
    return torch.softmax(scores.masked_fill(~visible, float("-inf")), dim=-1) @ v


def gather_keys(cache: torch.Tensor, blocks: torch.Tensor, kv_len: int) -> torch.Tensor:
    """One layer's K or V [num_blocks, heads, tokens_per_block, D] -> float32 [heads, kv_len, D]."""
    _, num_kv_heads, _, size = cache.shape
    pages = cache[blocks].float().transpose(0, 1)  # [heads, blocks, tokens_per_block, D]
    return pages.reshape(num_kv_heads, -1, size)[:, :kv_len]


def token_keys(step: StepInputs, request: int, kv_len: int) -> Iterator[tuple[slice, torch.Tensor]]:
    """Tokens of the step, of a tree one by one, and where the keys that they see lie in the cache,
    in the order of positions."""
    start, stop = int(step.cu_q[request]), int(step.cu_q[request + 1])
    row = -1 if step.trees is None else int(step.trees.start[request])
    if row < 0:
        yield slice(start, stop), torch.arange(kv_len)
        return
    assert step.trees is not None
    roots = step.trees.roots
    root = kv_len - (stop - start) if roots is None else int(roots[request])
    for nth in range(stop - start):
        depth = int(step.position_ids[start + nth]) - root
        path = torch.from_numpy(step.trees.paths[row + nth, : depth + 1].astype(np.int64))
        yield slice(start + nth, start + nth + 1), torch.cat((torch.arange(root), root + path))


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
        for tokens, places in token_keys(step, request, kv_len):
            count = tokens.stop - tokens.start
            seen = places.to(q.device)
            result = attention(
                q[tokens].view(count, num_heads, size).float().transpose(0, 1),
                k[:, seen].repeat_interleave(groups, dim=0),
                v[:, seen].repeat_interleave(groups, dim=0),
                positions[tokens],
                float(attributes["softmax_scale"]),
                int(attributes["window"]),
                int(attributes.get("sink_tokens", 0)),
            )
            rows = result.transpose(0, 1).reshape(count, -1).to(q.dtype)
            out[tokens] = (
                quantize_static(rows, inputs["out_scale"]) if "out_scale" in inputs else rows
            )
        products = fp8_tokens(attributes)
        if products is Fp8Tokens.ALL:
            assert step.trees is None, "a tree's tokens have 16-bit products"
            _attend_by_fp8(inputs, out, attributes, step, request, cache, blocks, kv_len)
        elif products is Fp8Tokens.PROMPTS and step.context_end is not None:
            end = int(step.context_end[request])
            _attend_by_fp8(inputs, out, attributes, step, request, cache, blocks, end)


def _attend_by_fp8(
    inputs: Mapping[str, torch.Tensor],
    out: torch.Tensor,
    attributes: Mapping[str, int | float | str | bool],
    step: StepInputs,
    request: int,
    cache: torch.Tensor,
    blocks: torch.Tensor,
    most: int,
) -> None:
    """Rows of a request at positions before `most` again, with FP8 products."""
    start, stop = int(step.cu_q[request]), int(step.cu_q[request + 1])
    first = int(step.position_ids[start]) if stop > start else 0
    end = min(first + stop - start, most)
    if end <= first:
        return
    size = int(attributes["head_size"])
    num_heads, num_kv_heads = int(attributes["num_heads"]), int(attributes["num_kv_heads"])
    tokens = slice(start, start + end - first)
    k, v = (gather_keys(cache[:, i], blocks, end).to(cache.dtype) for i in range(2))
    positions = torch.arange(first, end, device=out.device)
    scale = float(attributes["softmax_scale"]) * float(inputs.get("k_scale", _ONE))
    is_all = fp8_tokens(attributes) is Fp8Tokens.ALL
    chain = fp8_reference.CHAIN
    units = (fp8_reference.UNIT, fp8_reference.MOST_UNIT) if is_all else (chain, chain)
    rows = []
    for head in range(num_heads):
        own = head * num_kv_heads // num_heads
        q = inputs["q"][tokens, head * size : (head + 1) * size]
        rows.append(fp8_reference.attend(q, k[own], v[own], positions, scale, units))
    result = (torch.cat(rows, 1) * inputs.get("v_scale", _ONE.to(out.device))).to(inputs["q"].dtype)
    out[tokens] = quantize_static(result, inputs["out_scale"]) if "out_scale" in inputs else result
