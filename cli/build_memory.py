"""The memory an engine will take, for people."""

from __future__ import annotations

from typing import Any


def memory_plan(summary: dict[str, Any]) -> str:
    """The memory an engine will take, for people."""
    quantization = summary["quantization"]
    rows = {
        "model": f"{summary['architecture']}, {summary['dtype']}, backend {summary['backend']}",
        "quantization": f"weights {quantization['quant_algo'] or 'none'}, "
        f"KV cache {quantization['kv_cache_quant_algo'] or summary['dtype']}",
        "weights": gigabytes(summary["weight_bytes"])
        + ("" if summary["load_format"] == "auto" else f", {summary['load_format']}, not stored"),
        "engine file": gigabytes(summary["engine_bytes"]),
        "activations": f"{gigabytes(summary['activation_bytes'])} "
        f"for {summary['max_num_tokens']} tokens a step",
        **_kernels(summary),
        "KV cache": f"{summary['kv_bytes_per_token']} bytes a token, "
        f"{gigabytes(summary['kv_bytes_per_sequence'])} a sequence of {summary['max_seq_len']}",
        "limits": f"{summary['max_batch_size']} sequences, {summary['max_draft_len']} draft tokens",
    }
    return "\n".join(f"{name:<13} {text}" for name, text in rows.items())


def _kernels(summary: dict[str, Any]) -> dict[str, str]:
    """What only engines for a GPU have."""
    if summary["compute_capability"] is None:
        return {}
    return {
        **_plans(summary),
        "kernels": f"{summary['num_kernels']} for compute capability "
        f"{summary['compute_capability']}, {gigabytes(summary['kernel_bytes'])}",
        "scratch": gigabytes(summary["scratch_bytes"]),
    }


def _plans(summary: dict[str, Any]) -> dict[str, str]:
    """What only TensorRT engines have."""
    if not summary["num_trt_pieces"]:
        return {}
    return {"plans": f"{summary['num_trt_pieces']} pieces, {gigabytes(summary['trt_bytes'])}"}


def gigabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.3g} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.3g} MB"
