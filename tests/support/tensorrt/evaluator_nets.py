"""What tests of the evaluator share."""

from __future__ import annotations

from support.tensorrt.small_networks import trt

EW = trt.ElementWiseOperation
