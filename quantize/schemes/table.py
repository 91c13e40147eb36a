"""The table of writers: how `llmctl quantize` makes the weights of each scheme."""

from __future__ import annotations

from llmctl.plugins.schemes.table import FP8, MXFP4
from llmctl.quantize.schemes.fp8 import Fp8Writer
from llmctl.quantize.schemes.mxfp4 import Mxfp4Writer
from llmctl.quantize.schemes.writing import WeightWriter

WRITERS: dict[str, WeightWriter] = {FP8.name: Fp8Writer(), MXFP4.name: Mxfp4Writer()}
