"""MXFP4 weights (OCP Microscaling Formats 1.0) with FP8 activations of a static scale: ModelOpt's
W4A8_MXFP4_FP8. Products multiply them as E4M3 numbers (packing.py)."""

from __future__ import annotations

from llmctl.plugins.core.op_spec import FP8
from llmctl.plugins.schemes.scheme import E8M0, Algorithm, Form, QuantizedScheme, Storage

BLOCK = 32  # columns that share a power of two (5.2)
SPAN = 14  # from a row's largest exponent of blocks to its smallest that E4M3 can hold
CHUNK_COLUMNS = 256  # of a packed block
ROW_BYTES = 136  # of a packed block's row: codes and steps
# Of random weights: codes drawn evenly (2.93 root mean square), blocks' steps from the three below
# 15 (powers 2**4 to 2**6, 42.3 root mean square).
SPREAD = 124.0

SCHEME = QuantizedScheme(
    name="mxfp4",
    title="MXFP4",
    weight_bytes=0.5 + 1 / BLOCK,
    forms=(
        Form(
            name="mxfp4",
            dtype="uint8",
            numbers=FP8,
            word="u8",
            block_bytes=64 * ROW_BYTES,
            columns=CHUNK_COLUMNS,
            token_chunks=2,
            interval=2,
            spread=SPREAD,
            macro="MXFP4",
            table_bytes=255 + 128,  # at a multiple of 256
            expansion="schemes/mxfp4/expand.cu",
            packing="llmctl.plugins.schemes.mxfp4.packing",
        ),
    ),
    algorithms=(Algorithm("W4A8_MXFP4_FP8", "group", "static"),),
    storage=Storage(
        dtype="U8",
        values=2,
        block=BLOCK,
        scale_dtype=E8M0,
        scale_text="powers of two as U8 (E8M0: 127 is 1)",
    ),
    activation_dtype=FP8,
    activations=("static",),
    qformat="w4a8_mxfp4_fp8",
)
