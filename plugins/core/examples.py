"""Random calls for the cases that specs list: what kernel tests and benchmarks run.

An example owns its tensors, the step that goes with them and a paged cache already filled with the
tokens that "were computed before". Everything follows from the case and the seed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch

from llmctl.plugins.core.calls import OpCall
from llmctl.plugins.core.example_heads import HEAD_MAKERS
from llmctl.plugins.core.example_parts import (
    Example,
    Tensors,
    empty,
    filled_cache,
    head_attributes,
    kv_scales,
    make_step,
    no_cache,
    parse_requests,
    plain_step,
    random_tensor,
)
from llmctl.plugins.core.example_ranks import RANK_MAKERS
from llmctl.plugins.core.op_spec import FP8, Case
from llmctl.plugins.ops.packed_linear.layout import (
    pack,
    pair_order,
    plain_order,
    reorder,
    rope_order,
)
from llmctl.plugins.schemes.scheme import packing_of
from llmctl.plugins.schemes.table import FORMS

__all__ = ["Example", "make_example"]


def make_example(op: str, case: Case, seed: int = 0, device: str = "cpu") -> Example:
    """Build the inputs of one case of `SPECS[op]`; outputs start as noise that must be replaced.

    The values depend on the device's own random generator.
    """
    generator = torch.Generator(device).manual_seed(seed)
    with torch.device(device):
        return _MAKERS[op](case, generator)


def _quantized_output(
    case: Case, shape: tuple[int, int], inputs: Tensors, spread: float = 3.0
) -> Tensors:
    scaling = case["scaling"]
    out = empty(shape, str(case["dtype"]) if scaling == "none" else "float8_e4m3fn")
    if scaling == "static":
        inputs["scale"] = torch.tensor([spread / 448])
    if scaling == "per_token":
        return {"out": out, "out_scale": empty(shape[:1], "float32")}
    return {"out": out}


def _embedding(case: Case, generator: torch.Generator) -> Example:
    tokens, vocab, hidden = (int(case[k]) for k in ("tokens", "vocab", "hidden"))
    dtype = str(case["dtype"])
    inputs = {"weight": random_tensor((vocab, hidden), dtype, generator)}
    call = OpCall("embedding", "embedding", inputs, {"out": empty((tokens, hidden), dtype)}, {})
    return Example(call, plain_step(tokens, vocab), no_cache())


def _embedding_norm(case: Case, generator: torch.Generator) -> Example:
    tokens, vocab, hidden = (int(case[k]) for k in ("tokens", "vocab", "hidden"))
    shape, dtype = (tokens, hidden), str(case["dtype"])
    inputs = {
        "weight": random_tensor((vocab, hidden), dtype, generator),
        "norm_weight": random_tensor((hidden,), dtype, generator),
    }
    outputs = {"embedded": empty(shape, dtype), **_quantized_output(case, shape, inputs)}
    call = OpCall("embedding_norm", "embedding", inputs, outputs, {"epsilon": 1e-5})
    return Example(call, plain_step(tokens, vocab), no_cache())


def _gather_rows(case: Case, generator: torch.Generator) -> Example:
    tokens, rows, hidden = (int(case[k]) for k in ("tokens", "rows", "hidden"))
    dtype = str(case["dtype"])
    step = plain_step(tokens)
    step.logit_rows = np.sort(np.random.default_rng(0).permutation(tokens)[:rows]).astype(np.int32)
    inputs = {"x": random_tensor((tokens, hidden), dtype, generator)}
    call = OpCall("gather_rows", "gather", inputs, {"out": empty((rows, hidden), dtype)}, {})
    return Example(call, step, no_cache())


def _quantize(case: Case, generator: torch.Generator) -> Example:
    shape = (int(case["tokens"]), int(case["hidden"]))
    inputs = {"x": random_tensor(shape, str(case["dtype"]), generator)}
    inputs["x"][-1] = 0  # a row of zeros has scale 1
    outputs = _quantized_output(case, shape, inputs)
    call = OpCall("quantize", "quantize", inputs, outputs, {})
    return Example(call, plain_step(shape[0]), no_cache())


def _rms_norm(case: Case, generator: torch.Generator) -> Example:
    shape, dtype = (int(case["tokens"]), int(case["hidden"])), str(case["dtype"])
    inputs = {
        "x": random_tensor(shape, dtype, generator),
        "weight": random_tensor(shape[1:], dtype, generator),
    }
    outputs = _quantized_output(case, shape, inputs)
    if case["residual"]:
        inputs["residual"] = random_tensor(shape, dtype, generator)
        outputs["residual_out"] = inputs["residual"]  # in place, as engines do
    call = OpCall("rms_norm", "norm", inputs, outputs, {"epsilon": 1e-5})
    return Example(call, plain_step(shape[0]), no_cache())


def _swiglu(case: Case, generator: torch.Generator) -> Example:
    tokens, width, dtype = int(case["tokens"]), int(case["hidden"]), str(case["dtype"])
    inputs = {"x": random_tensor((tokens, 2 * width), dtype, generator, spread=2)}
    outputs = _quantized_output(case, (tokens, width), inputs)
    call = OpCall("swiglu", "swiglu", inputs, outputs, {})
    return Example(call, plain_step(tokens), no_cache())


def _silu(case: Case, generator: torch.Generator) -> Example:
    shape, dtype = (int(case["tokens"]), int(case["hidden"])), str(case["dtype"])
    inputs = {"x": random_tensor(shape, dtype, generator, spread=2)}
    if case["residual"]:
        inputs["residual"] = random_tensor(shape, dtype, generator)
    call = OpCall("silu", "silu", inputs, {"out": empty(shape, dtype)}, {})
    return Example(call, plain_step(shape[0]), no_cache())


def _linear(case: Case, generator: torch.Generator) -> Example:
    tokens, outputs, inner = (int(case[k]) for k in ("tokens", "outputs", "inner"))
    x_dtype, weight_dtype = str(case["x_dtype"]), str(case["dtype"])
    is_fp8 = x_dtype == "float8_e4m3fn"
    dtype = "bfloat16" if is_fp8 else x_dtype
    inputs = {
        "x": random_tensor((tokens, inner), x_dtype, generator),
        "weight": random_tensor((outputs, inner), weight_dtype, generator, inner**-0.5),
    }
    is_partial = bool(case.get("is_partial"))  # sums without scales are of unit size, too
    if weight_dtype == "float8_e4m3fn" and not is_partial:
        wide = random_tensor((outputs, inner), "float32", generator, 100)
        inputs["weight"] = wide.clamp(-448, 448).to(torch.float8_e4m3fn)
        spread = torch.rand((outputs,), generator=generator) + 0.5
        inputs["weight_scale"] = spread * (inner**-0.5 / 100)
    if is_fp8 and not is_partial:
        count = tokens if case["x_scaling"] == "per_token" else 1
        inputs["x_scale"] = torch.rand((count,), generator=generator) + 0.5
    if case["bias"]:
        inputs["bias"] = random_tensor((outputs,), dtype, generator)
    attributes = {name: case[name] for name in ("is_partial", "leaves") if name in case}
    dtype = "float32" if is_partial else dtype
    call = OpCall("linear", "linear", inputs, {"out": empty((tokens, outputs), dtype)}, attributes)
    return Example(call, plain_step(tokens), no_cache())


def _packed_inputs(
    case: Case, tokens: int, order: torch.Tensor, generator: torch.Generator
) -> tuple[Tensors, str]:
    """Inputs that the packed products share, and the model dtype."""
    inner, rows, form = int(case["inner"]), int((order >= 0).sum()), FORMS[str(case["dtype"])]
    x_dtype = form.numbers
    is_fp8 = x_dtype == FP8
    model_dtype = str(case.get("model_dtype", "bfloat16" if is_fp8 else x_dtype))
    inputs = {"x": random_tensor((tokens, inner), x_dtype, generator)}
    inner //= int(case.get("leaves", 1))  # of rows, where those of a part of K are its own
    weight = random_tensor((rows, inner), x_dtype, generator, inner**-0.5)
    if is_fp8 and not case.get("is_partial"):  # which has no scales, and sums of unit size
        wide = random_tensor((rows, inner), "float32", generator, 100)
        weight = wide.clamp(-448, 448).to(torch.float8_e4m3fn)
        spread = torch.rand((rows,), generator=generator) + 0.5
        inputs["weight_scale"] = reorder(spread * (inner**-0.5 / 100), order)
        count = tokens if case["x_scaling"] == "per_token" else 1
        inputs["x_scale"] = torch.rand((count,), generator=generator) + 0.5
    if form.is_coded:
        inputs["weight"] = packing_of(form).pack_random(order, inner, generator)
    else:
        inputs["weight"] = pack(reorder(weight, order))
    if case["bias"]:
        inputs["bias"] = reorder(random_tensor((rows,), model_dtype, generator), order)
    return inputs, model_dtype


def _packed_linear(case: Case, generator: torch.Generator) -> Example:
    tokens, outputs = int(case["tokens"]), int(case["outputs"])
    inputs, dtype = _packed_inputs(case, tokens, plain_order(outputs), generator)
    made = {"out": empty((tokens, outputs), "float32" if case["out"] == "float32" else dtype)}
    attributes = FORMS[str(case["dtype"])].attributes
    if case.get("is_partial"):
        attributes["is_partial"] = True
    if "leaves" in case:
        attributes["leaves"] = case["leaves"]
    if case.get("norm"):
        made |= add_norm(inputs, dtype, generator)
        attributes["epsilon"] = 1e-5
    call = OpCall("packed_linear", "linear", inputs, made, attributes)
    return Example(call, plain_step(tokens), no_cache())


def add_norm(inputs: Tensors, dtype: str, generator: torch.Generator) -> Tensors:
    """Give a packed product's inputs a norm before it; the outputs that come with it."""
    shape, normal_dtype = tuple(inputs["x"].shape), str(inputs["x"].dtype).removeprefix("torch.")
    inputs["x"] = random_tensor(shape, dtype, generator)
    inputs["residual"] = random_tensor(shape, dtype, generator)
    inputs["norm_weight"] = random_tensor(shape[1:], dtype, generator)
    return {"normal": empty(shape, normal_dtype), "residual_out": empty(shape, dtype)}


