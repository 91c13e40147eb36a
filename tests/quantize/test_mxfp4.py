"""MXFP4 weights: ModelOpt's bits, one rule of our own, and what is refused before the start."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from llmctl import errors
from llmctl.plugins.schemes.mxfp4.scheme import BLOCK, SPAN
from llmctl.quantize.checkpoint import Checkpoint
from llmctl.quantize.layers import import_modelopt
from llmctl.quantize.quantizer import run_quantization
from llmctl.quantize.schemes import mxfp4
from llmctl.quantize.schemes.mxfp4 import expand, quantize_blocks

MXFP4 = "w4a8_mxfp4_fp8"
Q_PROJ = "model.layers.0.self_attn.q_proj"
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.fixture(scope="module", autouse=True)
def modelopt_without_its_warnings() -> None:
    """As in the stage, where calibration has imported ModelOpt before a weight is converted."""
    import_modelopt()


def modelopts_own(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(codes, scales, the values they stand for) by ModelOpt alone."""
    from modelopt.torch.quantization.qtensor import MXFP4QTensor

    quantized, scales = MXFP4QTensor.quantize(weight, BLOCK)
    values = quantized.dequantize(torch.float32, scale=scales, block_sizes={-1: BLOCK})
    return quantized._quantized_data, scales.view(len(weight), -1), values


