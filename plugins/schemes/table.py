"""The table of weight schemes, and how to find a row."""

from __future__ import annotations

from collections.abc import Mapping

from llmctl.errors import CorruptEngine
from llmctl.plugins.schemes.fp8 import scheme as fp8
from llmctl.plugins.schemes.mxfp4 import scheme as mxfp4
from llmctl.plugins.schemes.plain import scheme as plain
from llmctl.plugins.schemes.scheme import Form, QuantizedScheme, WeightScheme

_REBUILD = "build the engine again with this version"
PLAIN, FP8, MXFP4 = plain.SCHEME, fp8.SCHEME, mxfp4.SCHEME
_ROWS: tuple[WeightScheme, ...] = (PLAIN, FP8, MXFP4)
SCHEMES: dict[str, WeightScheme] = {scheme.name: scheme for scheme in _ROWS}
FORMS: dict[str, Form] = {form.name: form for scheme in _ROWS for form in scheme.forms}


def quantized_schemes() -> list[QuantizedScheme]:
    """Those of quantized checkpoints, in the order of the table."""
    return [scheme for scheme in SCHEMES.values() if isinstance(scheme, QuantizedScheme)]


def scheme_of_algo(algo: str | None) -> QuantizedScheme | None:
    """The scheme of a quant_algo; None for plain weights and for names that no scheme has."""
    return next(
        (s for s in quantized_schemes() if any(algo == known.name for known in s.algorithms)), None
    )


def find_form(dtype: str, attributes: Mapping[str, object]) -> Form:
    """The form of a packed weight, from its dtype or, for codes, from the product's attributes.

    dtype: torch's name. Raises CorruptEngine if the two contradict each other.
    """
    named = attributes.get("scheme")
    form = FORMS.get(str(named or dtype))
    if form is None:
        what = f"scheme {named!r}" if named else f"a weight of {dtype} without a scheme"
        raise CorruptEngine(f"{what} is not known; known: {', '.join(FORMS)}", fix=_REBUILD)
    if form.dtype != dtype or form.is_coded != (named is not None):
        raise CorruptEngine(f"scheme {named!r} does not go with a weight of {dtype}", fix=_REBUILD)
    return form


def form_macros(form: Form) -> dict[str, int]:
    """Macros of CUDA sources that distinguish forms of codes: 1 for this form's own."""
    return {each.macro: int(each == form) for each in FORMS.values() if each.macro}


def titles(between: str = " or ") -> str:
    """The schemes of quantized checkpoints for people: "FP8 or MXFP4"."""
    return between.join(scheme.title for scheme in quantized_schemes())
