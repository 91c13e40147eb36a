"""SwiGLU as Hugging Face Llama rounds it: SiLU rounds to the model dtype before the product.

Checked against transformers' LlamaMLP activation.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from llmctl.plugins.core.calls import StepInputs
from llmctl.plugins.ops.quantize.reference import write_output


def swiglu(x: torch.Tensor) -> torch.Tensor:
    """x [N, 2I], gate in the first half and up in the second -> silu(gate) * up [N, I]."""
    gate, up = x.float().chunk(2, dim=-1)
    activated = (gate / (1 + torch.exp(-gate))).to(x.dtype).float()
    return (activated * up).to(x.dtype)


def reference(
    inputs: Mapping[str, torch.Tensor],
    outputs: Mapping[str, torch.Tensor],
    attributes: Mapping[str, int | float | str | bool],
    step: StepInputs,
    kv_cache: torch.Tensor,
) -> None:
    """Apply SwiGLU to all rows of `x`."""
    write_output(swiglu(inputs["x"]), inputs, outputs)
