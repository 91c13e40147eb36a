"""Which code draws a row, and that rows come back in their places."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.cuda import launch_sampling

from llmctl.errors import DeviceFailure, OutOfMemory
from llmctl.plugins.backends.cpu import CpuSampling
from llmctl.plugins.backends.cuda.kernel_spec import Launch
from llmctl.plugins.backends.cuda.queue import DeviceLogits, DeviceQueue, device_errors
from llmctl.plugins.ops.sampling.cuda import MAX_ROWS, CudaSampling, draws_on_device
from llmctl.plugins.ops.sampling.spec import ACCEPT_STREAM, DRAFT_STREAM, SamplingRow
from llmctl.runtime.request import SamplingConfig

VOCAB = 131  # odd: rows of a slice do not start on 16 bytes
QUEUE = DeviceQueue("cpu")


def logits(rows: int) -> DeviceLogits:
    generator = torch.Generator().manual_seed(rows)
    return DeviceLogits(torch.randn(rows, VOCAB, generator=generator) * 3, QUEUE)


def sampling() -> tuple[CudaSampling, list[int]]:
    """(the backend, rows of each launch of a draw)."""
    drawn: list[int] = []

    def launch(launches: list[Launch]) -> None:
        for item in launches:
            launch_sampling(item)
        drawn.append(int(launches[-1].arguments[-1]) if len(launches) > 1 else launches[0].grid[1])

    return CudaSampling(QUEUE, launch), drawn


def rows(count: int) -> list[SamplingRow]:
    """Greedy, sampled, banned, penalised, and kept drafts in turn."""
    seen = np.zeros(VOCAB, np.int32)
    seen[5:60] = 2
    made = []
    for index in range(count):
        seed, position = (index << 35) + 17, 100 + index
        made.append(
            [
                SamplingRow(SamplingConfig(), seed, position),
                SamplingRow(SamplingConfig(temperature=0.7, top_k=0), seed, position),
                SamplingRow(SamplingConfig(top_k=9, top_p=0.8), seed, position, banned=(3, 4, 90)),
                SamplingRow(SamplingConfig(presence_penalty=2.0), seed, position, seen),
                SamplingRow(SamplingConfig(top_p=0.9, min_p=0.1), seed, position),
                SamplingRow(SamplingConfig(top_k=20), seed, position, stream=DRAFT_STREAM),
            ][index % 6]
        )
    return made


@pytest.mark.parametrize("count", [1, 6, 2 * MAX_ROWS + 5])
def test_tokens_equal_those_of_the_host_in_order(count: int) -> None:
    backend, _ = sampling()
    found = backend.sample_rows(logits(count), rows(count))
    wanted = CpuSampling().sample_rows(logits(count).numpy(), rows(count))
    assert found.dtype == np.int64 and found.tolist() == wanted.tolist()


def test_bans_penalties_and_kept_drafts_are_drawn_on_the_host() -> None:
    backend, drawn = sampling()
    asked = rows(12)
    assert [draws_on_device(row) for row in asked[:6]] == [True, True, False, False, True, False]
    backend.sample_rows(logits(12), asked)
    assert drawn == [6]
    drawn.clear()
    backend.sample_rows(logits(4)[2:4], asked[2:4])
    assert drawn == []


def test_a_row_is_drawn_by_the_same_code_whatever_is_beside_it() -> None:
    backend, _ = sampling()
    together = backend.sample_rows(logits(30), rows(30)).tolist()
    alone = [
        backend.sample_rows(logits(30)[index : index + 1], [row])[0]
        for index, row in enumerate(rows(30))
    ]
    assert together == alone


def test_argmax_works_in_groups_and_gives_minus_one_for_nan() -> None:
    backend, drawn = sampling()
    values = logits(MAX_ROWS + 3)
    values.tensor[7, 3] = float("nan")
    found = backend.argmax(values)
    assert found.tolist() == CpuSampling().argmax(values.numpy()).tolist()
    assert found[7] == -1 and drawn == [MAX_ROWS, 3]
    assert backend.argmax(logits(4)[:0]).tolist() == []


def test_whole_distributions_come_from_the_host() -> None:
    backend, _ = sampling()
    host, values, asked = CpuSampling(), logits(6), rows(6)
    assert (
        backend.processed_probs(values, asked) == host.processed_probs(values.numpy(), asked)
    ).all()
    tokens = [1, 2, 3, 4, 5, 6]
    assert backend.log_softmax_at(values, tokens) == host.log_softmax_at(values.numpy(), tokens)
    row = SamplingRow(SamplingConfig(top_k=5), 3, 4, stream=ACCEPT_STREAM)
    assert backend.uniforms([row]) == host.uniforms([row])


def test_logits_are_sliced_picked_and_narrowed() -> None:
    values = logits(9)
    plain = values.numpy()
    assert (len(values), values.shape) == (9, (9, VOCAB))
    assert (values[2:5].numpy() == plain[2:5]).all()
    assert (values[[8, 0, 3]].numpy() == plain[[8, 0, 3]]).all()
    narrow = values.columns(50)
    assert narrow.tensor.is_contiguous() and (narrow.numpy() == plain[:, :50]).all()


def test_failures_of_a_device_get_names() -> None:
    with (
        pytest.raises(DeviceFailure, match="reading results: CUDA error: an illegal memory"),
        device_errors("reading results"),
    ):
        raise RuntimeError("CUDA error: an illegal memory access\nmore about it")
    with (
        pytest.raises(OutOfMemory, match="allocating weights"),
        device_errors("allocating weights"),
    ):
        raise torch.OutOfMemoryError("tried to allocate 1 GiB")
    with pytest.raises(OutOfMemory, match="as it was"), device_errors("allocating weights"):
        raise OutOfMemory("as it was")
