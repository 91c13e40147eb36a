"""Attention with FP8 products: the arithmetic of chunk_fp8.cu, step by step.

Queries, keys, weights and values are E4M3 numbers; both products are those of Hopper's tensor
cores (`fp8_sums`), and everything else is float32. A GPU gives 99.9 % of these numbers once they
are rounded to bfloat16; the rest differ by how it computes powers of two.

A row is a query head of a token, and all that is decided for it follows from itself:

- Its query is divided by a power of two, the smallest with which all its numbers stay within 448.
- Keys are taken in tiles of KEYS, and these in work items of UNIT to MOST_UNIT tiles at absolute
  positions, divided as shared/tiles.py says. A work item has a base, a logit (times log2 e): the
  largest of its first visible tile, raised to the largest of a later tile only if that is more than
  RAISE above it, which few are. Its sums are scaled then.
- A weight is 2^(logit - base + WEIGHT_POWER), so at most 256; E4M3 has normal numbers down to a
  2^-14th of that. Sums of weights times values, and of weights alone, are of rounded weights and
  one chain of products from zero over CHAIN tiles, no more, for a sum has 14 bits.
- A work item's chains, CHAIN tiles each, are added to each other from left to right, and work items
  are merged from left to right: fewer of them are left to thread blocks that share a long context.

Keys within a group of 32 may come in any order, because the order of an instruction's products
does not matter: images_fp8.cu stores values in the order in which threads have their weights.
"""

from __future__ import annotations

import math

import torch

from llmctl.plugins.backends.cuda.sm90.fp8_sums import add_products
from llmctl.plugins.core.op_spec import FP8_MAX
from llmctl.plugins.ops.paged_attention.shared.tiles import unit_start

KEYS = 128  # of a tile
CHAIN, UNIT, MOST_UNIT = 4, 8, 16  # tiles, powers of two
RAISE = 4.0  # powers of two
WEIGHT_POWER = 4.0
_E4M3 = torch.float8_e4m3fn
State = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # base, sum of weights, weighted values


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    scale: float,
    units: tuple[int, int] = (UNIT, MOST_UNIT),
) -> torch.Tensor:
    """Causal attention of one head: q [Q, D] at absolute `positions` [Q]; k, v [L, D] in E4M3.

    scale: of logits, that of keys included; values' is the caller's. units: tiles of the first work
    items and of the last ones; CHAIN in engines where prompts alone have FP8 products. Returns
    float32 [Q, D].
    """
    rows, unit = quantize_queries(q)
    least, most = units
    logit_scale = unit[:, None] * (scale * math.log2(math.e))
    state = item = _nothing(q, v)
    first, nth = 0, 0
    while first < len(k):
        base, total, sums = item
        own = base, torch.zeros_like(total), torch.zeros_like(sums)
        for start in range(first, min(first + CHAIN * KEYS, len(k)), KEYS):
            keys = slice(start, start + KEYS)
            nothing = torch.zeros(len(q), len(k[keys]), device=q.device)
            logits = add_products(nothing, rows, k[keys]) * logit_scale
            hidden = start + torch.arange(len(k[keys]), device=q.device) > positions[:, None]
            own = _add_tile(own, logits.masked_fill(hidden, -math.inf), v[keys])
        fade = _exp2(base - _finite(own[0]))
        item = own[0], total * fade + own[1], sums * fade[:, None] + own[2]
        first += CHAIN * KEYS
        if first >= min(unit_start(nth + 1, most, least) * KEYS, len(k)):
            state, item, nth = _merge(state, item), _nothing(q, v), nth + 1
    return state[2] / state[1][:, None]


def quantize_queries(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [Q, D] -> float8_e4m3fn [Q, D] and the power of two [Q] that each was divided by."""
    largest = q.float().abs().amax(-1).clamp(2.0**-100, 2.0**126)
    fraction, exponent = torch.frexp(largest)
    power = exponent - 9 + (fraction > 0.875).int()  # 448 is 0.875 * 2^9
    unit = torch.ldexp(torch.ones_like(largest), power)
    return (q.float() / unit[:, None]).clamp(-FP8_MAX, FP8_MAX).to(_E4M3), unit


def _nothing(q: torch.Tensor, v: torch.Tensor) -> State:
    sums = torch.zeros(len(q), v.shape[1], device=q.device)
    return torch.full_like(sums[:, 0], -math.inf), torch.zeros_like(sums[:, 0]), sums


def _add_tile(state: State, logits: torch.Tensor, values: torch.Tensor) -> State:
    base, total, sums = state
    largest = logits.amax(-1)
    raised = torch.where(largest > base + RAISE, largest, base)
    fade = _exp2(base - _finite(raised))
    weights = _exp2(logits - _finite(raised)[:, None] + WEIGHT_POWER)
    # A tile has an operand's KEYS keys, zeros behind the last one, and one more dimension: ones.
    operand = torch.nn.functional.pad(weights, (0, KEYS - weights.shape[1])).to(_E4M3)
    size = values.shape[1]
    columns = torch.ones(size + 1, KEYS, device=values.device).to(_E4M3)
    columns.view(torch.uint8)[:size] = 0
    columns.view(torch.uint8)[:size, : len(values)] = values.view(torch.uint8).T
    both = torch.cat((sums, total[:, None]), 1) * fade[:, None]
    added = add_products(both, operand, columns)
    return raised, added[:, size], added[:, :size]


def _finite(base: torch.Tensor) -> torch.Tensor:
    """Where nothing was visible, exponents are relative to zero."""
    return torch.where(base == -math.inf, 0.0, base)


def _exp2(x: torch.Tensor) -> torch.Tensor:
    """2^x by float64: a number's float32 power would depend on its place in the tensor, whose end
    a CPU computes otherwise than by vectors."""
    return torch.exp2(x.double()).float()


def _merge(left: State, right: State) -> State:
    base = torch.maximum(left[0], right[0])
    a, b = _exp2(left[0] - _finite(base)), _exp2(right[0] - _finite(base))
    return base, left[1] * a + right[1] * b, left[2] * a[:, None] + right[2] * b[:, None]
