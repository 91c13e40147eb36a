"""The table of weight schemes: every row is whole, and no two rows can be taken for each other."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

import pytest
import torch

from llmctl.builder.schemes.table import READERS
from llmctl.errors import CorruptEngine
from llmctl.plugins.backends.backend import BACKENDS
from llmctl.plugins.core.calls import OpCall
from llmctl.plugins.core.examples import make_example
from llmctl.plugins.core.op_spec import FP8
from llmctl.plugins.core.operators import SPECS, check_call
from llmctl.plugins.ops.packed_linear.layout import numbers_of
from llmctl.plugins.schemes.scheme import packing_of
from llmctl.plugins.schemes.table import (
    FORMS,
    SCHEMES,
    find_form,
    form_macros,
    quantized_schemes,
    scheme_of_algo,
    titles,
)
from llmctl.quantize.schemes.table import WRITERS

CODED = [form for form in FORMS.values() if form.is_coded]


def test_every_quantized_scheme_is_read_and_written_and_has_a_backend() -> None:
    names = [scheme.name for scheme in quantized_schemes()]
    assert names == list(READERS) == list(WRITERS) == ["fp8", "mxfp4"]
    for backend in BACKENDS.values():
        assert set(backend.weight_schemes) <= set(SCHEMES)
    assert set(BACKENDS["cuda"].weight_schemes) == set(SCHEMES)
    assert titles() == "FP8 or MXFP4"


def test_what_tells_schemes_and_forms_apart_is_unique() -> None:
    algorithms = chain.from_iterable(scheme.algorithms for scheme in quantized_schemes())
    for names in (
        [scheme.qformat for scheme in quantized_schemes()],
        [algorithm.name for algorithm in algorithms],
        [form.name for scheme in SCHEMES.values() for form in scheme.forms],
        [form.word for form in FORMS.values()],  # kernels of two forms never share a name
        [form.macro for form in CODED],
    ):
        assert len(set(names)) == len(names)


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
def test_a_form_takes_the_bytes_that_the_scheme_says(scheme) -> None:
    for form in scheme.forms:
        assert form.block_bytes / 64 / form.columns == scheme.weight_bytes
        assert form.columns * form.interval == (512 if form.numbers == FP8 else 256)


@pytest.mark.parametrize("scheme", quantized_schemes(), ids=lambda scheme: scheme.name)
def test_a_checkpoint_takes_the_bytes_that_the_scheme_says(scheme) -> None:
    weight, scale = scheme.storage.weight_shape(64, 512), scheme.storage.scale_shape(64, 512)
    stored = torch.Size(weight).numel() + (torch.Size(scale).numel() if scale else 0)
    assert stored == 64 * 512 * scheme.weight_bytes  # elements of all are bytes


@pytest.mark.parametrize(
    ("algo", "name"),
    [
        ("FP8", "fp8"),
        ("FP8_PER_CHANNEL_PER_TOKEN", "fp8"),
        ("W4A8_MXFP4_FP8", "mxfp4"),
        ("FP8_BLOCK_SCALES", None),
        ("NVFP4", None),
        (None, None),
    ],
)
def test_a_scheme_is_found_by_modelopts_name(algo, name) -> None:
    found = scheme_of_algo(algo)
    assert (found and found.name) == name


def test_sources_learn_the_form_by_one_macro() -> None:
    assert form_macros(FORMS["mxfp4"]) == {"MXFP4": 1}
    assert form_macros(FORMS[FP8]) == form_macros(FORMS["bfloat16"]) == {"MXFP4": 0}


@pytest.mark.parametrize(
    ("dtype", "attributes", "text"),
    [
        ("uint8", {}, "a weight of uint8 without a scheme is not known"),
        ("uint8", {"scheme": "int3"}, "scheme 'int3' is not known"),
        (FP8, {"scheme": "mxfp4"}, "'mxfp4' does not go with a weight of float8"),
        (FP8, {"scheme": FP8}, "does not go with"),  # its dtype tells
        ("float32", {}, "a weight of float32"),
    ],
)
def test_a_scheme_that_a_weight_cannot_have_is_refused(dtype, attributes, text) -> None:
    with pytest.raises(CorruptEngine, match=text):
        find_form(dtype, attributes)


@pytest.mark.parametrize("op", ["packed_linear", "packed_linear_swiglu", "packed_linear_rope_kv"])
def test_a_plan_with_such_a_scheme_is_refused(op) -> None:
    case = next(case for case in SPECS[op].cases if case["dtype"] == "mxfp4")
    call = make_example(op, case).call
    check_call(call)
    nameless = {name: value for name, value in call.attributes.items() if name != "scheme"}

    def refuse(call: OpCall, text: str) -> None:
        with pytest.raises(CorruptEngine, match=text):
            check_call(call)

    refuse(replace(call, attributes=nameless), "uint8 without a scheme")
    refuse(replace(call, attributes=nameless | {"scheme": "int3"}), "'int3' is not known")
    weight = torch.zeros((*call.inputs["weight"].shape[:3], 128), dtype=torch.uint8)
    refuse(replace(call, inputs={**call.inputs, "weight": weight}), "but C is 136")


@pytest.mark.parametrize("form", CODED, ids=lambda form: form.name)
def test_halves_are_packed_exactly_and_padding_is_zero(form) -> None:
    packing = packing_of(form)
    halves = torch.randint(-3, 4, (70, 288), generator=torch.Generator().manual_seed(1)) / 2
    assert torch.equal(numbers_of(packing.pack_halves(halves), 70, 288, form).float(), halves)
    order = torch.tensor([*range(60), -1, -1, -1, -1])
    made = packing.pack_random(order, 288, torch.Generator().manual_seed(2))
    numbers = numbers_of(made, 64, 288, form).float()
    assert not numbers[60:].any() and numbers[:60].abs().max() <= 448
    assert (numbers[:60] != 0).float().mean() > 0.8


@pytest.mark.parametrize("form", CODED, ids=lambda form: form.name)
def test_random_weights_have_the_spread_that_the_form_says(form) -> None:
    packed = torch.zeros((16, 8, 64, form.block_bytes // 64), dtype=getattr(torch, form.dtype))
    packing_of(form).fill_random(packed, torch.Generator().manual_seed(3))
    found = numbers_of(packed, 1024, 8 * form.columns, form).float()
    assert float(found.square().mean().sqrt()) == pytest.approx(form.spread, rel=0.01)
