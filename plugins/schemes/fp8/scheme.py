"""FP8 weights and activations (E4M3): weights with one scale per tensor or per row, activations
with one that was calibrated (static) or with one per token, measured at run time (dynamic)."""

from __future__ import annotations

from llmctl.plugins.core.op_spec import FP8
from llmctl.plugins.schemes.scheme import Algorithm, Form, QuantizedScheme, Storage

SPREAD = 112.0  # of random weights: a quarter of the largest value

SCHEME = QuantizedScheme(
    name="fp8",
    title="FP8",
    weight_bytes=1.0,
    forms=(
        Form(
            name=FP8,
            dtype=FP8,
            numbers=FP8,
            word="fp8e4nv",
            block_bytes=8192,
            columns=128,
            spread=SPREAD,
        ),
    ),
    algorithms=(
        Algorithm("FP8", "tensor", "static"),
        Algorithm("FP8_PER_CHANNEL_PER_TOKEN", "channel", "dynamic"),
    ),
    storage=Storage(dtype="F8_E4M3"),
    activation_dtype=FP8,
    activations=("static", "dynamic"),
    qformat="fp8",
)
