"""Where ranks of a cuda engine may run: a GPU each, or all on one where somebody asks for it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from llmctl.errors import BadConfig, NoDevice, RebuildNeeded, Unsupported
from llmctl.runtime.engines.device_check import require_ranks
from llmctl.runtime.engines.open_cpu import CpuOpener
from llmctl.runtime.engines.open_gpu import GpuOpener


def config(ranks: int, backend: str = "cuda", cache: str = "paged") -> Any:
    build = {"kv_cache_type": cache}
    fields = {"backend": backend, "compute_capability": "9.0", "build_config": build}
    return SimpleNamespace(num_ranks=ranks, **fields)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Two that reach each other; tests change it."""
    found: dict[str, Any] = {"count": 2, "apart": set()}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: found["count"])

    def can_reach(one: int, other: int) -> bool:
        return (one, other) not in found["apart"]

    found["capability"], found["sms"] = {}, {}  # of those that are no H100
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", can_reach)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda gpu: f"card {gpu}")
    monkeypatch.setattr(
        torch.cuda, "get_device_capability", lambda gpu: found["capability"].get(gpu, (9, 0))
    )
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda gpu: SimpleNamespace(multi_processor_count=found["sms"].get(gpu, 132)),
    )
    return found


def test_ranks_have_a_gpu_each(gpus: dict[str, Any]) -> None:
    require_ranks(config(1), on_one_device=False)
    require_ranks(config(2), on_one_device=False)
    with pytest.raises(NoDevice, match="4 ranks, which want a GPU each; torch .* finds 2") as told:
        require_ranks(config(4), on_one_device=False)
    assert "--ranks-on-one-device" in told.value.fix and "--tp-size 1" in told.value.fix
    require_ranks(config(4), on_one_device=True)


def test_gpus_reach_each_other_both_ways(gpus: dict[str, Any]) -> None:
    gpus["apart"] = {(1, 0)}
    with pytest.raises(Unsupported, match="GPU 1 cannot use the memory of GPU 0"):
        require_ranks(config(2), on_one_device=False)


def test_every_rank_has_a_gpu_of_the_kind_that_the_engine_was_built_for(
    gpus: dict[str, Any],
) -> None:
    """Rank 0 finds out, before any process reads a weight."""

    def check(ranks: int, *, together: bool = False) -> None:
        GpuOpener().check(config(ranks), None, ranks_on_one_device=together)

    check(2)
    gpus["capability"] = {1: (8, 0)}
    with pytest.raises(RebuildNeeded, match=r"GPU 1 \(card 1\), rank 1's, has 8\.0"):
        check(2)
    check(1)
    check(2, together=True)
    gpus["capability"], gpus["sms"] = {}, {1: 114}
    with pytest.raises(RebuildNeeded, match=r"GPU 1 \(card 1\), rank 1's, has 114"):
        check(2)


def test_one_device_is_refused_where_it_means_nothing(gpus: dict[str, Any]) -> None:
    with pytest.raises(BadConfig, match="for cuda engines of several ranks; this one is cuda with"):
        require_ranks(config(1), on_one_device=True)
    with pytest.raises(BadConfig, match="this one is tensorrt with 2 ranks"):
        require_ranks(config(2, "tensorrt"), on_one_device=True)
    with pytest.raises(Unsupported, match="is for cuda engines; this one is cpu"):
        CpuOpener().check(config(2, "cpu"), None, ranks_on_one_device=True)


def test_blocks_in_host_memory_are_refused_where_they_cannot_leave_the_gpu(
    gpus: dict[str, Any],
) -> None:
    check = GpuOpener().check
    check(config(2), None, ranks_on_one_device=True, has_host_tier=True)
    with pytest.raises(Unsupported, match="host-memory-bytes is refused: blocks of several ranks"):
        check(config(2), None, ranks_on_one_device=False, has_host_tier=True)
    with pytest.raises(Unsupported, match="host-memory-bytes is refused: .* is continuous"):
        linear = config(1, "tensorrt", "CONTINUOUS")
        check(linear, None, ranks_on_one_device=False, has_host_tier=True)


def test_a_launcher_starts_no_ranks_of_one_device(
    gpus: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    with pytest.raises(BadConfig, match="all 2 ranks in one process, and Open MPI started 2"):
        require_ranks(config(2), on_one_device=True)
    require_ranks(config(2), on_one_device=False)


def test_without_a_gpu_the_number_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(NoDevice, match="finds 0"):
        require_ranks(config(2), on_one_device=False)
