"""Rotary position embedding: the inverse frequencies of each published scaling.

Assumes "rotate half" pairing over the whole head (partial rotary factors are refused). All
arithmetic is float32 in the order transformers uses, and the tests compare every type with its
ROPE_INIT_FUNCTIONS. Frequencies are numbers of the plan: what a power of theta is in float32 may
differ between libraries, so it is computed once, at build. Types whose frequencies depend on the
length of the request (dynamic NTK beyond the trained length, LongRoPE) have no fixed frequencies
and are refused by name.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llmctl.builder.plan import PlanRotary
from llmctl.errors import CorruptFile, Unsupported
from llmctl.quantize.format import ROPE_FIELDS, ROPE_NUMBERS, check_fields, shown

if TYPE_CHECKING:
    import torch

OTHER_MODEL = "use a checkpoint of a model that README.md lists"  # no option helps
ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")
_REQUIRED = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}


@dataclass(frozen=True, slots=True)
class Rope:
    """One RoPE definition. `parameters` holds the numbers of the scaling, sorted by name."""

    rope_type: str
    theta: float
    parameters: tuple[tuple[str, float], ...] = ()
    truncate: bool = True  # yarn: round the correction range to whole dimensions

    def stretched_length(self, max_position_embeddings: int) -> int:
        """The tokens the scaled model can tell apart.

        Linear and YaRN configs usually keep the trained length in max_position_embeddings; one
        that names another original length has stretched it already. Other types always have.
        """
        trained = self._get("original_max_position_embeddings", max_position_embeddings)
        if self.rope_type not in ("linear", "yarn") or trained != max_position_embeddings:
            return max_position_embeddings
        return int(max_position_embeddings * self._get("factor"))

    def inverse_frequencies(self, head_size: int) -> tuple[torch.Tensor, float]:
        """(float32 [head_size / 2], the factor that multiplies cosines and sines)."""
        import torch

        exponents = torch.arange(0, head_size, 2, dtype=torch.int64).to(torch.float32) / head_size
        wavelengths = self.theta**exponents  # in units of 2 pi tokens
        frequencies = 1.0 / wavelengths
        if self.rope_type == "linear":
            return frequencies / self._get("factor"), 1.0
        if self.rope_type == "llama3":
            return self._llama3(frequencies), 1.0
        if self.rope_type == "yarn":
            return self._yarn(wavelengths, head_size), self._yarn_attention_factor()
        return frequencies, 1.0  # default; dynamic within the trained length is the same

    def definition(self, head_size: int) -> PlanRotary:
        """What plans have of it."""
        frequencies, factor = self.inverse_frequencies(head_size)
        return PlanRotary(tuple(frequencies.tolist()), as_float32(factor))

    def table(self, start: int, stop: int, head_size: int) -> torch.Tensor:
        """Cosines then sines of positions [start, stop): float32 [stop - start, head_size]."""
        import torch

        from llmctl.plugins.ops.rope_kv_write.table import fill_rotary_table

        found, table = self.definition(head_size), torch.empty(stop - start, head_size)
        fill_rotary_table(table, found.frequencies, found.factor, start)
        return table

    def _get(self, name: str, default: float | None = None) -> float:
        value = dict(self.parameters).get(name, default)
        assert value is not None, f"rope parameter {name} was not checked"
        return value

    def _llama3(self, frequencies: torch.Tensor) -> torch.Tensor:
        """Divide low frequencies by `factor`, keep high ones, interpolate between."""
        import torch

        trained = self._get("original_max_position_embeddings")
        low, high = self._get("low_freq_factor"), self._get("high_freq_factor")
        turns = trained / (2 * math.pi / frequencies)  # rotations over the trained length
        smooth = (turns - low) / (high - low)
        slowed = frequencies / self._get("factor")
        mixed = (1 - smooth) * slowed + smooth * frequencies
        return torch.where(turns < low, slowed, torch.where(turns > high, frequencies, mixed))

    def _yarn(self, wavelengths: torch.Tensor, head_size: int) -> torch.Tensor:
        """Interpolate dimensions that turn seldom, keep those that turn often, ramp between."""
        import torch

        trained = self._get("original_max_position_embeddings")

        def dimension(rotations: float) -> float:
            """The dimension that makes `rotations` turns over the trained length."""
            ratio = math.log(trained / (rotations * 2 * math.pi))
            return head_size * ratio / (2 * math.log(self.theta))

        low, high = dimension(self._get("beta_fast", 32.0)), dimension(self._get("beta_slow", 1.0))
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_size - 1)
        width = (high - low) or 0.001  # an empty ramp is a step
        ramp = ((torch.arange(head_size // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
        kept = 1 - ramp
        return 1.0 / (self._get("factor") * wavelengths) * (1 - kept) + 1.0 / wavelengths * kept

    def _yarn_attention_factor(self) -> float:
        known = dict(self.parameters)
        if "attention_factor" in known:
            return known["attention_factor"]
        factor = self._get("factor")
        mscale, all_dim = known.get("mscale", 0.0), known.get("mscale_all_dim", 0.0)
        if mscale and all_dim:
            return _mscale(factor, mscale) / _mscale(factor, all_dim)
        return _mscale(factor, 1.0)


def as_float32(value: float) -> float:
    """The nearest float32 number."""
    return float(struct.unpack("f", struct.pack("f", value))[0])


def _mscale(factor: float, weight: float) -> float:
    """The attention temperature of YaRN (Peng et al. 2023, section 3.4)."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def read_rope(config: Mapping[str, Any], default_theta: float, where: str) -> Rope:
    """The RoPE of a config.json in the transformers 4 style (rope_theta, rope_scaling) or the
    5 style (rope_parameters). Where both are given, rope_scaling applies, as in transformers.

    Raises Unsupported for a type llmctl has no table for, CorruptFile for missing numbers.
    """
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(scaling, dict):
        raise CorruptFile(f"{where}: the RoPE parameters are not an object")
    scaling = {name: value for name, value in scaling.items() if value is not None}
    check_fields(scaling, ROPE_FIELDS, f"{where}: RoPE parameters")
    nested = [name for name, value in scaling.items() if isinstance(value, dict)]
    if nested:
        raise Unsupported(
            f"{where}: the RoPE parameters have others under {shown(nested[0])}; one RoPE for all "
            "layers is supported",
            fix=OTHER_MODEL,
        )
    if not {"rope_type", "type"} & set(scaling) and "factor" in scaling:
        raise CorruptFile(f"{where}: the RoPE parameters have a factor and no rope_type")
    rope_type = scaling.get("rope_type", scaling.get("type", "default"))
    if rope_type not in ROPE_TYPES:
        raise Unsupported(
            f"{where}: rope_type is {shown(rope_type)}; supported: {', '.join(ROPE_TYPES)}",
            fix=OTHER_MODEL,
        )
    partial = scaling.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise Unsupported(
            f"{where}: partial_rotary_factor is {partial}; only 1.0 is supported", fix=OTHER_MODEL
        )
    theta = scaling.get("rope_theta", config.get("rope_theta"))
    theta = default_theta if theta is None else theta
    numbers = {name: float(scaling[name]) for name in ROPE_NUMBERS if name in scaling}
    absent = [key for key in _REQUIRED[rope_type] if numbers.get(key, 0.0) <= 0]
    if absent:
        raise CorruptFile(f"{where}: rope_type {rope_type} lacks a positive {absent[0]}")
    if rope_type == "llama3" and numbers["high_freq_factor"] <= numbers["low_freq_factor"]:
        raise CorruptFile(
            f"{where}: high_freq_factor is {numbers['high_freq_factor']:g}; more than "
            f"low_freq_factor, {numbers['low_freq_factor']:g}, is wanted"
        )
    if rope_type in ("llama3", "yarn"):
        outside = config.get("original_max_position_embeddings")
        trained = outside or numbers.get("original_max_position_embeddings")
        numbers["original_max_position_embeddings"] = float(
            trained or config.get("max_position_embeddings") or 0
        )
    if rope_type == "yarn":  # an explicit 0 means "the default", as in transformers
        numbers = {k: v for k, v in numbers.items() if v or k not in ("beta_fast", "beta_slow")}
    return Rope(
        rope_type,
        float(theta),
        tuple(sorted(numbers.items())),
        scaling.get("truncate", True),
    )
