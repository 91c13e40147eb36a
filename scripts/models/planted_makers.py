"""Random weights of planted checkpoints as the schemes store them: a maker a scheme."""

from __future__ import annotations

import math
from typing import Protocol

import torch

from llmctl.plugins.core.op_spec import FP8_MAX
from llmctl.plugins.schemes.fp8.scheme import SPREAD as FP8_SPREAD
from llmctl.plugins.schemes.mxfp4.packing import RANDOM_STEPS, UNIT_STEP, half_codes
from llmctl.plugins.schemes.mxfp4.scheme import BLOCK
from llmctl.plugins.schemes.mxfp4.scheme import SPREAD as MXFP4_SPREAD
from llmctl.plugins.schemes.scheme import E8M0_BIAS
from llmctl.plugins.schemes.table import FP8, MXFP4
from llmctl.runtime.engines.planted_weights import CHUNK

Stored = tuple[torch.Tensor, torch.Tensor]  # a weight and its scales, as a scheme stores them


class Maker(Protocol):
    """Makes the weights of one scheme."""

    def random(
        self, dims: tuple[int, int], spread: float, generator: torch.Generator
    ) -> Stored: ...

    def halves(self, weight: torch.Tensor) -> Stored:
        """Of a weight of multiples of 1/2 from -1.5 to 1.5; exact."""


class Fp8Maker(Maker):
    """Normal values, within FP8's range."""

    def random(self, dims: tuple[int, int], spread: float, generator: torch.Generator) -> Stored:
        weight = random_values(dims, FP8_SPREAD, torch.float8_e4m3fn, generator)
        return weight, torch.tensor(spread / FP8_SPREAD)

    def halves(self, weight: torch.Tensor) -> Stored:
        return weight.to(torch.float8_e4m3fn), torch.tensor(1.0)


class Mxfp4Maker(Maker):
    """Codes drawn evenly, blocks of three neighbouring powers of two, the spread about this."""

    def random(self, dims: tuple[int, int], spread: float, generator: torch.Generator) -> Stored:
        rows, columns = dims
        steps = torch.randint(*RANDOM_STEPS, (rows, columns // BLOCK), generator=generator)
        power = round(math.log2(spread / MXFP4_SPREAD)) - UNIT_STEP + E8M0_BIAS
        codes = torch.randint(0, 256, (rows, columns // 2), generator=generator, dtype=torch.uint8)
        return codes, (steps + power).to(torch.uint8)

    def halves(self, weight: torch.Tensor) -> Stored:
        blocks = MXFP4.storage.scale_shape(*weight.shape)
        return half_codes(weight), torch.full(blocks, E8M0_BIAS, dtype=torch.uint8)


MAKERS: dict[str, Maker] = {FP8.name: Fp8Maker(), MXFP4.name: Mxfp4Maker()}


def random_values(
    dims: tuple[int, int], spread: float, dtype: torch.dtype, generator: torch.Generator
) -> torch.Tensor:
    """Normal values of this spread, FP8 within its range."""
    weight = torch.empty(dims, dtype=dtype)
    for rows in weight.split(max(1, CHUNK // dims[1])):
        values = torch.randn(rows.shape, generator=generator) * spread
        rows.copy_(values.clamp_(-FP8_MAX, FP8_MAX) if dtype.itemsize == 1 else values)
    return weight
