"""The files of a cuda engine of two ranks, opened together or each alone, down to its launches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.attention_models import give_heads
from support.cuda_program import STREAM, Recorder
from support.planted import ACCEPTANCE, SEED
from support.stand_ins import stand_in_kernels
from support.tensorrt.checkpoints import write_checkpoint as write_small

from llmctl.builder.build import plan_build, run_build
from llmctl.builder.config import BuildRequest
from llmctl.builder.planted import LoadFormat
from llmctl.plugins.backends.cuda import device_kernels
from llmctl.plugins.backends.cuda.kernel_spec import Peers, StepShape, TensorMap
from llmctl.plugins.backends.cuda.queue import DeviceQueue
from llmctl.runtime.engines.engine_file import EngineFile, exchange_bytes, slot_bytes
from scripts.models.make_planted_checkpoints import Recipe, write_checkpoint

SHAPE = StepShape(3, 1, 3, 3, 3)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    write_checkpoint(folder / "c", Recipe("tiny", "target", ACCEPTANCE, SEED), config_only=True)
    give_heads(folder / "c", "1b", ranks=2)
    request = BuildRequest(max_batch_size=2, max_seq_len=64, max_num_tokens=32, tp_size=2)
    weights = LoadFormat("planted", SEED, "target", ACCEPTANCE)
    with stand_in_kernels():
        planned = plan_build(folder / "c", request, backend="cuda", load_format=weights)
        run_build(planned, folder / "e")
    return folder / "e"


def launched(
    file: EngineFile, monkeypatch: pytest.MonkeyPatch, peers: Peers | None = None
) -> list[str]:
    """Kernels of a step, by name."""
    recorder = Recorder()
    monkeypatch.setattr(device_kernels, "cuda_driver", lambda index: recorder)
    loaded, _ = file.load(DeviceQueue("cpu"), peers)
    loaded.allocate_kv_cache(3)
    loaded.program.enqueue(SHAPE, STREAM)
    return [name for name, *_ in recorder.launched]


def peers_of(file: EngineFile) -> Peers:
    """Of rank 1 of two."""
    return Peers(
        rank=1,
        num_ranks=2,
        bases=torch.zeros(2, dtype=torch.int64),
        state=torch.zeros(4, dtype=torch.int32),
        lost=torch.zeros(4, dtype=torch.int32),
        slot_bytes=slot_bytes([file]),
        limit_ns=1,
    )


def test_ranks_launch_together_what_each_launches_alone(
    engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernels of one rank twice, but the gathering of logits, and other kernels for sums."""
    together, alone = EngineFile.open(engine), EngineFile.open(engine, rank=1)
    assert [rank.number for rank in alone.ranks] == [1] and len(together.ranks) == 2
    peers = peers_of(alone)
    both, own = launched(together, monkeypatch), launched(alone, monkeypatch, peers)
    exchanged = [name for name in own if ".peers." in name]
    assert len(exchanged) == 2 * 2 + 1, "two sums a layer, and the logits"
    pushing = [name for name in own if ".pushed2" in name]
    assert len(pushing) == 2 * 2, "the product before every sum"
    rest = [name.replace(".pushed2", "") for name in own if ".peers." not in name]
    sums = [name for name in both if name.startswith(("all_reduce", "all_gather"))]
    assert len(sums) == 2 * 2 * 2 + 1 and not any(".peers." in name for name in sums)
    norms = [name for name in both if name.startswith("rms_norm")]
    assert len(norms) == 2 * 2 * 2, "in the launch of the sum where ranks have a device each"
    assert sorted(name for name in both if name not in sums + norms) == sorted(2 * rest)


def test_sums_of_like_layers_are_packed_once_and_rebound(
    engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launches are those that each call would describe itself, together and apart."""
    for rank in (None, 1):
        recorder = Recorder()
        monkeypatch.setattr(device_kernels, "cuda_driver", lambda index, own=recorder: own)
        file = EngineFile.open(engine, rank=rank)
        loaded, _ = file.load(DeviceQueue("cpu"), None if rank is None else peers_of(file))
        loaded.allocate_kv_cache(3)
        program = loaded.program
        program.enqueue(SHAPE, STREAM)
        sums = [name for name, *_ in recorder.launched if name.startswith("all_reduce_norm")]
        assert rank is None or len(sums) == 2 * 2
        num_prepared, rebound = recorder.num_prepared, list(recorder.launched)
        assert recorder.num_rebound > 0
        recorder.launched.clear()
        program._looks = [None] * len(program._looks)
        program.forget()
        program.enqueue(SHAPE, STREAM)
        assert recorder.num_prepared - num_prepared > num_prepared, "then each is described"
        assert list(map(described, recorder.launched)) == list(map(described, rebound))


def described(launch: tuple[Any, ...]) -> tuple[Any, ...]:
    name, grid, arguments, *rest = launch
    return name, grid, list(map(place_of, arguments)), *rest


def place_of(argument: Any) -> Any:
    if isinstance(argument, TensorMap):
        boxes = (argument.box_rows, argument.box_columns, argument.swizzle)
        return argument.tensor.data_ptr(), *boxes
    return argument.data_ptr() if isinstance(argument, torch.Tensor) else argument


def test_memory_is_that_of_the_ranks_on_the_device(engine: Path) -> None:
    together, alone = EngineFile.open(engine), EngineFile.open(engine, rank=0)
    both, own = together.memory("target"), alone.memory("target")
    assert both.weight_bytes == 2 * own.weight_bytes
    assert both.kv_bytes_per_block == 2 * own.kv_bytes_per_block
    assert both.scratch_bytes == own.scratch_bytes
    assert slot_bytes([alone]) == 32 * 256 * 4  # a row of 256 for each of 32 tokens
    assert 4 * slot_bytes([alone]) < exchange_bytes([alone]) <= 4 * slot_bytes([alone]) + (2 << 20)


def test_one_rank_adds_the_parts_of_its_sums_and_exchanges_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parted = {"hidden_size": 128, "head_dim": 128, "num_attention_heads": 8}
    write_small(tmp_path / "c", "llama", "fp8", **parted, intermediate_size=1024)
    request = BuildRequest(max_batch_size=2, max_seq_len=64, max_num_tokens=32, tp_invariant=True)
    weights = LoadFormat("dummy", SEED)
    with stand_in_kernels():
        planned = plan_build(tmp_path / "c", request, backend="cuda", load_format=weights)
        run_build(planned, tmp_path / "e")
    file = EngineFile.open(tmp_path / "e")
    sums = [name for name in launched(file, monkeypatch) if name.startswith("all_reduce")]
    layers = planned.config.pretrained_config["num_hidden_layers"]
    assert sums == ["all_reduce.bf16.w128.r1.l8.weight_scale.x_scale"] * (2 * layers)
    assert slot_bytes([file]) == exchange_bytes([file]) == 0


def test_one_rank_without_the_others_is_refused_its_launches(
    engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(AssertionError, match="a program of one rank computes what 2 ranks"):
        launched(EngineFile.open(engine, rank=0), monkeypatch)
