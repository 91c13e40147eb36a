"""What tests of FP8 engines share."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel


def relative_l2(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def modelopt_checkpoint(
    model: PreTrainedModel, folder: Path, preset: str, rows: torch.Tensor, kv: bool, tokens: Any
) -> torch.Tensor:
    """Quantize with ModelOpt, run its fake-quantized model on `tokens`, export; the logits."""
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # importing it warns about its own and torch's versions
        import modelopt.torch.quantization as mtq
        from modelopt.torch.export import export_hf_checkpoint

        config = copy.deepcopy(getattr(mtq, preset))
        if kv:
            config["quant_cfg"] += copy.deepcopy(mtq.FP8_KV_CFG["quant_cfg"])
        mtq.quantize(model, config, lambda m: [m(row[None]) for row in rows])
        logits = model(torch.tensor([tokens])).logits[0].float()
        export_hf_checkpoint(model, export_dir=folder)
    return logits
