"""Descriptions of the sample kernels; sources are relative to tests/."""

from __future__ import annotations

from dataclasses import replace

from llmctl.plugins.backends.cuda.kernel_spec import KernelSpec

NORM = KernelSpec(
    "sample.norm",
    "support.cuda_samples.sample_triton:scaled_norm",
    ("*bf16", "*fp32", "*fp8e4nv", "i32", "fp32"),
    {"WIDTH": 256, "PDL": True},
)
PRODUCT = KernelSpec(
    "sample.product",
    "support.cuda_samples.sample_triton:product",
    ("*fp8e4nv", "*fp8e4nv", "*fp32"),
    {"M": 64, "N": 16, "K": 128},
)
ADD_ROWS = KernelSpec(
    "sample.add_rows",
    "support/cuda_samples/sample.cu",
    ("*fp32", "*fp32", "i32", "i64", "fp32"),
    {"WIDTH": 256},
    entry="add_rows",
    shared_bytes=1024,
)
COPY_BOX = replace(ADD_ROWS, entry="copy_box", arguments=("tensor_map", "*u8", "i32"))
