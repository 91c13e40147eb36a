"""Shards are planned before they are written and readable by the safetensors library."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from llmctl.quantize.checkpoint import DTYPES, read_header
from llmctl.quantize.writer import ShardWriter, TensorPlan, plan_shards

PLANS = [
    TensorPlan("a.weight", "F8_E4M3", (3,)),
    TensorPlan("a.scale", "F32", ()),
    TensorPlan("b", "BF16", (5,)),
    TensorPlan("c", "F32", (100,)),
    TensorPlan("d", "F8_E4M3", (1, 7)),
]


def value(plan: TensorPlan) -> torch.Tensor:
    dtype = getattr(torch, DTYPES[plan.dtype][0])
    return torch.arange(int(torch.Size(plan.shape).numel())).reshape(plan.shape).to(dtype)


def write(folder: Path, max_shard_bytes: int) -> None:
    with ShardWriter(folder, plan_shards(PLANS, max_shard_bytes)) as writer:
        for plan in reversed(PLANS):  # any order
            writer.write(plan.name, value(plan))


def test_every_tensor_is_aligned_whatever_stands_before_it(tmp_path: Path) -> None:
    write(tmp_path, 10_000)
    infos = read_header(tmp_path / "model.safetensors").values()
    assert [i.name for i in infos if i.offset % DTYPES[i.dtype][1]] == []


@pytest.mark.parametrize("max_shard_bytes", [10_000, 24, 1])
def test_the_safetensors_library_reads_every_shard(tmp_path: Path, max_shard_bytes: int) -> None:
    write(tmp_path, max_shard_bytes)
    found: dict[str, torch.Tensor] = {}
    for path in sorted(tmp_path.glob("*.safetensors")):
        found |= load_file(path)
    assert found.keys() == {plan.name for plan in PLANS}
    for plan in PLANS:
        assert found[plan.name].dtype == value(plan).dtype
        assert torch.equal(found[plan.name].float(), value(plan).float())


def test_shards_keep_the_limit_except_for_one_tensor_beyond_it(tmp_path: Path) -> None:
    write(tmp_path, 24)
    names = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert sorted(p.name for p in tmp_path.glob("*.safetensors")) == names
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {
        "a.scale": names[0],
        "a.weight": names[0],
        "b": names[0],
        "c": names[1],
        "d": names[2],
    }
    assert index["metadata"]["total_size"] == sum(plan.num_bytes for plan in PLANS)


def test_a_tensor_that_was_never_written_is_a_bug_and_not_a_result(tmp_path: Path) -> None:
    with (
        pytest.raises(AssertionError, match="not written"),
        ShardWriter(tmp_path, plan_shards(PLANS, 10_000)) as writer,
    ):
        writer.write("b", value(PLANS[2]))
    assert not (tmp_path / "model.safetensors.index.json").exists()
