"""Calibration and conversion of one decoder layer (or of lm_head), by ModelOpt.

Max calibration measures unquantized activations, so processing layers separately gives exactly the
same result: the unquantized hidden states after layer i are the ones that ModelOpt's whole-model
calibration passes to layer i+1. Scales of inputs are amax / 448, one per tensor; how weights are
quantized is up to their scheme (quantize/schemes/). The result is bit for bit ModelOpt's export (a
test compares every tensor). Weights or activations that are not finite are refused. One difference
from ModelOpt, whose export divides by zero there: a tensor that is all zero gets a nonzero scale.
"""

from __future__ import annotations

import contextlib
import copy
import io
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llmctl.errors import BadTensorShape, BadTensorValue
from llmctl.plugins.schemes.scheme import QuantizedScheme
from llmctl.quantize.checkpoint import Checkpoint
from llmctl.quantize.families import HEAD, Model, build_slice, layer_prefix
from llmctl.quantize.format import FP8_MAX, INT8_MAX
from llmctl.quantize.maxima import calibrated_maximum, require_finite
from llmctl.quantize.schemes.table import WRITERS

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

# Scale of an activation or cache that was zero throughout calibration: what readers assume when
# no scale is stored, and saturating only beyond 448.
ZERO_ACTIVATION_SCALE = 1.0
KV_CACHE_MAX = {"FP8": FP8_MAX, "INT8": INT8_MAX}  # by kv_cache_quant_algo

Tensors = Iterator[tuple[str, "torch.Tensor"]]


@dataclass(frozen=True, slots=True)
class LayerQuantizer:
    """Quantizes layers of one checkpoint, one at a time. dtype and device are those of the run."""

    checkpoint: Checkpoint
    model: Model
    dtype: torch.dtype
    device: torch.device
    scheme: QuantizedScheme
    kv_cache_algo: str | None  # FP8, INT8, or None: not quantized

    def run_layer(
        self,
        index: int,
        hidden: torch.Tensor,
        batch_size: int,
        on_batch: Callable[[], None] = lambda: None,
    ) -> Tensors:
        """Calibrate layer `index` on `hidden` and yield what the checkpoint stores for it.

        hidden [rows, tokens, hidden_size] enters the layer and is overwritten by what leaves it;
        `on_batch` is called after each batch of rows. Raises BadTensorValue.
        """
        import torch

        prefix = layer_prefix(index)
        slice_ = build_slice(self.model.model_class, self.model.config, index)
        self._load(slice_.model.layers[0], prefix, self.model.layer_shapes)

        def calibrate(slice_: PreTrainedModel) -> None:
            for batch in torch.split(hidden, batch_size):
                leaving = slice_(inputs_embeds=batch.to(self.device), use_cache=False).logits
                batch.copy_(leaving)
                on_batch()

        self._calibrate(slice_, calibrate, self._layer_config())
        low, high = hidden.aminmax()
        require_finite(low, high, f"the hidden states that leave layer {index}")
        (layer,) = slice_.model.layers
        for name in self.model.layer_shapes:
            module_name, _, attribute = name.rpartition(".")
            if module_name in self.model.linear_names and attribute == "weight":
                linear = layer.get_submodule(module_name)
                yield from quantized_linear(linear, prefix + module_name, self.scheme)
            else:
                yield prefix + name, layer.get_submodule(module_name).get_parameter(attribute)
        if self.kv_cache_algo is not None:
            largest = KV_CACHE_MAX[self.kv_cache_algo]
            for key in ("k", "v"):
                quantizer = getattr(layer.self_attn, f"{key}_bmm_quantizer")
                name = f"{prefix}self_attn.{key}_proj.{key}_scale"
                yield name, _activation_scale(quantizer, name, largest)
        _drop_weights(slice_)

    def run_head(self, hidden: torch.Tensor, batch_size: int) -> Tensors:
        """Calibrate lm_head behind the final norm and yield it quantized."""
        import torch

        slice_ = build_slice(self.model.model_class, self.model.config, None)
        shape = self.model.outer_shapes[HEAD]
        self._load(slice_.lm_head, "lm_head.", {"weight": shape})
        self._load(slice_.model.norm, "model.norm.", {"weight": shape[1:]})

        def calibrate(slice_: PreTrainedModel) -> None:
            for batch in torch.split(hidden, batch_size):
                slice_(inputs_embeds=batch.to(self.device), use_cache=False)

        self._calibrate(slice_, calibrate, _head_config(self.scheme))
        yield from quantized_linear(slice_.lm_head, "lm_head", self.scheme)
        _drop_weights(slice_)

    def pass_layer(self, index: int, hidden: torch.Tensor, batch_size: int) -> None:
        """Run layer `index` as it is: hidden [rows, tokens, hidden_size] is overwritten."""
        slice_ = build_slice(self.model.model_class, self.model.config, index)
        self._load(slice_.model.layers[0], layer_prefix(index), self.model.layer_shapes)
        self._pass(slice_, hidden, batch_size)

    def pass_norm(self, hidden: torch.Tensor, batch_size: int) -> None:
        """Run the final norm: hidden becomes what the output projection reads."""
        from torch import nn

        slice_ = build_slice(self.model.model_class, self.model.config, None)
        self._load(slice_.model.norm, "model.norm.", {"weight": ()})
        slice_.lm_head = nn.Identity()
        self._pass(slice_, hidden, batch_size)

    def _pass(self, slice_: PreTrainedModel, hidden: torch.Tensor, batch_size: int) -> None:
        import torch

        slice_.model.rotary_emb.to(self.device)
        with torch.inference_mode():
            for batch in torch.split(hidden, batch_size):
                leaving = slice_(inputs_embeds=batch.to(self.device), use_cache=False).logits
                batch.copy_(leaving)
        _drop_weights(slice_)

    def read(self, name: str) -> torch.Tensor:
        """One source tensor in the run's dtype, on its device.

        Raises BadTensorShape if it is stored quantized, BadTensorValue if it is not finite.
        """
        import torch

        stored = self.checkpoint.read(name)
        if not stored.is_floating_point() or stored.itemsize < 2:
            info = self.checkpoint.info(name)
            raise BadTensorShape(
                f"{name} in {info.file} is {info.dtype}; an unquantized float tensor is wanted",
                fix="start from the unquantized checkpoint",
            )
        tensor = stored.to(device=self.device, dtype=self.dtype)
        if tensor.numel():
            low, high = torch.aminmax(tensor)
            require_finite(low, high, f"{name} in {self.checkpoint.info(name).file}")
        return tensor

    def _load(self, module: torch.nn.Module, prefix: str, shapes: Any) -> None:
        weights = {name: self.read(prefix + name) for name in shapes}
        module.load_state_dict(weights, strict=True, assign=True)

    def _layer_config(self) -> dict[str, Any]:
        mtq = import_modelopt()
        config = _preset(mtq, self.scheme)
        if self.kv_cache_algo is not None:  # it measures the same maxima for INT8
            config["quant_cfg"] += copy.deepcopy(mtq.FP8_KV_CFG["quant_cfg"])
        return config

    def _calibrate(
        self,
        slice_: PreTrainedModel,
        loop: Callable[[PreTrainedModel], None],
        config: dict[str, Any],
    ) -> None:
        import torch

        slice_.model.rotary_emb.to(self.device)
        try:
            with torch.inference_mode(), _quiet():
                import_modelopt().quantize(slice_, config, loop)
        except AssertionError as error:  # how ModelOpt says that a maximum is NaN
            raise BadTensorValue(
                f"calibrating {self.checkpoint.path} met values that are not finite: {error}",
                fix="check rope_scaling and the weights; the unquantized model computes NaN too",
            ) from error


