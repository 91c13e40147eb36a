"""What every operator declares about itself, and the check that a call conforms.

A spec is data: roles with their dtype and shape, attributes, tolerances, and the sizes for tests
and benchmarks. Builders, backends and tests read the same spec, so they cannot disagree.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from llmctl.errors import CorruptEngine

if TYPE_CHECKING:
    import torch

    from llmctl.plugins.core.calls import OpCall

STEP_SIZES = ("N", "R")  # symbols of what a step decides: its tokens or rows, and rows
MODEL_DTYPES = ("float32", "bfloat16", "float16")
FP8 = "float8_e4m3fn"
FP8_MAX = 448.0  # largest finite E4M3 value (OCP FP8 specification, table 1)
INT8_MAX = 127.0  # largest value of a symmetric int8

Dims = Mapping[str, int]
Case = Mapping[str, int | float | str | bool]


@dataclass(frozen=True, slots=True)
class Role:
    """One input or output.

    `dtypes` are torch names; "T" stands for the model dtype, the same wherever it appears in one
    call. `shape` holds symbols that must agree within a call, or names of derived dimensions.
    """

    name: str
    dtypes: tuple[str, ...]
    shape: tuple[str, ...]
    optional: bool = False


@dataclass(frozen=True, slots=True)
class Tolerance:
    """|kernel - reference| <= atol + rtol * |reference|, for values of about unit size."""

    rtol: float
    atol: float


# One unit in the last place of each output dtype, plus the effect of another summation order.
ROUNDING: Mapping[str, Tolerance] = {
    "float32": Tolerance(1e-5, 1e-5),
    "bfloat16": Tolerance(2**-7, 1e-3),
    "float16": Tolerance(2**-10, 2e-4),
    FP8: Tolerance(2**-3, 2**-9),
    "int8": Tolerance(0.0, 1.0),
}
EXACT: Mapping[str, Tolerance] = {
    name: Tolerance(0.0, 0.0) for name in (*MODEL_DTYPES, FP8, "int32")
}


@dataclass(frozen=True, slots=True)
class OpSpec:
    """Everything about an operator except its arithmetic.

    `sizes` gets the call before it is checked, and raises CorruptEngine for a call that contradicts
    itself.
    """

    name: str
    inputs: tuple[Role, ...]
    outputs: tuple[Role, ...]
    attributes: Mapping[str, type] = field(default_factory=dict)
    optional_attributes: Mapping[str, type] = field(default_factory=dict)
    derived: Mapping[str, Callable[[Dims], int]] = field(default_factory=dict)
    sizes: Callable[[OpCall], Dims] = lambda _: {}  # symbols that follow from the call
    one_or: Mapping[str, str] = field(default_factory=dict)  # symbols that are 1, or as another is
    for_tokens: bool = False  # reads arrays of a step with an entry a token, so N is their number
    rules: tuple[Callable[[OpCall], str | None], ...] = ()  # what else must hold: op_rules.py
    alike: tuple[str, ...] = ()  # roles that have the same dtype
    tolerance: Mapping[str, Tolerance] = field(default_factory=lambda: ROUNDING)
    cases: tuple[Case, ...] = ()  # sizes to test
    timed: tuple[Case, ...] = ()  # sizes to time

    def check(self, call: OpCall) -> None:
        """Raise CorruptEngine where the call's roles, dtypes, shapes or attributes are wrong."""
        self._check_attributes(call)
        dims = {key: int(value) for key, value in call.attributes.items() if type(value) is int}
        dims |= self.sizes(call)
        model_dtype: str | None = None
        for side, roles, tensors in (
            ("input", self.inputs, call.inputs),
            ("output", self.outputs, call.outputs),
        ):
            unknown = set(tensors) - {role.name for role in roles}
            if unknown:
                raise self._error(call, f"has an unknown {side} {sorted(unknown)[0]!r}")
            for role in roles:
                if role.name not in tensors:
                    if not role.optional:
                        raise self._error(call, f"has no {side} {role.name!r}")
                    continue
                model_dtype = self._check_dtype(call, role, tensors[role.name], model_dtype)
                self._bind_shape(call, role, tensors[role.name], dims)
        tensors = {**call.inputs, **call.outputs}
        dtypes = [str(tensors[name].dtype) for name in self.alike]
        if len(set(dtypes)) > 1:
            raise self._error(call, f"{', '.join(self.alike)} are {dtypes}, wanted one dtype")
        for side_roles, tensors in ((self.inputs, call.inputs), (self.outputs, call.outputs)):
            for role in side_roles:
                if role.name in tensors:
                    self._check_derived(call, role, tensors[role.name], dims)
        for broken in filter(None, (rule(call) for rule in self.rules)):
            raise self._error(call, broken)

    def _check_attributes(self, call: OpCall) -> None:
        known = {**self.attributes, **self.optional_attributes}
        if not set(self.attributes) <= set(call.attributes) <= set(known):
            raise self._error(
                call, f"has attributes {sorted(call.attributes)}, wanted {sorted(self.attributes)}"
            )
        for key, value in call.attributes.items():
            kind = known[key]
            if type(value) is not kind and not (kind is float and type(value) is int):
                raise self._error(call, f"attribute {key} is {value!r}, wanted {kind.__name__}")

    def _check_dtype(
        self, call: OpCall, role: Role, tensor: torch.Tensor, model_dtype: str | None
    ) -> str | None:
        found = str(tensor.dtype).removeprefix("torch.")
        if found in role.dtypes:
            return model_dtype
        if "T" in role.dtypes and found in MODEL_DTYPES and model_dtype in (None, found):
            return found
        wanted = " or ".join(model_dtype or d if d == "T" else d for d in role.dtypes)
        raise self._error(call, f"{role.name} is {found}, wanted {wanted}")

    def _bind_shape(
        self, call: OpCall, role: Role, tensor: torch.Tensor, dims: dict[str, int]
    ) -> None:
        shape = tuple(tensor.shape)
        if len(shape) != len(role.shape) or not tensor.is_contiguous():
            raise self._error(
                call, f"{role.name} has shape {shape}, wanted contiguous {list(role.shape)}"
            )
        for symbol, found in zip(role.shape, shape, strict=True):
            if symbol in self.derived or symbol in self.one_or:
                continue
            wanted = dims.setdefault(symbol, int(symbol) if symbol.isdigit() else found)
            if found != wanted:
                raise self._error(call, f"{role.name} has shape {shape}, but {symbol} is {wanted}")

    def _check_derived(
        self, call: OpCall, role: Role, tensor: torch.Tensor, dims: Mapping[str, int]
    ) -> None:
        for symbol, found in zip(role.shape, tensor.shape, strict=True):
            if symbol in self.derived:
                wanted = [self.derived[symbol](dims)]
            elif symbol in self.one_or:
                wanted = [1, dims[self.one_or[symbol]]]
            else:
                continue
            if found not in wanted:
                raise self._error(
                    call,
                    f"{role.name} has shape {tuple(tensor.shape)}, "
                    f"but {symbol} is {' or '.join(map(str, wanted))}",
                )

    def _error(self, call: OpCall, what: str) -> CorruptEngine:
        return CorruptEngine(f"{self.name} {call.name!r}: {what}", fix="build the engine again")