def _packed_linear_swiglu(case: Case, generator: torch.Generator) -> Example:
    tokens, width = int(case["tokens"]), int(case["hidden"])
    inputs, dtype = _packed_inputs(case, tokens, pair_order(width), generator)
    outputs = _quantized_output({**case, "dtype": dtype}, (tokens, width), inputs)
    attributes = {"dtype": dtype, **FORMS[str(case["dtype"])].attributes}
    call = OpCall("packed_linear_swiglu", "gate_up", inputs, outputs, attributes)
    return Example(call, plain_step(tokens), no_cache())


def _packed_linear_rope_kv(case: Case, generator: torch.Generator) -> Example:
    step, num_blocks = make_step(parse_requests(str(case["requests"])))
    attributes = head_attributes(case)
    heads, kv_heads, size = (int(attributes[k]) for k in ("num_heads", "num_kv_heads", "head_size"))
    order = rope_order(heads, kv_heads, size)
    inputs, dtype = _packed_inputs(case, step.num_tokens, order, generator)
    angles = torch.rand((int(step.kv_len.max()), size // 2), generator=generator) * 6.28
    inputs["rotary"] = torch.cat((angles.cos(), angles.sin()), dim=-1)
    inputs.update(kv_scales(case))
    outputs = {"q": empty((step.num_tokens, heads * size), dtype)}
    attributes |= FORMS[str(case["dtype"])].attributes
    call = OpCall("packed_linear_rope_kv", "qkv", inputs, outputs, attributes)
    return Example(call, step, filled_cache(case, num_blocks, generator))


def _rope_kv_write(case: Case, generator: torch.Generator) -> Example:
    step, num_blocks = make_step(parse_requests(str(case["requests"])))
    attributes, dtype = head_attributes(case), str(case["dtype"])
    heads, kv_heads, size = (int(attributes[k]) for k in ("num_heads", "num_kv_heads", "head_size"))
    count, positions = step.num_tokens, int(step.kv_len.max())
    angles = torch.rand((positions, size // 2), generator=generator) * 6.28
    inputs = {
        "qkv": random_tensor((count, (heads + 2 * kv_heads) * size), dtype, generator),
        "rotary": torch.cat((angles.cos(), angles.sin()), dim=-1),
        **kv_scales(case),
    }
    if case["qk_norm"]:
        inputs["q_norm"] = random_tensor((size,), dtype, generator)
        inputs["k_norm"] = random_tensor((size,), dtype, generator)
    outputs = {"q": empty((count, heads * size), dtype)}
    call = OpCall("rope_kv_write", "rope", inputs, outputs, {**attributes, "epsilon": 1e-6})
    return Example(call, step, filled_cache(case, num_blocks, generator))


def _paged_attention(case: Case, generator: torch.Generator) -> Example:
    per_block = int(case["tokens_per_block"])
    step, num_blocks = make_step(parse_requests(str(case["requests"])), per_block)
    attributes, dtype = head_attributes(case), str(case["dtype"])
    width = int(attributes["num_heads"]) * int(attributes["head_size"])
    inputs = {"q": random_tensor((step.num_tokens, width), dtype, generator), **kv_scales(case)}
    if case["quantize_out"]:
        inputs["out_scale"] = torch.tensor([2.0 / 448])
    out = empty((step.num_tokens, width), "float8_e4m3fn" if case["quantize_out"] else dtype)
    attributes["softmax_scale"] = int(attributes["head_size"]) ** -0.5
    attributes["window"] = case["window"]
    call = OpCall("paged_attention", "attention", inputs, {"out": out}, attributes)
    return Example(call, step, filled_cache(case, num_blocks, generator))


_MAKERS: Mapping[str, Callable[[Case, torch.Generator], Example]] = {
    "embedding": _embedding,
    "embedding_norm": _embedding_norm,
    "gather_rows": _gather_rows,
    "quantize": _quantize,
    "rms_norm": _rms_norm,
    "swiglu": _swiglu,
    "silu": _silu,
    **HEAD_MAKERS,
    **RANK_MAKERS,
    "linear": _linear,
    "packed_linear": _packed_linear,
    "packed_linear_swiglu": _packed_linear_swiglu,
    "packed_linear_rope_kv": _packed_linear_rope_kv,
    "rope_kv_write": _rope_kv_write,
    "paged_attention": _paged_attention,
}
