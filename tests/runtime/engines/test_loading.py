"""Weights come out of an engine file byte by byte as they are in it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from llmctl.builder.container import map_container, read_container_header
from llmctl.builder.engine_format import KvCacheSpec, Plan, PlanTensor, engine_file, write_engine
from llmctl.errors import CorruptEngine
from llmctl.plugins.backends.cuda import load
from llmctl.plugins.backends.cuda.queue import DeviceQueue
from llmctl.runtime.engines.loading import Loading
from llmctl.runtime.engines.weight_places import WEIGHT_ALIGNMENT, allocated_bytes

SHAPES = {
    "big": ("bfloat16", (300, 64)),
    "odd": ("float8_e4m3fn", (7, 11)),
    "scale": ("float32", (1,)),
    "more": ("float16", (5, 640)),
    "empty-less": ("int32", (3,)),
}


@pytest.fixture
def stored(tmp_path: Path) -> tuple[Path, Plan, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    tensors = tuple(PlanTensor(name, "weight", dtype, s) for name, (dtype, s) in SHAPES.items())
    cache = KvCacheSpec(1, 1, 16, 32, "bfloat16", (0,))
    plan = Plan(tensors, (), cache, "logits", 0, 1, 1)
    values = {}
    for tensor in tensors:
        dtype: torch.dtype = getattr(torch, tensor.dtype)
        count = torch.Size(tensor.shape).numel() * dtype.itemsize
        raw = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)
        values[tensor.name] = raw.view(dtype).view(tensor.shape)

    def chunks(name: str) -> Iterator[torch.Tensor]:
        yield values[name]

    write_engine(tmp_path, plan, chunks, lambda _: None)
    return tmp_path / engine_file(0), plan, values


def mapped(path: Path) -> dict[str, torch.Tensor]:
    raw, header = read_container_header(path)
    return map_container(path, header, len(raw))


@pytest.mark.parametrize("chunk_bytes", [64, 1000, 1 << 20])
def test_every_weight_arrives_whole_in_aligned_memory(
    stored: tuple[Path, Plan, dict[str, torch.Tensor]],
    monkeypatch: pytest.MonkeyPatch,
    chunk_bytes: int,
) -> None:
    monkeypatch.setattr(load, "CHUNK_BYTES", chunk_bytes)
    path, plan, values = stored
    loading = Loading(path, plan, mapped(path), DeviceQueue("cpu"))
    weights, report = loading.weights, loading.finish()
    assert list(weights) == list(SHAPES)
    base = min(weight.data_ptr() for weight in weights.values())
    for name, weight in weights.items():
        assert weight.dtype == values[name].dtype and weight.shape == values[name].shape
        assert torch.equal(weight.view(torch.uint8), values[name].view(torch.uint8)), name
        assert (weight.data_ptr() - base) % WEIGHT_ALIGNMENT == 0
    assert report.num_bytes == sum(value.nbytes for value in values.values())
    assert allocated_bytes(plan) >= report.num_bytes


def test_weights_that_are_generated_get_room_and_are_not_read(
    stored: tuple[Path, Plan, dict[str, torch.Tensor]],
) -> None:
    path, plan, values = stored
    extra = PlanTensor("made", "weight", "bfloat16", (64, 64), is_stored=False)
    plan = replace(plan, tensors=(extra, *plan.tensors))
    loading = Loading(path, plan, mapped(path), DeviceQueue("cpu"))
    weights, report = loading.weights, loading.finish()
    assert weights["made"].shape == (64, 64)
    assert torch.equal(weights["more"].view(torch.uint8), values["more"].view(torch.uint8))
    assert report.num_bytes == sum(value.nbytes for value in values.values())


def test_a_file_that_shrinks_while_it_is_read_is_named(
    stored: tuple[Path, Plan, dict[str, torch.Tensor]],
) -> None:
    path, plan, _ = stored
    views = mapped(path)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 5000)
    with pytest.raises(CorruptEngine, match="ends at byte"):
        Loading(path, plan, views, DeviceQueue("cpu")).finish()
