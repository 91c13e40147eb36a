"""CUDA sources compiled by the oldest NVRTC that pyproject.toml takes: PyTorch for a GPU brings one
that is older than the newest, on which all other tests run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from support.attention import FP8
from support.attention_compiled import copies_to_shared_places
from support.fp8_attention import AllFp8World, Fp8World
from support.kernel import compile_all

from llmctl.builder.config import BuildRequest
from llmctl.builder.engine_kernels import kernel_specs
from llmctl.plugins.backends.cuda import nvrtc
from llmctl.plugins.backends.cuda.compiler import PLUGINS
from llmctl.plugins.backends.cuda.kernel_spec import KernelSpec
from llmctl.plugins.ops.paged_attention.chunk_fp8 import chunk_fp8
from llmctl.plugins.ops.paged_attention.few_fp8 import few_fp8
from llmctl.plugins.ops.rank_offers import kernel as rank_offers
from scripts.bench.plan_support import plan_shape, planned
from scripts.models.planted_shapes import SHAPES

OF_TREES, TOGETHER, ALONE, LONG = " of trees", " together", " alone", " of long contexts"
LAYERS = "fused/decoder_layers/layers.cu"
# Bytes a thread, where tests of the kernel say why.
SPILLS = {
    "ops/paged_attention/long/long.cu": 16,
    "ops/paged_attention/long/long.cu" + ALONE: 8,
    "ops/paged_attention/long_batch/long_batch.cu": 32,
    "ops/paged_attention/chunk/chunk.cu": 32,
    "ops/paged_attention/few_fp8/few_fp8.cu": 64,
}
OLDEST = Path(sys.prefix) / "oldest-nvrtc"  # scripts/test installs it


@pytest.fixture
def oldest(monkeypatch):
    if not OLDEST.exists():
        pytest.skip(f"no {OLDEST}: scripts/test installs it")
    found = list(OLDEST.glob("nvidia/*/lib/libnvrtc.so.*"))
    monkeypatch.setattr(nvrtc, "_in_wheels", lambda: [str(path) for path in found])
    monkeypatch.setattr("llmctl.plugins.backends.cuda.compiler._memo", {})
    for cached in (nvrtc.nvrtc, nvrtc.version):
        cached.cache_clear()
    yield
    for cached in (nvrtc.nvrtc, nvrtc.version):
        cached.cache_clear()


def one_of_each_source() -> dict[str, KernelSpec]:
    """The last of a source is the one with most to do: two tokens, many heads, and then trees, by
    "source of trees", of batch.cu what waits for each other, and of long.cu what is for
    many requests; of layers.cu also what is for long contexts."""
    found = {}
    for name, qformat in (("1b", "fp8"), ("8b", "w4a8_mxfp4_fp8")):
        for spec in kernel_specs(*planned(name, "FP8", qformat)):
            if not spec.is_triton:
                found[spec.source] = spec
    request = BuildRequest(
        max_batch_size=4,
        max_seq_len=8192,  # longer than what one wave of a few thread blocks reads
        max_draft_len=16,
        speculative_decoding_mode="draft_tokens_external",
        tp_size=2,
    )
    for spec in kernel_specs(*plan_shape(SHAPES["70b"], request, "FP8", "fp8")):
        if spec.constants.get("TREE"):
            found[f"{spec.source}{OF_TREES}"] = spec
        elif spec.constants.get("TOGETHER"):
            found[f"{spec.source}{TOGETHER}"] = spec
        elif spec.constants.get("ALONE"):
            found[f"{spec.source}{ALONE}"] = spec
        elif not spec.is_triton:
            found.setdefault(spec.source, spec)  # what ranks alone have
    request = BuildRequest(max_batch_size=1, max_seq_len=33280)
    for spec in kernel_specs(*plan_shape(SHAPES["1b"], request, "FP8", "fp8")):
        if spec.source == LAYERS and "tensor_map" in spec.arguments:
            found[f"{LAYERS}{LONG}"] = spec
    offers = rank_offers.spec(2, 64128, 128256, has_sums=True)  # of draft heads
    prompts = Fp8World(heads=64, kv_heads=8, size=128, kv_dtype=FP8, lengths=(64,))
    by_fp8 = chunk_fp8.fp8_specs(prompts.call([(0, 0, 1)]), prompts.limits())
    tokens = AllFp8World(heads=64, kv_heads=8, size=128, kv_dtype=FP8, lengths=(64,))
    by_fp8 += few_fp8.few_fp8_specs(tokens.call([(0, 0, 1)]), tokens.limits())
    return found | {spec.source: spec for spec in (offers, *by_fp8)}


def test_every_cuda_source_compiles_with_the_oldest_compiler_without_spills(oldest):
    assert nvrtc.version() == "13.0"
    specs = one_of_each_source()
    sources = {name.split(" ")[0] for name in specs}
    assert sources == {str(path.relative_to(PLUGINS)) for path in PLUGINS.rglob("*.cu")}
    for name, (spec, binary, code) in zip(specs, compile_all([*specs.values()]), strict=True):
        # Trees of 24 rows: paged_attention/test_trees.py.
        most = 256 if name.endswith(OF_TREES) else SPILLS.get(name, 0)
        assert binary.local_bytes <= most, spec.name
        assert not copies_to_shared_places(code), spec.name
