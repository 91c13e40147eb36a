"""Weights and rotary tables as they arrive on a GPU: the file's bytes, and a host's bits."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from llmctl.builder.container import map_container, read_container_header
from llmctl.builder.engine_format import KvCacheSpec, Plan, PlanTensor, engine_file, write_engine
from llmctl.builder.rope import read_rope
from llmctl.plugins.backends.cuda import load
from llmctl.plugins.backends.cuda.load_ahead import ReadingAhead
from llmctl.plugins.backends.cuda.queue import DeviceQueue
from llmctl.runtime.engines.loading import Loading
from llmctl.runtime.engines.rotary_tables import make_rotary_tables

LLAMA = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_theta": 500000.0,
}
SHAPES = {
    "big": ("bfloat16", (9000, 4096)),
    "odd": ("float8_e4m3fn", (7, 11)),
    "one": ("int32", (1,)),
}


@pytest.mark.parametrize(("chunk_bytes", "ring"), [(1 << 20, 3), (10_000, 1), (1 << 24, 2)])
def test_everything_arrives_as_the_file_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk_bytes: int, ring: int
) -> None:
    monkeypatch.setattr(load, "CHUNK_BYTES", chunk_bytes)
    monkeypatch.setattr(load, "RING", ring)
    config = {"rope_parameters": LLAMA, "max_position_embeddings": 131072}
    definition = read_rope(config, 1e4, "this test").definition(128)
    tensors = [PlanTensor(name, "weight", dtype, shape) for name, (dtype, shape) in SHAPES.items()]
    tensors.append(PlanTensor("rotary", "weight", "float32", (131072, 128), is_stored=False))
    cache = KvCacheSpec(1, 1, 128, 32, "bfloat16", (0,))
    plan = Plan(tuple(tensors), (), cache, {}, 0, 1, 1, rotary={"rotary": definition})
    values = {
        name: torch.randint(0, 120, (*shape[:-1], shape[-1] * getattr(torch, dtype).itemsize))
        .to(torch.uint8)
        .view(getattr(torch, dtype))
        for name, (dtype, shape) in SHAPES.items()
    }

    def chunks(name: str) -> Iterator[torch.Tensor]:
        yield values[name]

    write_engine(tmp_path, plan, chunks, lambda _: None)
    path = tmp_path / engine_file(0)
    raw, header = read_container_header(path)
    loading = Loading(path, plan, map_container(path, header, len(raw)), DeviceQueue("cuda"))
    weights, report = loading.weights, loading.finish()
    for name, wanted in values.items():
        assert torch.equal(weights[name].cpu().view(torch.uint8), wanted.view(torch.uint8)), name
    assert torch.equal(weights["rotary"].cpu(), make_rotary_tables(plan)["rotary"])
    assert report.num_bytes == sum(value.nbytes for value in values.values())


def test_a_file_is_read_into_memory_that_torch_takes_over(tmp_path: Path) -> None:
    values = torch.randint(0, 256, (50_000_000,), dtype=torch.uint8)
    path = tmp_path / "weights"
    path.write_bytes(values.numpy().tobytes())
    size = 1 << 30
    pieces = [(1000, 49_000_000, 256), (0, 7, size - 7)]
    reading = ReadingAhead(path, pieces, size)
    assert reading.held_bytes == size
    memory = torch.as_tensor(reading.take_memory(), device="cuda")
    assert memory.dtype == torch.uint8 and memory.numel() == size and reading.held_bytes == 0
    assert reading.wait() > 0
    assert torch.equal(memory[256 : 256 + 48_999_000].cpu(), values[1000:49_000_000])
    assert torch.equal(memory[-7:].cpu(), values[:7])
    held, _ = torch.cuda.mem_get_info()
    del memory, reading
    gc.collect()
    assert torch.cuda.mem_get_info()[0] >= held + size // 2
    unused = ReadingAhead(path, pieces, size)
    assert unused.held_bytes == size
    del unused
    gc.collect()
    assert torch.cuda.mem_get_info()[0] >= held + size // 2
