"""The table of readers: how the weights of each scheme come out of a checkpoint."""

from __future__ import annotations

from llmctl.builder.schemes.fp8 import Fp8Reader
from llmctl.builder.schemes.mxfp4 import Mxfp4Reader
from llmctl.builder.schemes.reading import WeightReader
from llmctl.plugins.schemes.table import FP8, MXFP4

READERS: dict[str, WeightReader] = {FP8.name: Fp8Reader(), MXFP4.name: Mxfp4Reader()}
