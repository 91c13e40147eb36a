"""What tests of device sampling share: parameters, rows and logits that reach every path."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch

from llmctl.plugins.ops.sampling.arrays import SamplingArrays
from llmctl.plugins.ops.sampling.reference import survivors
from llmctl.plugins.ops.sampling.spec import SamplingRow

MASS_TOLERANCE = 1e-11  # a mass this close to the top-p border may fall on either side


@dataclass(frozen=True)
class Params:
    temperature: float = 1.0
    top_k: int | None = 0
    top_p: float | None = None
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    is_greedy: bool = False


CASES = [
    Params(),
    Params(temperature=0.7),
    Params(temperature=1e-8),
    Params(temperature=1e-300),
    Params(temperature=1e30),
    Params(temperature=math.inf),
    Params(top_k=1),
    Params(top_k=5),
    Params(temperature=1.9, top_k=50),
    Params(top_k=1000),
    Params(top_p=0.0),
    Params(top_p=0.01),
    Params(temperature=0.6, top_p=0.5),
    Params(top_p=0.9),
    Params(temperature=5.0, top_p=0.95),
    Params(top_p=0.999),
    Params(temperature=1e300, top_p=0.7),
    Params(top_p=1.0),
    Params(min_p=0.1),
    Params(min_p=1.0),
    Params(temperature=1e30, min_p=0.3),
    Params(temperature=math.inf, min_p=1.0),
    Params(top_p=0.8, min_p=0.05),
    Params(temperature=0.6, top_k=20, top_p=0.95, min_p=0.02),
    Params(temperature=3.0, top_k=50, top_p=0.5),
    Params(temperature=1e30, top_k=50, top_p=0.5),
    Params(is_greedy=True),
]


def make_arrays(
    rows: Sequence[SamplingRow], device: str = "cpu"
) -> tuple[SamplingArrays, torch.Tensor]:
    arrays = SamplingArrays.allocate(len(rows), "cpu")
    for index, row in enumerate(rows):
        params = row.params
        arrays.temperature[index] = params.temperature
        arrays.top_k[index] = params.top_k or 0
        arrays.top_p[index] = 1.0 if params.top_p is None else params.top_p
        arrays.min_p[index] = params.min_p
        for name, word in (("seed_low", row.seed), ("seed_high", row.seed >> 32)):
            bits = np.array([word & 0xFFFFFFFF], np.uint32).view(np.int32)
            getattr(arrays, name)[index] = int(bits[0])
        arrays.stream[index] = row.stream
        arrays.greedy[index] = int(params.is_greedy)
    positions = torch.tensor([row.position for row in rows], dtype=torch.int32)
    moved = {f.name: getattr(arrays, f.name).to(device) for f in fields(arrays)}
    return SamplingArrays(**moved), positions.to(device)


def make_rows(params: Params, count: int, seed: int) -> list[SamplingRow]:
    generator = np.random.default_rng(seed)
    return [
        SamplingRow(
            params,
            int(generator.integers(2**64, dtype=np.uint64)),
            int(generator.integers(2**31)),
            stream=index % 3,
        )
        for index in range(count)
    ]


def make_logits(vocab: int, seed: int) -> np.ndarray:
    """Flat, ordinary and peaked rows, each also with ties, and one with banned ids."""
    generator = np.random.default_rng(seed)
    rows = [generator.standard_normal(vocab) * scale for scale in (0, 1, 4, 30)]
    banned = np.where(generator.random(vocab) < 0.5, -np.inf, rows[1])
    return np.array([*rows, *map(np.round, rows), banned], np.float32)


def is_border_tie(logits: np.ndarray, row: SamplingRow) -> bool:
    """True where rounding decides which ids top-p keeps: some tail holds 1 - top_p exactly."""
    params = row.params
    if params.top_p is None:
        return False
    _, scores = survivors(logits, replace(params, top_p=None, min_p=0.0))
    probs = np.sort(np.exp(scores))
    distance = abs(probs.cumsum() / probs.sum() - (1 - params.top_p))
    return bool((distance < MASS_TOLERANCE).any())
