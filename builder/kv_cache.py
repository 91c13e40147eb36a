"""The dtype of cached keys and values, and the checkpoint scales that it needs."""

from __future__ import annotations

from typing import NamedTuple

from llmctl.builder.config import BuildRequest
from llmctl.builder.scales import find_kv_scales
from llmctl.errors import BadConfig, Unsupported
from llmctl.plugins.backends.backend import BACKENDS
from llmctl.quantize.checkpoint import Checkpoint

_DTYPES = {"fp8": "float8_e4m3fn", "int8": "int8"}
_REQUESTED = {"FP8": "fp8", "INT8": "int8"}  # kv_cache_quant_algo -> --kv-cache-dtype
ALGOS = {_DTYPES[name]: algo for algo, name in _REQUESTED.items()}  # dtype of the cache -> algo


class KvCacheChoice(NamedTuple):
    """`dtype` is torch's name; `scales` are (K, V) checkpoint names a layer, None if unscaled."""

    dtype: str
    scales: list[tuple[str, str]] | None


def choose_kv_cache(
    checkpoint: Checkpoint, request: BuildRequest, num_layers: int, dtype: str, backend: str
) -> KvCacheChoice:
    """The KV cache that request and checkpoint ask for together; `dtype` is the model's.

    Scales of 1.0 are never assumed, because values beyond 448 would be cut silently; they are used
    only on request. Raises MissingTensor without scales, Unsupported, BadConfig.
    """
    info = checkpoint.quantization
    algo = info.kv_cache_algo if info is not None else None
    requested = request.kv_cache_dtype
    if requested == "auto":
        requested = "none" if algo is None else _REQUESTED[algo]
    if request.kv_cache_unit_scales:
        _require_unit_scales_possible(requested, algo, backend)
        return KvCacheChoice(_DTYPES[requested], None)
    if requested == "none":
        return KvCacheChoice(dtype, None)
    if requested not in BACKENDS[backend].quantized_kv_cache:
        raise Unsupported(
            f"an {requested.upper()} KV cache has no kernels on backend {backend!r}",
            fix="--kv-cache-dtype none, an FP8 KV cache (llmctl quantize --kv-cache-dtype fp8), or "
            "--backend cuda or cpu",
        )
    if algo is not None and requested != _REQUESTED[algo]:
        raise BadConfig(
            f"--kv-cache-dtype is {requested}, and the KV scales of {checkpoint.path} are for "
            f"{algo}",
            fix=f"--kv-cache-dtype {_REQUESTED[algo]}, or quantize again with --kv-cache-dtype "
            f"{requested}",
        )
    return KvCacheChoice(_DTYPES[requested], find_kv_scales(checkpoint, num_layers))


def _require_unit_scales_possible(requested: str, algo: str | None, backend: str) -> None:
    option = "--kv-cache-unit-scales"
    if requested == "int8":
        raise Unsupported(
            f"{option} with an INT8 KV cache: nearly every key and value would become 0",
            fix="quantize with --kv-cache-dtype int8, which measures scales",
        )
    if requested == "none":
        raise BadConfig(f"{option} is for an FP8 KV cache", fix="add --kv-cache-dtype fp8")
    if algo is not None:
        raise BadConfig(f"{option} is given, and the checkpoint has KV scales for {algo}")
    if not BACKENDS[backend].has_unit_kv_scales:
        raise Unsupported(f"{option} is not available on backend {backend!r}")
