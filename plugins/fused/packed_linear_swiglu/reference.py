"""Gate and up projections, then SwiGLU: the references of `linear` and `swiglu`, composed.

The products round to the model dtype before SwiGLU, as they do when the operators are apart.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from llmctl.plugins.core.calls import StepInputs
from llmctl.plugins.ops.packed_linear.layout import pair_order
from llmctl.plugins.ops.packed_linear.reference import normalized, product
from llmctl.plugins.ops.quantize.reference import write_output
from llmctl.plugins.ops.swiglu.reference import swiglu


def reference(
    inputs: Mapping[str, torch.Tensor],
    outputs: Mapping[str, torch.Tensor],
    attributes: Mapping[str, int | float | str | bool],
    step: StepInputs,
    kv_cache: torch.Tensor,
) -> None:
    """Multiply all rows of `x`, normalized if there is a norm, then combine gate and up."""
    inputs = normalized(inputs, outputs, attributes)
    dtype: torch.dtype = getattr(torch, str(attributes["dtype"]))
    order = pair_order(outputs["out"].shape[1])
    write_output(swiglu(product(inputs, attributes, order, dtype)), inputs, outputs)
