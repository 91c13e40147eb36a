"""What `llmctl inspect` prints about a checkpoint, for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from llmctl.cli.inspect.engine_text import SHORT_DTYPES, ranges
from llmctl.cli.table import size, table


def checkpoint_text(checkpoint: Mapping[str, Any]) -> Iterator[str]:
    """Lines: the model, its quantization, tensors, scales, files."""
    yield str(checkpoint["path"])
    yield from table(list(_summary(checkpoint)))
    yield from ("", f"tensors ({checkpoint['num_tensors']})")
    head = ("name", "dtype", "shape", "layers", "bytes")
    rows = [
        (
            group["name"],
            SHORT_DTYPES.get(group["dtype"], group["dtype"]),
            "x".join(map(str, group["shape"])) or "scalar",
            ranges(group["layers"]) or "-",
            size(group["bytes"]),
        )
        for group in checkpoint["tensors"]
    ]
    yield from table([head, *rows], right=(4,))
    if checkpoint["scales"]:
        yield from ("", "scales (real value = stored value x scale)")
        rows = [
            (
                scale["name"],
                f"{scale['count']} x {scale['values_each']}",
                _number(scale["smallest"]),
                _number(scale["largest"]),
                f"{scale['non_finite']} not finite" if scale["non_finite"] else "",
            )
            for scale in checkpoint["scales"]
        ]
        yield from table([("name", "count", "smallest", "largest", ""), *rows], right=(2, 3))
    yield from ("", "files")
    yield from table([(f["name"], size(f["bytes"])) for f in checkpoint["files"]], right=(1,))


def _summary(checkpoint: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    model, quantization = checkpoint["model"], checkpoint["quantization"]
    given = model["architectures"]
    if not isinstance(given, list) or not given:
        given = [model["model_type"] or "unknown"]
    layers, heads = model["num_hidden_layers"], model["num_attention_heads"]
    sizes = (  # config.json of a draft head does not say all
        (layers, f"{layers} layer{'' if layers == 1 else 's'}"),
        (model["hidden_size"], f"hidden {model['hidden_size']}"),
        (model["vocab_size"], f"vocabulary {model['vocab_size']}"),
    )
    told = (text for value, text in sizes if value is not None)
    yield "model", ", ".join((*map(str, given), *told))
    if heads is not None:
        yield (
            "attention",
            f"{heads} heads, {model['num_key_value_heads'] or heads} for keys and values",
        )
    yield (
        "weights",
        f"{checkpoint['num_values'] / 1e6:,.1f} million values, {size(checkpoint['bytes'])}: "
        + ", ".join(
            f"{SHORT_DTYPES.get(dtype, dtype)} {size(row['bytes'])} in {row['tensors']}"
            for dtype, row in checkpoint["dtypes"].items()
        ),
    )
    if quantization is None:
        yield "quantization", "none"
        return
    yield (
        "quantization",
        f"{quantization['algo'] or 'weights as stored'} ({quantization['method']}), weight scales "
        f"per {quantization['weight_scales'] or 'nothing'}, activation scales "
        f"{quantization['activation_scales'] or 'none'}, KV cache "
        f"{quantization['kv_cache_algo'] or 'unquantized'}",
    )
    yield "unquantized", ", ".join(quantization["exclude"]) or "nothing by name"


def _number(value: float | None) -> str:
    return "not read" if value is None else f"{value:.4g}"
