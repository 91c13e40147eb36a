"""Packed products give one set of bits: by the product that normalizes and by rms_norm before it,
and by the kernels for few tokens and for many, with every epilogue."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from support.gpu import execute
from support.kernel import device_step

from llmctl.plugins.backends.cuda.compiler import compile_kernel
from llmctl.plugins.backends.cuda.kernel_spec import (
    Launch,
    LaunchEnv,
    StepLimits,
    StepShape,
)
from llmctl.plugins.core.calls import OpCall
from llmctl.plugins.core.examples import Example, add_norm, make_example
from llmctl.plugins.ops.packed_linear.arguments import form_of
from llmctl.plugins.ops.packed_linear.decode import DecodeVariant, decode_launch
from llmctl.plugins.ops.packed_linear.expansion import expand_launch, expanded_call
from llmctl.plugins.ops.packed_linear.kernel import launches
from llmctl.plugins.ops.packed_linear.layout import numbers_of, pack
from llmctl.plugins.ops.packed_linear.prefill import prefill_launch, variants_of
from llmctl.plugins.schemes.table import FORMS

FP8 = "float8_e4m3fn"
CODED = tuple(form.name for form in FORMS.values() if form.is_coded)
TOKENS = 300  # several tiles of every kernel, the last ones partly empty
EPSILON = 1e-5
NORM_CASES = [  # dtype, operator, K, variant
    (FP8, "packed_linear_rope_kv", 2048, "n8r1c4s2k2g0f0+norm8"),
    (FP8, "packed_linear_swiglu", 2048, "n8r1c2s4k1g0f0+norm8"),
    (FP8, "packed_linear_rope_kv", 3072, "n8r2c1s10k2g0f0+norm12"),
    (FP8, "packed_linear_swiglu", 3072, "n8r1c2s5k1g0f0+norm12"),
    (FP8, "packed_linear_swiglu", 4096, "n8r1c2s10k1g0f0+norm16"),
    (FP8, "packed_linear", 1024, "n8r1c1s6k0g0f0+norm4"),
    (FP8, "packed_linear", 5120, "n8r1c1s6k4g0f0+norm10"),
    (FP8, "packed_linear", 8192, "n8r1c1s6k1g0f0+norm16"),
    ("bfloat16", "packed_linear", 2048, "n8r1c1s6k1g0f0+norm8"),
    ("bfloat16", "packed_linear_swiglu", 3072, "n8r1c2s4k0g0f0+norm6"),
    ("float16", "packed_linear", 4096, "n8r1c1s6k1g0f0+norm8"),
    ("float16", "packed_linear_rope_kv", 1024, "n8r1c1s6k1g0f0+norm4"),
]
PLAIN_CASES = [  # dtype, operator, K, cache: every epilogue, a K that ends within an interval
    (dtype, op, inner, kv_dtype)
    for dtype, op, kv_dtype in (
        (FP8, "packed_linear", FP8),
        (FP8, "packed_linear_swiglu", FP8),
        (FP8, "packed_linear_rope_kv", FP8),
        (FP8, "packed_linear_rope_kv", "int8"),
        ("bfloat16", "packed_linear_swiglu", "bfloat16"),
        ("bfloat16", "packed_linear_rope_kv", "bfloat16"),
        ("float16", "packed_linear", "float16"),
        ("float16", "packed_linear_rope_kv", "int8"),
        *((coded, "packed_linear", FP8) for coded in CODED),
        *((coded, "packed_linear_swiglu", FP8) for coded in CODED),
        *((coded, "packed_linear_rope_kv", FP8) for coded in CODED),
    )
    for inner in (1056, 4096)
]
FEW = ("n8r1c1s6k1g0f0", "n16r2c1s4k1g0f0", "n48r1c1s4k1g0f4", "n64r1c1s4k1g0f0", "n8r1c1s6k2g0f0")
FEW += ("n16r1c1s6k1g0f2", "n8r1c1s6k2g0f1")  # the ring's first turn held back
FEW += ("n24r2c1s6k1g0f2",)  # two row tiles whose constants are loaded early
FEW += ("n16r1c1s6k1g0f2+ahead2",)  # two blocks load weights for the others
FEW += ("n64r1c1s6k1g0f0+pair", "n8r1c1s6k1g0f0+pair")  # a block of the last pair has no tokens
SHARED_TILES = ("n16r1c1s6k0g0f0", "n16r1c1s6k0g0f1", "n48r1c1s9k0g0f0")


def make(op: str, dtype: str, inner: int, *, heads: int = 8, kv_dtype: str = FP8) -> Example:
    """A product of TOKENS tokens on the device, 384 to 768 rows."""
    is_fp8 = FORMS[dtype].numbers == FP8
    case = {"inner": inner, "dtype": dtype, "x_scaling": "static", "bias": False, "tokens": TOKENS}
    case |= {"model_dtype": "bfloat16" if is_fp8 else dtype, "scaling": "none"}
    if op == "packed_linear":
        case |= {"outputs": 384, "out": "T"}
    elif op == "packed_linear_swiglu":
        case |= {"hidden": 256, "scaling": "static" if is_fp8 else "none"}
    else:
        case |= {"num_heads": heads, "num_kv_heads": 2, "head_size": 64, "kv_dtype": kv_dtype}
        case["requests"] = f"{TOKENS}+40"
    return make_example(op, case, seed=3, device="cuda")


def environment(example: Example) -> LaunchEnv:
    step = device_step(example.step, "cuda")
    cache = example.kv_cache
    kv_dtype = str(cache.dtype).removeprefix("torch.")
    limits = StepLimits(TOKENS, TOKENS, 1, 512, 0, cache.shape[4], kv_dtype)
    scratch: dict[str, torch.Tensor] = {}

    def room(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return scratch.setdefault(name, torch.zeros(shape, dtype=dtype, device="cuda"))

    return LaunchEnv(step, cache, limits, "tokens", room)


def outcome(call: OpCall, cache: torch.Tensor, found: list[Launch]) -> list[torch.Tensor]:
    """All that launches write, as bytes, over a known background."""
    written = [*call.outputs.values(), cache]
    for tensor in written:
        tensor.view(torch.uint8).fill_(0x55)
    torch.cuda.synchronize()
    execute(found)
    return [tensor.view(torch.uint8).clone() for tensor in written]


def normed(op: str, dtype: str, inner: int) -> Example:
    """A product with a norm, over rows of very different size."""
    example = make(op, dtype, inner)
    call = example.call
    generator = torch.Generator("cuda").manual_seed(5)
    inputs = dict(call.inputs)
    with torch.device("cuda"):
        model = "bfloat16" if dtype == FP8 else dtype
        made = {**call.outputs, **add_norm(inputs, model, generator)}
    for row, factor in enumerate((1.0, 1e-4, 100.0, 0.0, 7.0)):
        inputs["x"][row] *= factor
        inputs["residual"][row] *= factor
    inputs["x"][5, 17] = float("nan")
    inputs["x"][6, 3] = float("inf")
    attributes = {**call.attributes, "epsilon": EPSILON}
    return replace(example, call=OpCall(call.op, call.name, inputs, made, attributes))


def few_variants(call: OpCall) -> list[DecodeVariant]:
    weight = call.inputs["weight"]
    row_tiles, chunks = weight.shape[:2]
    parsed = (DecodeVariant.parse(text, form_of(call)) for text in FEW)
    return [v for v in parsed if v.fits(row_tiles, chunks, weight.element_size() == 1)]


def shared_tiles(call: OpCall) -> list[DecodeVariant]:
    """Variants whose blocks hand sums on."""
    form = form_of(call)
    return [DecodeVariant.parse(text, form) for text in SHARED_TILES]


def many_launches(call: OpCall, env: LaunchEnv) -> dict[str, list[Launch]]:
    """Of every tile shape; weights of codes are expanded before."""
    if not form_of(call).is_coded:
        return {v.name: [prefill_launch(call, env, TOKENS, v)] for v in variants_of(call)}
    fp8 = expanded_call(call, env.scratch)
    return {
        v.name: [
            expand_launch(call, fp8),
            prefill_launch(fp8, env, TOKENS, v, is_expanded=True),
        ]
        for v in variants_of(fp8)
    }


def norm_launches(dtype: str, op: str, inner: int, text: str, tokens: int) -> Iterator[Launch]:
    """The launch that normalizes, then those that do the same with rms_norm."""
    example = normed(op, dtype, inner)
    env = environment(example)
    yield decode_launch(example.call, env, tokens, DecodeVariant.parse(text))
    yield from launches(example.call, env, StepShape(tokens, 1, tokens, tokens, 512))


def plain_launches(dtype: str, op: str, inner: int, kv_dtype: str) -> Iterator[Launch]:
    example = make(op, dtype, inner, kv_dtype=kv_dtype)
    call, env = example.call, environment(example)
    yield from itertools.chain.from_iterable(many_launches(call, env).values())
    yield from (decode_launch(call, env, TOKENS, variant) for variant in few_variants(call))
    yield from (decode_launch(call, env, 11, variant) for variant in shared_tiles(call))


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """All kernels at once, on all cores."""
    found = [launch for case in NORM_CASES for launch in norm_launches(*case, tokens=1)]
    found += [launch for case in PLAIN_CASES for launch in plain_launches(*case)]
    specs = {launch.spec.name: launch.spec for launch in found}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(compile_kernel, specs.values()))


@pytest.mark.parametrize(("dtype", "op", "inner", "text"), NORM_CASES)
def test_a_product_that_normalizes_gives_the_bits_of_rms_norm_before_it(dtype, op, inner, text):
    example = normed(op, dtype, inner)
    call, env, variant = example.call, environment(example), DecodeVariant.parse(text)
    row_tiles, chunks = call.inputs["weight"].shape[:2]
    assert variant.fits(row_tiles, chunks, dtype == FP8)
    normal = list(call.outputs).index("normal")
    for tokens in (1, 2, 8):
        shape = StepShape(tokens, 1, tokens, tokens, 512)
        wanted = outcome(call, env.kv_cache, launches(call, env, shape))
        found = outcome(call, env.kv_cache, [decode_launch(call, env, tokens, variant)])
        assert (found[normal] == 0x55).all(), "nobody reads the normalized rows"
        for role, left, right in zip((*call.outputs, "cache"), found, wanted, strict=True):
            assert role == "normal" or torch.equal(left, right), (role, tokens)


@pytest.mark.parametrize("scale", [2.0**-100, 2.0**-20, 0.037, 3.0, 2.0**100, 0.0, float("inf")])
def test_any_static_scale_quantizes_as_in_rms_norm(scale):
    example = normed("packed_linear", FP8, 8192)
    call, env = example.call, environment(example)
    call.inputs["x_scale"].fill_(scale)
    call.inputs["weight_scale"].fill_(1.0)
    wanted = outcome(call, env.kv_cache, launches(call, env, StepShape(8, 1, 8, 8, 512)))
    variant = DecodeVariant.parse("n8r1c1s6k1g0f0+norm16")
    found = outcome(call, env.kv_cache, [decode_launch(call, env, 8, variant)])
    assert torch.equal(found[0], wanted[0])


@pytest.mark.parametrize(("dtype", "op", "inner", "kv_dtype"), PLAIN_CASES)
def test_few_and_many_tokens_give_the_same_bits(dtype, op, inner, kv_dtype):
    """Every epilogue of decode.cu and prefill.cu, the pages of the cache included."""
    example = make(op, dtype, inner, kv_dtype=kv_dtype)
    call, env = example.call, environment(example)
    first, *others = many_launches(call, env).values()
    wanted = outcome(call, env.kv_cache, first)
    for other in others:
        found = outcome(call, env.kv_cache, other)
        assert all(map(torch.equal, found, wanted)), other[-1].spec.name
    for variant in few_variants(call):
        found = outcome(call, env.kv_cache, [decode_launch(call, env, TOKENS, variant)])
        assert all(map(torch.equal, found, wanted)), str(variant)
    variants = (
        few_variants(call)[0],
        *shared_tiles(call),
    )  # those of shared tiles have one of tokens
    for tokens, variant in itertools.product((1, 11), variants):
        found = outcome(call, env.kv_cache, [decode_launch(call, env, tokens, variant)])
        for left, right in zip(found[:-1], wanted[:-1], strict=True):
            assert torch.equal(
                left[:tokens], right[:tokens]
            )  # rows of fewer tokens are those of all
            assert (left[tokens:] == 0x55).all()


@pytest.mark.parametrize("inner", [1056, 4096])
@pytest.mark.parametrize("op", ["packed_linear", "packed_linear_rope_kv"])
def test_equal_shares_of_blocks_give_the_bits_of_whole_tiles(op, inner):
    """As on devices of few multiprocessors, which leave parts of one or two tiles to the next."""
    example = make(op, FP8, inner)
    call = example.call
    for num_sms, tokens in ((2, 100), (3, 100), (4, 200), (6, TOKENS), (7, TOKENS)):
        env = environment(example)
        few = replace(env, limits=replace(env.limits, num_sms=num_sms))
        for variant in (v for v in variants_of(call) if v.is_even):
            whole = replace(variant, is_even=False)
            wanted = outcome(call, env.kv_cache, [prefill_launch(call, env, tokens, whole)])
            for _ in range(2):  # flags are back
                found = outcome(call, env.kv_cache, [prefill_launch(call, few, tokens, variant)])
                assert all(map(torch.equal, found, wanted)), (variant.name, num_sms)
            assert not few.scratch("packed_linear.is_left", (), torch.int32).any()


@pytest.mark.parametrize("coded", CODED)
@pytest.mark.parametrize("inner", [1056, 4096])
@pytest.mark.parametrize("op", ["packed_linear", "packed_linear_swiglu", "packed_linear_rope_kv"])
def test_codes_give_the_bits_of_the_fp8_weight_that_they_are(op, inner, coded):
    example = make(op, coded, inner)
    call, env = example.call, environment(example)
    packed = call.inputs["weight"]
    weight = pack(numbers_of(packed, packed.shape[0] * packed.shape[2], inner, FORMS[coded]))
    attributes = {name: value for name, value in call.attributes.items() if name != "scheme"}
    fp8 = replace(call, inputs={**call.inputs, "weight": weight}, attributes=attributes)
    for tokens in (1, 11, TOKENS):
        shape = StepShape(tokens, 1, tokens, tokens, 512)
        wanted = outcome(call, env.kv_cache, launches(fp8, env, shape))
        found = outcome(call, env.kv_cache, launches(call, env, shape))
        assert all(map(torch.equal, found, wanted)), tokens


@pytest.mark.parametrize("coded", CODED)
def test_an_expanded_weight_is_the_packed_fp8_weight(coded):
    example = make("packed_linear", coded, 1056)
    call, env = example.call, environment(example)
    expanded = expanded_call(call, env.scratch)
    execute([expand_launch(call, expanded)])
    found = expanded.inputs["weight"]
    packed = call.inputs["weight"]
    rows, columns = packed.shape[0] * packed.shape[2], packed.shape[1] * FORMS[coded].columns
    wanted = pack(numbers_of(packed, rows, columns, FORMS[coded]))
    assert torch.equal(found.view(torch.uint8), wanted.view(torch.uint8))
