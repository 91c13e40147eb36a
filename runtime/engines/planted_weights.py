"""Weights generated on the device instead of read: `--load-format dummy` and `planted`.

Both fill every layer with random values of ordinary size. A planted model also produces text that
is known in advance. Its embedding is a codebook of random signs, one code of H signs per token; the
output projections of attention and MLP are scaled so far down that the residual stream stays the
code of the last token, bit for bit; and the head's row for token v is the code of the token that v
follows. So the argmax after x is next(x) (planted_text.py): the codes agree in all H elements, and
any two of 128 K random codes differ by more than any rounding. planted_graphs.py says it for every
graph of an engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import numpy as np
import torch

from llmctl.builder.engine_format import BASE, EngineConfig, Plan, PlanOp
from llmctl.errors import CorruptEngine
from llmctl.plugins.core.shares import is_share
from llmctl.plugins.ops.packed_linear.forms import TILE_ROWS
from llmctl.plugins.ops.packed_linear.layout import pack
from llmctl.plugins.schemes.scheme import Form, packing_of
from llmctl.plugins.schemes.table import find_form
from llmctl.runtime.engines.planted_graphs import PLANTED_GRAPHS, Codes, Rows
from llmctl.runtime.engines.planted_graphs import base_shares as base_shares
from llmctl.runtime.engines.planted_text import Recipe
from llmctl.runtime.engines.planted_text import next_tokens as next_tokens
from llmctl.runtime.engines.planted_text import planted_text as planted_text

CHUNK = 1 << 25  # elements made at a time
SCALE = 1 / 32  # of activations and KV entries, which are of unit size: FP8 then reaches to 14
_EMBEDDINGS = ("embedding", "embedding_norm")
_SUMS = ("all_reduce", "all_reduce_norm")
INERT = 2.0**-14  # factor of what must not change the residual stream (BF16 keeps 8 bits)

Fill = Callable[[torch.Tensor], None]


def generate_weights(
    config: EngineConfig, plan: Plan, weights: Mapping[str, torch.Tensor], rank: int = 0
) -> None:
    """Fill every weight that the engine file of a rank neither stores nor defines, on the device
    where it lies.

    Deterministic for a seed, a plan, a rank and a kind of device; what every rank has whole is the
    same on all. Raises CorruptEngine for a recipe that this version does not know.
    """
    recipe = config.weights
    if recipe.get("load_format") not in ("dummy", "planted"):
        raise CorruptEngine(
            f"config.json says weights are {recipe.get('load_format')!r}, but some are not stored",
            fix="build the engine again",
        )
    missing = {t.name for t in plan.tensors if t.kind == "weight" and not t.is_stored}
    missing -= set(plan.rotary)
    device = next(iter(weights.values())).device
    generator = torch.Generator(device).manual_seed(int(recipe["seed"]))
    own = generator  # of what a rank has a part of
    if config.num_ranks > 1:
        drawn = np.random.SeedSequence((int(recipe["seed"]), rank)).generate_state(1)
        own = torch.Generator(device).manual_seed(int(drawn[0]))
    for name, op in ((name, op) for name, graph in plan.graphs.items() for op in graph.ops):
        is_inert = op.name.removesuffix(".all_reduce").endswith(PLANTED_GRAPHS[name].inert)
        for role, weight in op.inputs.items():
            if weight in missing:
                missing.discard(weight)
                is_own = op.op not in _EMBEDDINGS if name == BASE else _has_share(op)
                chosen = own if is_own else generator
                _fill_for(op, role, chosen, plan, is_inert)(weights[weight])
    assert not missing, f"no operator reads {sorted(missing)[:3]}"
    if recipe["load_format"] == "planted":
        _plant(recipe, plan, weights, generator, rank)


def _fill_for(
    op: PlanOp, role: str, generator: torch.Generator, plan: Plan, is_inert: bool
) -> Fill:
    """How a weight is filled, by what it is to its operator."""
    if role == "weight_scale":
        product = _written_by(op.inputs["x"], plan) if op.op in _SUMS else op
        own = _form(product, plan).spread
        assert own is not None, f"{op.name} has scales of weights that need none"
        parts = [int(op.attributes.get(name, 1)) for name in ("ranks", "leaves")]
        inner = _inner(product, plan) * math.prod(parts)
        value = inner**-0.5 / own * (INERT if is_inert else 1)
        return lambda tensor: _constant(tensor, value)
    if role in ("scale", "x_scale", "k_scale", "v_scale", "out_scale"):
        return lambda tensor: _constant(tensor, SCALE)
    if role in ("q_norm", "k_norm", "norm_weight") or op.op == "rms_norm":
        is_inert = is_inert and op.op not in _SUMS  # the product before the sum is
        return lambda tensor: _constant(tensor, INERT if is_inert else 1.0)
    if role == "index":
        count = int(_shape(op.inputs["x"], plan)[1])
        return lambda tensor: _first(tensor, count)
    if role == "bias":
        return lambda tensor: _constant(tensor, 0.0)
    if op.op in _EMBEDDINGS:
        return lambda tensor: _random(tensor, 1.0, generator)
    form = _form(op, plan)
    if form.is_coded:
        return lambda tensor: packing_of(form).fill_random(tensor, generator)
    spread = form.spread or _inner(op, plan) ** -0.5 * (INERT if is_inert else 1)
    return lambda tensor: _random(tensor, spread, generator)


def _written_by(tensor: str, plan: Plan) -> PlanOp:
    """The operator that writes a tensor."""
    ops = (op for graph in plan.graphs.values() for op in graph.ops)
    return next(op for op in ops if tensor in op.outputs.values())


def _has_share(op: PlanOp) -> bool:
    """Whether each rank has some of the rows of a product."""
    return is_share(op.outputs.get("out", ""))


def _inner(op: PlanOp, plan: Plan) -> int:
    """K of a packed product, whole blocks."""
    return int(_shape(op.inputs["weight"], plan)[1]) * _form(op, plan).columns


def _shape(name: str, plan: Plan) -> tuple[int | str, ...]:
    (shape,) = [tensor.shape for tensor in plan.tensors if tensor.name == name]
    return shape


def _form(op: PlanOp, plan: Plan) -> Form:
    """That of a packed product's weight."""
    (dtype,) = [t.dtype for t in plan.tensors if t.name == op.inputs["weight"]]
    return find_form(dtype, op.attributes)


