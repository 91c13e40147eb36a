"""The sampling and bookkeeping kernels on a GPU against their references, at real vocabularies."""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from support.gpu import replay
from support.sampling import CASES, is_border_tie, make_arrays, make_logits, make_rows

from llmctl.plugins.backends.cuda.compiler import compile_kernel
from llmctl.plugins.backends.cuda.driver import cuda_driver
from llmctl.plugins.backends.cuda.kernel_spec import DeviceStep, Launch, StepLimits
from llmctl.plugins.device_loop import kernel as rounds_kernel
from llmctl.plugins.device_loop import reference as rounds_reference
from llmctl.plugins.device_loop.state import RoundState
from llmctl.plugins.ops.sampling import kernel
from llmctl.plugins.ops.sampling.arrays import DrawnRows, SamplingScratch
from llmctl.plugins.ops.sampling.reference import argmax_rows, sample_rows
from llmctl.plugins.ops.sampling.spec import SamplingRow


def run(launches: Sequence[Launch]) -> None:
    driver = cuda_driver()
    for launch in launches:
        loaded = driver.load(compile_kernel(launch.spec))
        stream = torch.cuda.current_stream().cuda_stream
        driver.prepare(loaded, launch.grid, launch.arguments, True)(stream)
    torch.cuda.synchronize()


def draw(logits: np.ndarray, rows: Sequence[SamplingRow], slots: int = 32) -> list[int]:
    count, vocab = logits.shape
    scratch = SamplingScratch.allocate(count, vocab, "cuda", slots=slots)
    out = torch.full((count,), -9, dtype=torch.int32, device="cuda")
    drawn = DrawnRows(count, *make_arrays(rows, "cuda"))
    device_logits = torch.from_numpy(logits).cuda()
    run(kernel.sample(device_logits, out, scratch, drawn, has_wide=True))
    return out.tolist()


@pytest.mark.parametrize(("vocab", "step"), [(300, 1), (4097, 1), (128256, 5), (151936, 9)])
def test_tokens_equal_the_reference(vocab: int, step: int):
    batches, rows = [], []
    for seed, params in enumerate(CASES[:: min(step, 3)]):
        logits = make_logits(vocab, seed)[:: 1 if step == 1 else 3]
        batches.append(logits)
        rows += make_rows(params, len(logits), seed)
    logits = np.concatenate(batches)
    found, wanted = draw(logits, rows), sample_rows(logits, rows)
    assert draw(logits, rows, slots=3) == found
    different = [
        (rows[i].params, found[i], int(wanted[i]))
        for i in range(len(rows))
        if found[i] != wanted[i] and not is_border_tie(logits[i], rows[i])
    ]
    assert not different


def test_thousands_of_draws_equal_the_reference():
    row = (np.random.default_rng(3).standard_normal((1, 700)) * 2).astype(np.float32)
    for params in CASES[:2] + CASES[7:10] + CASES[13:16]:
        rows = [SamplingRow(params, seed, 3 * seed) for seed in range(2000)]
        logits = np.repeat(row, len(rows), axis=0)
        assert draw(logits, rows) == sample_rows(logits, rows).tolist()


@pytest.mark.parametrize("vocab", [1, 5, 4096, 128256, 151936])
def test_argmax_equals_the_reference_again_and_again(vocab: int):
    logits = np.concatenate([make_logits(vocab, seed) for seed in range(4)])
    logits[1, vocab // 2] = np.nan
    logits[2, -1] = -np.float32(np.nan)
    logits[3] = -np.inf
    scratch = SamplingScratch.allocate(len(logits), vocab, "cuda")
    device_logits = torch.from_numpy(logits).cuda()
    for _ in range(20):
        out = torch.full((len(logits),), -9, dtype=torch.int32, device="cuda")
        run([kernel.argmax(device_logits, out, scratch, len(logits))])
        assert out.tolist() == argmax_rows(logits).tolist()


@pytest.mark.parametrize("vocab", [4096, 32000, 128256])
def test_launches_end_beside_those_of_another_process(vocab: int):
    """A process that hangs cannot be told to stop, so each has one of its own."""
    spawn = multiprocessing.get_context("spawn")
    processes = [spawn.Process(target=replay, args=(vocab, 3.0)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    assert codes == [0, 0], "None: it hangs"


# ---- rounds ----


def moved(owner, device: str):
    tensors = {
        f.name: getattr(owner, f.name).clone().to(device)
        for f in fields(owner)
        if isinstance(getattr(owner, f.name), torch.Tensor)
    }
    return replace(owner, **tensors)


def assert_same(left, right) -> None:
    for f in fields(left):
        tensor = getattr(left, f.name)
        if isinstance(tensor, torch.Tensor):
            assert torch.equal(tensor.cpu(), getattr(right, f.name)), f.name


@pytest.mark.parametrize(("batch", "draft_len"), [(1, 10), (8, 10), (33, 4), (200, 7)])
def test_round_kernels_equal_the_reference(batch: int, draft_len: int):
    generator = torch.Generator().manual_seed(batch)

    def integers(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator, dtype=torch.int32)

    state = RoundState.allocate(batch, draft_len, "cpu", slots=3)
    used = integers(0, 4, batch) > 0
    state.committed.copy_(torch.where(used, integers(2, 90, batch), 0))
    state.max_len.copy_(state.committed + integers(0, draft_len + 3, batch))
    state.capacity.copy_((state.committed + integers(0, 9, batch)).clamp(max=96))
    for tensor in (state.root, state.previous, state.drafts, state.targets):
        tensor.copy_(integers(0, 2, *tensor.shape))
    tokens = batch * (draft_len + 2)
    limits = StepLimits(tokens, tokens, batch, 96, draft_len, 8, "bfloat16")
    step = DeviceStep(
        token_ids=integers(0, 9, tokens),
        position_ids=integers(0, 9, tokens),
        cu_q=integers(0, 9, batch + 1),
        kv_len=integers(0, 9, batch),
        block_tables=torch.randperm(batch * 12, generator=generator).int().reshape(batch, 12),
        slot_mapping=integers(0, 9, tokens),
        logit_rows=integers(0, 9, tokens),
        tree_start=integers(0, 9, batch),
        tree_root=integers(0, 9, batch),
        paths=integers(0, 9, tokens, draft_len + 1),
        context_end=integers(0, 9, batch),
    )
    for which, extra in (("draft_first", ()), ("draft_next", (1,)), ("verify", (draft_len,))):
        found, wanted = moved(step, "cuda"), moved(step, "cpu")
        launch = getattr(rounds_kernel, which)
        run([launch(moved(state, "cuda"), found, limits, batch, *extra)])
        getattr(rounds_reference, which)(state, wanted, limits, batch, *extra)
        assert_same(found, wanted)
    logits = integers(-9, 10, batch, 5000).float()
    scratch = SamplingScratch.allocate(batch, logits.shape[1], "cuda")
    drawn, wanted_state = moved(state, "cuda"), moved(state, "cpu")
    for index in (1, draft_len, 1):
        found, wanted = moved(step, "cuda"), moved(step, "cpu")
        described = drawn, found, limits, batch, index
        run([rounds_kernel.draw_next(logits.cuda(), scratch, *described)])
        rounds_reference.draw_next(logits, wanted_state, wanted, limits, batch, index)
        assert_same(found, wanted)
        assert_same(drawn, wanted_state)
    found_state = moved(state, "cuda")
    for _ in range(4):
        run([rounds_kernel.accept(found_state, batch, draft_len)])
        rounds_reference.accept(state, batch, draft_len)
        assert_same(found_state, state)
