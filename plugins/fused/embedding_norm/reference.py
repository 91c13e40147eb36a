"""The embedding's rows, and rms_norm of them."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from llmctl.plugins.core.calls import StepInputs
from llmctl.plugins.ops.embedding.reference import reference as embed
from llmctl.plugins.ops.quantize.reference import write_output
from llmctl.plugins.ops.rms_norm.reference import rms_norm


def reference(
    inputs: Mapping[str, torch.Tensor],
    outputs: Mapping[str, torch.Tensor],
    attributes: Mapping[str, int | float | str | bool],
    step: StepInputs,
    kv_cache: torch.Tensor,
) -> None:
    """embedded[n] = weight[token_ids[n]]; out = embedded / rms(embedded) * norm_weight."""
    embed(inputs, {"out": outputs["embedded"]}, {}, step, kv_cache)
    embedded = outputs["embedded"][: step.num_tokens]
    y = rms_norm(embedded, inputs["norm_weight"], float(attributes["epsilon"]))
    write_output(y, inputs, outputs)