def _constant(tensor: torch.Tensor, value: float) -> None:
    tensor.fill_(value)


def _first(tensor: torch.Tensor, count: int) -> None:
    """The index of a vocabulary that has the first `count` tokens."""
    own = torch.arange(len(tensor), dtype=tensor.dtype, device=tensor.device)
    tensor.copy_(torch.where(own < count, own, -1))


def _random(tensor: torch.Tensor, spread: float, generator: torch.Generator) -> None:
    """Normal values of a spread; FP8 within its range, so that all bits are finite."""
    flat = tensor.view(-1)
    for start in range(0, len(flat), CHUNK):
        part = flat[start : start + CHUNK]
        values = torch.randn(len(part), generator=generator, device=tensor.device) * spread
        if tensor.dtype == torch.float8_e4m3fn:
            part.view(torch.uint8).copy_(
                values.clamp_(-448, 448).to(tensor.dtype).view(torch.uint8)
            )
        else:
            part.copy_(values)


def _plant(
    recipe: Recipe,
    plan: Plan,
    weights: Mapping[str, torch.Tensor],
    generator: torch.Generator,
    rank: int,
) -> None:
    """Codes into the embedding, and into each graph what it is to say; of the output projection, a
    rank's rows."""
    (embedding,) = [weights[op.inputs["weight"]] for op in plan.ops if op.op in _EMBEDDINGS]
    for rows in _row_chunks(embedding):
        signs = torch.rand(rows.shape, generator=generator, device=rows.device) < 0.5
        rows.copy_(signs.to(rows.dtype) * 2 - 1)
    for name, graph in plan.graphs.items():
        planted = PLANTED_GRAPHS[name].rows(recipe, graph, Codes(embedding))
        for op in graph.ops:
            if op.name not in planted:
                continue
            product, rows_of = op, planted[op.name]
            if op.op == "all_gather":
                product = _written_by(op.inputs["x"], plan)
            if _has_share(product):
                share = weights[product.inputs["weight"]].shape[0] * TILE_ROWS
                rows_of = partial(_rows_from, rows_of, rank * share)
            _write_rows(product, plan, weights, rows_of)


def _write_rows(op: PlanOp, plan: Plan, weights: Mapping[str, torch.Tensor], rows: Rows) -> None:
    """These rows as the weight of a packed product, which scales them by 1."""
    packed, form = weights[op.inputs["weight"]], _form(op, plan)
    if "weight_scale" in op.inputs:
        weights[op.inputs["weight_scale"]].fill_(1.0)
    width = max(1, CHUNK // (TILE_ROWS * _inner(op, plan)))
    for tile in range(0, packed.shape[0], width):
        made = rows(tile * TILE_ROWS, min(tile + width, packed.shape[0]) * TILE_ROWS)
        found = packing_of(form).pack_halves(made) if form.is_coded else pack(made.to(packed.dtype))
        packed[tile : tile + width].view(torch.uint8).copy_(found.view(torch.uint8))


def _rows_from(rows: Rows, first: int, start: int, stop: int) -> torch.Tensor:
    return rows(first + start, first + stop)


def _row_chunks(matrix: torch.Tensor) -> Iterator[torch.Tensor]:
    step = max(1, CHUNK // math.prod(matrix.shape[1:]))
    for start in range(0, len(matrix), step):
        yield matrix[start : start + step]
