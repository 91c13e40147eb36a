"""The plans of TensorRT in a plan: what their bindings and profiles are, and that every operator
that runs one binds tensors of those dtypes and shapes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmctl.builder.plan import TENSORRT_OP, Plan, PlanOp, PlanTensor, TrtPiece
from llmctl.builder.validation.errors import wrong
from llmctl.builder.validation.schema import shown
from llmctl.builder.validation.strict_json import MOST
from llmctl.builder.validation.tensors import MOST_BYTES, STEP

_BINDING = {"name": str, "is_input": bool, "dtype": str, "shape": list, "alias": str}
_PROFILE = {
    "name": str,
    "sizes": dict,
    "layers": list,
    "activation_bytes": int,
    "scratch_bytes": int,
}
_DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn", "int32", "bool")


def check_pieces(plan: Plan, tensors: Mapping[str, PlanTensor]) -> None:
    """Raises CorruptEngine."""
    pieces = {piece.name: piece for piece in plan.trt_pieces}
    if len(pieces) != len(plan.trt_pieces):
        raise wrong("two plans of TensorRT have one name")
    for piece in plan.trt_pieces:
        _check_piece(piece)
    for op in plan.ops:
        if op.op == TENSORRT_OP:
            name = op.attributes.get("piece")
            if set(op.attributes) != {"piece"} or name not in pieces:
                raise wrong(
                    f"operator {op.name!r} runs the plan {name!r}; {list(pieces)} are there"
                )
            _check_call(op, pieces[str(name)], tensors)


def _check_piece(piece: TrtPiece) -> None:
    if not 1 <= piece.num_bytes <= MOST_BYTES or not piece.profiles:
        raise wrong(f"plan {piece.name!r} has {piece.num_bytes} bytes, or no profile")
    names = set()
    for binding in piece.bindings:
        _require_fields(piece, "binding", binding, _BINDING)
        dims = binding["shape"]
        is_sound = all(type(d) is str or (type(d) is int and 1 <= d <= MOST) for d in dims)
        if binding["dtype"] not in _DTYPES or not is_sound:
            raise wrong(f"plan {piece.name!r} has a binding {shown(dict(binding))}")
        names.add(binding["name"])
    inputs = {binding["name"] for binding in piece.bindings if binding["is_input"]}
    aliases = {binding["alias"] for binding in piece.bindings} - {""}
    if len(names) != len(piece.bindings) or not aliases <= inputs:
        raise wrong(f"plan {piece.name!r} has bindings of one name, or that alias no input")
    used = {dim for b in piece.bindings for dim in b["shape"] if type(dim) is str and b["is_input"]}
    for profile in piece.profiles:
        _require_fields(piece, "profile", profile, _PROFILE)
        sizes = profile["sizes"]
        if not used <= set(sizes) or any(not _is_range(each) for each in sizes.values()):
            raise wrong(f"plan {piece.name!r} has a profile of sizes {shown(sizes)}")
        for name in ("activation_bytes", "scratch_bytes"):
            if not 0 <= profile[name] <= MOST_BYTES:
                raise wrong(f"plan {piece.name!r} has a profile with {name} {profile[name]}")


def _require_fields(
    piece: TrtPiece, what: str, found: Mapping[str, Any], wanted: Mapping[str, type]
) -> None:
    if set(found) != set(wanted) or any(type(found[k]) is not kind for k, kind in wanted.items()):
        raise wrong(f"plan {piece.name!r} has a {what} {shown(dict(found))}")


def _is_range(sizes: Any) -> bool:
    """[least, tuned for, most]."""
    is_triple = type(sizes) is list and len(sizes) == 3 and all(type(s) is int for s in sizes)
    return is_triple and 0 <= sizes[0] <= sizes[1] <= sizes[2] <= MOST


def _check_call(op: PlanOp, piece: TrtPiece, tensors: Mapping[str, PlanTensor]) -> None:
    bindings = {binding["name"]: binding for binding in piece.bindings}
    for given, is_input in ((op.inputs, True), (op.outputs, False)):
        for role, name in given.items():
            binding = bindings.get(role)
            if binding is None or binding["is_input"] != is_input:
                raise wrong(f"operator {op.name!r} binds {role!r}, which plan {piece.name!r} lacks")
            if name.startswith(STEP):
                if name != STEP + role:
                    raise wrong(f"operator {op.name!r} binds {role!r} to {name!r}")
                continue
            tensor = tensors[name]
            is_vector = len(tensor.shape) == 1 and tensor.kind == "weight"
            shape = [1, *tensor.shape] if is_vector else list(tensor.shape)
            is_whole = "batch" in str(piece.bindings)  # its logits have an extent of their own
            if tensor.dtype != binding["dtype"] or (not is_whole and shape != binding["shape"]):
                raise wrong(
                    f"operator {op.name!r} binds {role!r} to {tensor.dtype} {shape}; plan "
                    f"{piece.name!r} has {binding['dtype']} {binding['shape']}"
                )
