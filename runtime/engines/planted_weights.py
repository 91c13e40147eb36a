"""Weights generated on the device instead of read: `--load-format dummy` and `planted`.

Both fill every layer with random values of ordinary size. A planted model also produces text that
is known in advance. Its embedding is a codebook of random signs, one code of H signs per token; the
output projections of attention and MLP are scaled so far down that the residual stream stays the
code of the last token, bit for bit; and the head's row for token v is the code of the token that v
follows. So the argmax after x is next(x): the codes agree in all H elements, and any two of 128 K
random codes differ by more than any rounding.

`next` of a target is one cycle over all ordinary tokens, so no text repeats. A draft with the same
seed agrees with it at each token with the given probability, independently. So acceptance is a
known number, and speed can be measured at any acceptance.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from llmctl.builder.engine_format import EngineConfig, Plan, PlanOp
from llmctl.errors import CorruptEngine
from llmctl.plugins.ops.packed_linear.forms import TILE_ROWS
from llmctl.plugins.ops.packed_linear.layout import pack
from llmctl.plugins.schemes.scheme import Form, packing_of
from llmctl.plugins.schemes.table import find_form

CHUNK = 1 << 25  # elements made at a time
SCALE = 1 / 32  # of activations and KV entries, which are of unit size: FP8 then reaches to 14
_EMBEDDINGS = ("embedding", "embedding_norm")
INERT = 2.0**-14  # factor of what must not change the residual stream (BF16 keeps 8 bits)

Fill = Callable[[torch.Tensor], None]


def next_tokens(weights: Mapping[str, object]) -> NDArray[np.int64]:
    """next [stop]: the token that follows each ordinary one; -1 for the others.

    weights: `weights` of a planted engine's config.json.
    """
    first, stop, seed = _ordinary(weights)
    order = np.random.default_rng([seed, 0]).permutation(np.arange(first, stop))
    follows = np.full(stop, -1, np.int64)
    follows[order] = np.roll(order, -1)
    if weights["role"] == "target":
        return follows
    differs = np.random.default_rng([seed, 1]).random(stop) >= float(str(weights["acceptance"]))
    wrong = np.flatnonzero(differs & (follows >= 0))
    # Exchanged among themselves, so that every token still follows exactly one other.
    follows[wrong] = np.roll(follows[wrong], 1)
    return follows


def planted_text(weights: Mapping[str, object], last: int, count: int) -> list[int]:
    """The greedy text of a planted target after a prompt that ends in the ordinary token `last`."""
    follows = next_tokens({**weights, "role": "target"})
    text = []
    for _ in range(count):
        last = int(follows[last])
        text.append(last)
    return text


def generate_weights(config: EngineConfig, plan: Plan, weights: Mapping[str, torch.Tensor]) -> None:
    """Fill every weight that the engine file does not store, on the device where it lies.

    Deterministic for a seed, a plan and a kind of device. Raises CorruptEngine for a recipe that
    this version does not know.
    """
    recipe = config.weights
    if recipe.get("load_format") not in ("dummy", "planted"):
        raise CorruptEngine(
            f"config.json says weights are {recipe.get('load_format')!r}, but some are not stored",
            fix="build the engine again",
        )
    missing = {t.name for t in plan.tensors if t.kind == "weight" and not t.is_stored}
    device = next(iter(weights.values())).device
    generator = torch.Generator(device).manual_seed(int(recipe["seed"]))
    for op in (op for graph in plan.graphs.values() for op in graph.ops):
        for role, name in op.inputs.items():
            if name in missing:
                missing.discard(name)
                _fill_for(op, role, generator, plan)(weights[name])
    assert not missing, f"no operator reads {sorted(missing)[:3]}"
    if recipe["load_format"] == "planted":
        _plant(recipe, plan, weights, generator)


def _fill_for(op: PlanOp, role: str, generator: torch.Generator, plan: Plan) -> Fill:
    """How a weight is filled, by what it is to its operator."""
    is_inert = op.name.endswith(("o_proj", "down_proj"))
    if role == "weight_scale":
        own = _form(op, plan).spread
        assert own is not None, f"{op.name} has scales of weights that need none"
        value = _inner(op, plan) ** -0.5 / own * (INERT if is_inert else 1)
        return lambda tensor: _constant(tensor, value)
    if role in ("scale", "x_scale", "k_scale", "v_scale", "out_scale"):
        return lambda tensor: _constant(tensor, SCALE)
    if role in ("q_norm", "k_norm", "norm_weight") or op.op == "rms_norm":
        return lambda tensor: _constant(tensor, 1.0)
    if role == "bias":
        return lambda tensor: _constant(tensor, 0.0)
    if op.op in _EMBEDDINGS:
        return lambda tensor: _random(tensor, 1.0, generator)
    form = _form(op, plan)
    if form.is_coded:
        return lambda tensor: packing_of(form).fill_random(tensor, generator)
    spread = form.spread or _inner(op, plan) ** -0.5 * (INERT if is_inert else 1)
    return lambda tensor: _random(tensor, spread, generator)


def _inner(op: PlanOp, plan: Plan) -> int:
    """K of a packed product, whole blocks."""
    (shape,) = [t.shape for t in plan.tensors if t.name == op.inputs["weight"]]
    return int(shape[1]) * _form(op, plan).columns


def _form(op: PlanOp, plan: Plan) -> Form:
    """That of a packed product's weight."""
    (dtype,) = [t.dtype for t in plan.tensors if t.name == op.inputs["weight"]]
    return find_form(dtype, op.attributes)