def random_weight(
    rows: int, blocks: int, span: int, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Normal values whose blocks are scaled by random powers of two, 2^-span to 1."""
    generator = torch.Generator().manual_seed(rows + blocks + span)
    values = torch.randn((rows, blocks, BLOCK), generator=generator)
    shift = torch.randint(-span, 1, (rows, blocks, 1), generator=generator)
    return torch.ldexp(values, shift).view(rows, -1).to(dtype)


def exponent_below(top: int, low: int) -> torch.Tensor:
    """One row of two blocks; block exponents are `top` and `low`, the second block a ramp."""
    first, second = torch.zeros(BLOCK), torch.arange(BLOCK) / (BLOCK - 1) * 6
    first[3] = -6
    return torch.cat([first * 2.0**top, second * 2.0**low]).view(1, -1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "blocks"), [(1, 1), (7, 3), (64, 5)])
def test_codes_scales_and_values_are_modelopts(rows: int, blocks: int, dtype: torch.dtype) -> None:
    weight = random_weight(rows, blocks, 9, dtype)
    codes, scales = quantize_blocks(weight)
    wanted_codes, wanted_scales, values = modelopts_own(weight)
    assert torch.equal(codes, wanted_codes)
    assert torch.equal(scales, wanted_scales)
    assert torch.equal(expand(codes, scales), values)


def test_the_even_column_is_the_low_nibble_and_a_tie_goes_to_the_smaller_code() -> None:
    weight = torch.zeros(1, BLOCK)
    weight[0, :8] = torch.tensor([6, -4, 5, 2.5, 0.25, -0.25, 0.26, -0.75])
    codes, scales = quantize_blocks(weight)
    assert scales.tolist() == [[127]]
    nibbles = [n for byte in codes[0, :4].tolist() for n in (byte & 15, byte >> 4)]
    assert nibbles == [7, 14, 6, 4, 0, 8, 1, 9]
    assert expand(codes, scales)[0, :8].tolist() == [6, -4, 4, 2, 0, 0, 0.5, -0.5]


def test_a_weight_converted_in_pieces_is_the_weight_converted_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weight = random_weight(13, 3, 30)
    whole = quantize_blocks(weight)
    for piece_values in (1, 4 * weight.shape[1]):  # a row, and four with a rest of one
        monkeypatch.setattr(mxfp4, "PIECE_VALUES", piece_values)
        assert all(map(torch.equal, quantize_blocks(weight), whole))


# ---- no block more than 14 exponents below its row's largest ----


@pytest.mark.parametrize("top", [-100, 0, 120])
def test_a_block_fourteen_exponents_below_stays_as_modelopt_has_it(top: int) -> None:
    weight = exponent_below(top, top - 14)
    codes, scales = quantize_blocks(weight)
    assert scales.tolist() == [[127 + top, 127 + top - 14]]
    wanted_codes, wanted_scales, _ = modelopts_own(weight)
    assert torch.equal(codes, wanted_codes) and torch.equal(scales, wanted_scales)


@pytest.mark.parametrize("top", [-100, 0, 120])
@pytest.mark.parametrize("below", [1, 2, 3, 8])
def test_a_block_further_below_is_rounded_to_the_lowest_exponent_allowed(
    top: int, below: int
) -> None:
    floor = top - SPAN
    weight = exponent_below(top, floor - below)
    codes, scales = quantize_blocks(weight)
    assert scales.tolist() == [[127 + top, 127 + floor]]
    # In units of the floor the block is a ramp to at most 3, whose nearest codes, the smaller one
    # at a tie, are these.
    ramp = torch.ldexp(weight[:, BLOCK:], torch.tensor(-floor))
    sizes = torch.tensor([0, 0.5, 1, 1.5, 2, 3])
    nearest = sizes[(ramp.view(-1, 1) - sizes).abs().argmin(dim=1)]
    found = expand(codes, scales)
    assert torch.equal(found[0, BLOCK:], torch.ldexp(nearest, torch.tensor(floor)))
    assert nearest.any() == (below <= 4)  # the largest, 6 * 2^-below, is or is not above 0.25
    error = (found - weight).abs().max() / weight.abs().max()
    assert error <= 2.0**-15 / 3


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_code_relative_to_its_row_is_an_e4m3_number(dtype: torch.dtype) -> None:
    weight = random_weight(40, 6, 24, dtype)
    codes, scales = quantize_blocks(weight)
    _, unlimited, _ = modelopts_own(weight)
    is_raised = scales != unlimited
    assert 10 < is_raised.sum() < is_raised.numel() / 2  # the rule is at work, and not everywhere
    top = scales.amax(dim=1, keepdim=True)
    assert torch.equal(scales, unlimited.maximum(top - SPAN))
    relative = torch.ldexp(expand(codes, scales), 127 + 6 - top.int())
    assert relative.abs().max() <= 384
    assert torch.equal(relative.to(torch.float8_e4m3fn).float(), relative)
    kept = ~is_raised.repeat_interleave(BLOCK, dim=1)
    assert torch.equal(expand(codes, scales)[kept], modelopts_own(weight)[2][kept])


def test_a_row_of_zeros_and_a_block_of_zeros_stay_as_modelopt_has_them() -> None:
    weight = torch.zeros(3, 2 * BLOCK)
    weight[1, 5] = 96.0  # its other block is zero, and 131 exponents below
    weight[2] = 1e-44  # below every code of the lowest exponent
    codes, scales = quantize_blocks(weight)
    wanted_codes, wanted_scales, _ = modelopts_own(weight)
    assert torch.equal(codes, wanted_codes) and torch.equal(scales, wanted_scales)
    assert scales.tolist() == [[0, 0], [131, 0], [0, 0]]
    assert torch.equal(expand(codes, scales).nonzero(), torch.tensor([[1, 5]]))


# ---- the stage ----


def test_an_all_zero_weight_stays_exactly_zero(
    editable: Callable[..., Path], plan_tiny: Callable[..., Any], tmp_path: Path
) -> None:
    source = editable(lambda t: t[Q_PROJ + ".weight"].zero_())
    run_quantization(plan_tiny(source, tmp_path / "out", qformat=MXFP4))
    result = Checkpoint.open(tmp_path / "out")
    parts = (result.read(f"{Q_PROJ}.{part}") for part in ("weight", "weight_scale"))
    assert not expand(*parts).any()


def test_a_weight_that_is_not_finite_is_refused_by_name(
    editable: Callable[..., Path], plan_tiny: Callable[..., Any], tmp_path: Path
) -> None:
    source = editable(lambda t: t[Q_PROJ + ".weight"].view(-1)[3:4].fill_(float("inf")))
    with pytest.raises(errors.BadTensorValue, match=Q_PROJ):
        run_quantization(plan_tiny(source, tmp_path / "out", qformat=MXFP4))
    assert not list(tmp_path.glob("*out*"))


def test_inputs_that_are_no_multiple_of_a_block_are_refused_before_any_write(
    checkpoints: Callable[..., Path], plan_tiny: Callable[..., Any], tmp_path: Path
) -> None:
    wanted = f"{MXFP4}: {Q_PROJ} has 112 inputs; a multiple of 32 is wanted"
    with pytest.raises(errors.Unsupported, match=wanted) as caught:
        plan_tiny(checkpoints("llama-tied-7-heads"), tmp_path / "out", qformat=MXFP4)
    assert caught.value.fix == "--qformat fp8"
    assert not list(tmp_path.iterdir())