def calibrate_module(module: Any, loop: Callable[[Any], None], scheme: QuantizedScheme) -> None:
    """Calibrate every linear of a module that is no decoder layer."""
    mtq = import_modelopt()
    with _quiet():
        mtq.quantize(module, _preset(mtq, scheme), loop)


def import_modelopt() -> Any:
    """modelopt.torch.quantization, without its warning that it was not tested with this
    transformers version.

    Importing it takes seconds. Raises ImportError if the `quantize` extra is not installed.
    """
    with _quiet():
        import modelopt.torch.quantization as mtq
    return mtq


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """ModelOpt prints a line per call and warns about versions; stdout is reserved for results."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


def _preset(mtq: Any, scheme: QuantizedScheme) -> dict[str, Any]:
    preset: dict[str, Any] = getattr(mtq, WRITERS[scheme.name].calibration)
    return copy.deepcopy(preset)


def _head_config(scheme: QuantizedScheme) -> dict[str, Any]:
    config = _preset(import_modelopt(), scheme)
    config["quant_cfg"] += [
        {"quantizer_name": f"*lm_head*{part}_quantizer", "cfg": {"num_bits": (4, 3), "axis": None}}
        for part in ("weight", "input")
    ]
    return config


def quantized_linear(linear: Any, name: str, scheme: QuantizedScheme) -> Tensors:
    """`.weight` and `.weight_scale` as the scheme has them, `.input_scale` float32 []."""
    weight, scale = WRITERS[scheme.name].quantize(linear, name)
    yield f"{name}.weight", weight
    yield f"{name}.weight_scale", scale
    yield f"{name}.input_scale", _activation_scale(linear.input_quantizer, name)


def _activation_scale(quantizer: Any, name: str, largest: float = FP8_MAX) -> torch.Tensor:
    scale = calibrated_maximum(quantizer, name) / largest
    return scale if scale > 0 else scale.new_tensor(ZERO_ACTIVATION_SCALE)


def _drop_weights(slice_: PreTrainedModel) -> None:
    """Free a slice at once: ModelOpt's modules form cycles that only a full collection would."""
    for parameter in slice_.parameters():
        parameter.data = parameter.data.new_empty(0)
