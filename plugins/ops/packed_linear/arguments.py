"""What the kernels of the packed products have in common: types, parameters and their values.

The parameters are those of `EPILOGUE_PARAMETERS` (epilogue.cuh) after the weight's. What says
where tokens come from goes before them, and is each kernel's own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Union

from llmctl.plugins.backends.cuda.dtypes import pointer, short_name
from llmctl.plugins.backends.cuda.kernel_spec import Constant, LaunchEnv, StepLimits, TensorMap
from llmctl.plugins.core.op_spec import FP8
from llmctl.plugins.ops.packed_linear.forms import CHUNK_BYTES
from llmctl.plugins.schemes.scheme import Form
from llmctl.plugins.schemes.table import find_form

if TYPE_CHECKING:
    import torch

    from llmctl.plugins.core.calls import OpCall

Argument = Union["torch.Tensor", TensorMap, int, float]
_TYPES = {"bfloat16": "BF16", "float16": "FP16", "float32": "FP32", FP8: "E4M3", "int8": "INT8"}
_EPILOGUES = {"packed_linear": 0, "packed_linear_swiglu": 1, "packed_linear_rope_kv": 2}
_PUSHED = 3  # the epilogue of sums that are handed to other ranks
_BEST = 4  # that of logits of which the best ids alone are kept (best.py)
_OPTIONAL = ("weight_scale", "x_scale", "bias", "scale", "k_scale", "v_scale")


def type_constants(call: OpCall, limits: StepLimits) -> dict[str, Constant]:
    """Macros that follow from the call's dtypes and attributes."""
    constants: dict[str, Constant] = {
        "INPUT_TYPE": _TYPES[form_of(call).numbers],
        "MODEL_TYPE": _TYPES[model_dtype(call)],
        "OUT_TYPE": _TYPES[name_of(_out(call))],
        "EPILOGUE": _EPILOGUES[call.op],
    }
    if is_pushed(call):
        constants |= {"EPILOGUE": _PUSHED, "RANKS": int(call.attributes["pushed_to"]), "LEAVES": 1}
    if keeps_best(call):
        constants["EPILOGUE"] = _BEST
    if leaves_of(call) > 1:
        constants["LEAVES"] = leaves_of(call)
    if call.op == "packed_linear_rope_kv":
        for role in ("num_heads", "num_kv_heads", "head_size"):
            constants[role.upper()] = int(call.attributes[role])
        constants["KV_TYPE"] = _TYPES[limits.kv_dtype]
    return constants


def type_words(call: OpCall, limits: StepLimits) -> list[str]:
    """The same for the kernel's name, with the optional inputs the call has."""
    words = [form_of(call).word, short_name(model_dtype(call))]
    words.append(short_name(_out(call).dtype))
    if call.op == "packed_linear_rope_kv":
        heads = [int(call.attributes[k]) for k in ("num_heads", "num_kv_heads", "head_size")]
        words += ["h{}.{}x{}".format(*heads), f"kv_{short_name(limits.kv_dtype)}"]
    words += [f"pushed{call.attributes['pushed_to']}"] if is_pushed(call) else []
    words += ["best"] * keeps_best(call)
    words += [f"l{leaves_of(call)}"] * (leaves_of(call) > 1)
    return words + [role for role in _OPTIONAL if role in call.inputs]


