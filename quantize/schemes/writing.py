"""What `llmctl quantize` asks of a scheme: how a calibrated linear becomes stored tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

# One entry of `config_groups` of config.json's quantization_config; None: it has none.
ConfigGroup = dict[str, Any] | None


class WeightWriter(Protocol):
    """Quantizes the weights of one scheme; inputs are calibrated the same way for all."""

    calibration: str = "FP8_DEFAULT_CFG"  # ModelOpt's preset that measures what scales need
    work_bytes: int = 0  # beside the weight and a quotient of its size
    config_group: ConfigGroup

    def quantize(self, linear: Any, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """(m.weight, m.weight_scale) as the scheme's storage has them, of a calibrated linear."""

    def dequantize(self, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """float32 [out, in]: the values of what `quantize` gave."""