def _constant(tensor: torch.Tensor, value: float) -> None:
    tensor.fill_(value)


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
    recipe: Mapping[str, object],
    plan: Plan,
    weights: Mapping[str, torch.Tensor],
    generator: torch.Generator,
) -> None:
    """Codes into the embedding, and the codes of predecessors into the head."""
    (embedding,) = [weights[op.inputs["weight"]] for op in plan.ops if op.op in _EMBEDDINGS]
    (head_op,) = [op for op in plan.ops if op.outputs.get("out") == plan.logits]
    head, form = weights[head_op.inputs["weight"]], _form(head_op, plan)
    for rows in _row_chunks(embedding):
        signs = torch.rand(rows.shape, generator=generator, device=rows.device) < 0.5
        rows.copy_(signs.to(rows.dtype) * 2 - 1)
    if "weight_scale" in head_op.inputs:
        weights[head_op.inputs["weight_scale"]].fill_(1.0)
    follows = next_tokens(recipe)
    tokens = np.flatnonzero(follows >= 0)
    before = np.full(head.shape[0] * TILE_ROWS, -1, np.int64)
    before[follows[tokens]] = tokens
    predecessors = torch.from_numpy(before).to(head.device)
    width = max(1, CHUNK // (TILE_ROWS * embedding.shape[1]))
    for tile in range(0, head.shape[0], width):
        wanted = predecessors[tile * TILE_ROWS : (tile + width) * TILE_ROWS]
        codes = embedding[wanted.clamp(min=0)] * (wanted >= 0)[:, None]
        packed = packing_of(form).pack_signs(codes) if form.is_coded else pack(codes.to(head.dtype))
        head[tile : tile + width].view(torch.uint8).copy_(packed.view(torch.uint8))


def _row_chunks(matrix: torch.Tensor) -> Iterator[torch.Tensor]:
    step = max(1, CHUNK // math.prod(matrix.shape[1:]))
    for start in range(0, len(matrix), step):
        yield matrix[start : start + step]


def _ordinary(weights: Mapping[str, object]) -> tuple[int, int, int]:
    bounds = weights["ordinary_tokens"]
    assert isinstance(bounds, list | tuple)
    return int(bounds[0]), int(bounds[1]), int(str(weights["seed"]))