def token_map(call: OpCall, tile_tokens: int) -> TensorMap:
    """The rows of `x` in boxes of a tile's tokens and 128 bytes of K."""
    x = call.inputs["x"]
    return TensorMap(x, tile_tokens, CHUNK_BYTES // x.element_size())


def argument_kinds(call: OpCall, limits: StepLimits) -> tuple[str, ...]:
    """Argument types; an input that the call has not is a null pointer, passed as a zero."""

    def optional(*roles: str) -> list[str]:
        given = call.inputs
        return [pointer(given[role].dtype) if role in given else "i64" for role in roles]

    kinds = [pointer(call.inputs["weight"].dtype), "i32", "i32"]
    kinds += [pointer(_out(call).dtype), *optional("weight_scale", "x_scale", "bias")]
    kinds += ["i32", "i32", "i32"]
    if is_pushed(call):
        kinds += ["*i64", "*i32", "i32", "i64"]
    if keeps_best(call):
        kinds += ["*i64"]
    if call.op == "packed_linear_swiglu":
        kinds += optional("scale")
    elif call.op == "packed_linear_rope_kv":
        kinds += ["*fp32", "*i32", "*i32", pointer(limits.kv_dtype)]
        kinds += [*optional("k_scale", "v_scale"), "i32"]
    return tuple(kinds)


def argument_values(call: OpCall, env: LaunchEnv, tokens: int) -> tuple[Argument, ...]:
    """Arguments for the first `tokens` rows."""
    weight, out = call.inputs["weight"], _out(call)

    def optional(*roles: str) -> list[Argument]:
        return [call.inputs.get(role, 0) for role in roles]

    values: list[Argument] = [weight, *weight.shape[:2], out]
    values += optional("weight_scale", "x_scale", "bias")
    values += [int(scales_tokens(call)), tokens, out.shape[1]]
    if is_pushed(call):
        peers = env.peers
        assert peers is not None and peers.num_ranks == call.attributes["pushed_to"]
        values += [peers.bases, peers.state, peers.rank, peers.slot_bytes]
    if keeps_best(call):
        values += [best_keys(call, env)]
    if call.op == "packed_linear_swiglu":
        values += optional("scale")
    elif call.op == "packed_linear_rope_kv":
        cache = env.kv_cache[int(call.attributes["layer"])]
        values += [call.inputs["rotary"], env.step.position_ids, env.step.slot_mapping, cache]
        values += [*optional("k_scale", "v_scale"), env.limits.tokens_per_block]
    return tuple(values)


def is_pushed(call: OpCall) -> bool:
    """Whether the launches of a call hand its sums to other ranks. That is asked for with a
    `pushed_to`, which calls of a plan have that may (kernel.py)."""
    return "pushed_to" in call.attributes


def keeps_best(call: OpCall) -> bool:
    """Whether the launches of a call keep the best ids of logits alone (best.py)."""
    return "keeps_best" in call.attributes


def best_keys(call: OpCall, env: LaunchEnv) -> torch.Tensor:
    """The key of each row's best id: int64 [rows], zero but between a product and what takes its
    ids."""
    import torch

    rows = _out(call).shape[0]
    return env.scratch(f"packed_linear.best.{rows}", (rows,), torch.int64)


def scales_tokens(call: OpCall) -> bool:
    """Whether each token has a scale of its own."""
    x_scale = call.inputs.get("x_scale")
    return x_scale is not None and len(x_scale) > 1


def leaves_of(call: OpCall) -> int:
    """Parts of K that are added apart, each in rows of its own (leaves.cuh)."""
    return int(call.attributes.get("leaves", 1))


def form_of(call: OpCall) -> Form:
    """The form of the packed weight."""
    return find_form(name_of(call.inputs["weight"]), call.attributes)


def is_fp8(call: OpCall) -> bool:
    """Whether products are of FP8 numbers, which are summed in intervals."""
    return form_of(call).numbers == FP8


def model_dtype(call: OpCall) -> str:
    """What products round to: the dtype of whichever tensor or attribute tells it."""
    model = str(call.attributes.get("dtype", name_of(_out(call))))
    if model == "float32":  # logits: only the bias has the model dtype
        model = name_of(call.inputs.get("bias", call.inputs["x"]))
    return "bfloat16" if model == FP8 else model


def name_of(tensor: torch.Tensor) -> str:
    """ "bfloat16" for a tensor of torch.bfloat16."""
    return str(tensor.dtype).removeprefix("torch.")


def _out(call: OpCall) -> torch.Tensor:
    return call.outputs["q" if call.op == "packed_linear_rope_kv" else "out"]
