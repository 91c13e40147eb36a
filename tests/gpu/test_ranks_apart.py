"""Ranks with a GPU each write what they write on one GPU, and a lost one is named."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.counted_rounds import CountedRounds
from support.e2e import DRAFT_LEN, Outputs, run_all
from support.gpu_drafting import opened, plain_texts
from support.gpu_ranks import SHARED_HEADS, RankEngines

from llmctl.runtime.drafting.draft_engine.method import DraftEngine
from llmctl.runtime.drafting.eagle.method import Eagle
from llmctl.runtime.drafting.method import DraftMethod
from llmctl.runtime.drafting.ngram.method import NgramLookup
from llmctl.runtime.drafting.plain.method import PlainDecoding
from llmctl.runtime.request import Request

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def method_of(name: str | None, draft: Path) -> DraftMethod:
    if name == "ngram":
        return NgramLookup(DRAFT_LEN, 3)
    return PlainDecoding() if name is None else DraftEngine(draft, DRAFT_LEN)


def run_on_gpus(
    engine: Path,
    method: DraftMethod,
    requests: list[Request],
    wanted: Outputs,
    device_requests: list[int],
) -> int:
    """Accepted drafts; the text is asserted to be that of ranks on one GPU."""
    led = [requests[index] for index in device_requests]
    apart = opened(engine, method)
    try:
        with apart.executor() as executor:
            assert run_all(executor, requests) == wanted, "all together"
            assert [run_all(executor, [request])[0] for request in requests[:8]] == wanted[:8]
            for _ in range(3):
                assert run_all(executor, led) == [wanted[index] for index in device_requests]
            return executor.get_speculation_stats().accepted_tokens
    finally:
        apart.close()


@pytest.mark.parametrize("draft", [None, "engine", "ngram"])
def test_ranks_with_a_gpu_each_write_what_they_write_on_one(
    built: RankEngines,
    requests: list[Request],
    plain_together: Callable[[Path], Outputs],
    device_requests: list[int],
    rounds: CountedRounds,
    draft: str | None,
) -> None:
    engine, method = built.wide("fp8", 2), method_of(draft, built.wide("fp8", 1))
    wanted = plain_together(engine)
    before = rounds.ahead
    accepted = run_on_gpus(engine, method, requests, wanted, device_requests)
    assert (accepted > 0) == (draft is not None)
    assert (rounds.ahead > before + 10) == (draft != "ngram"), "devices lead where they can"


@pytest.mark.parametrize("form", ["fp8", "bfloat16"])
def test_text_of_ranks_apart_may_be_that_of_one_rank(
    built: RankEngines,
    requests: list[Request],
    device_requests: list[int],
    form: str,
) -> None:
    """Sums that are normalized where they arrive, and their parts."""
    one = built.parted(form, 1)
    method = method_of("engine", one)
    wanted = plain_texts(one, requests)
    assert run_on_gpus(built.parted(form, 2), method, requests, wanted, device_requests) > 50


def test_prompts_of_many_rows_are_read_as_on_one_rank(built: RankEngines, ids: list[int]) -> None:
    """Three prompts of 680 tokens, alone and together."""
    asked = [Request(tuple(ids[61 * index : 61 * index + 680]), 12) for index in range(3)]
    wanted = plain_texts(built.parted("fp8", 1), asked)
    apart = opened(built.parted("fp8", 2), PlainDecoding())
    try:
        with apart.executor() as executor:
            assert run_all(executor, asked) == wanted
            assert [run_all(executor, [request])[0] for request in asked] == wanted
    finally:
        apart.close()


def test_target_and_draft_may_both_have_a_part_on_each_gpu(
    built: RankEngines,
    requests: list[Request],
    plain_together: Callable[[Path], Outputs],
    device_requests: list[int],
) -> None:
    engine, method = built.demo("target"), method_of("engine", built.demo("draft"))
    assert run_on_gpus(engine, method, requests, plain_together(engine), device_requests) > 50


HEADS: dict[str, tuple[DraftMethod, tuple[object, ...]]] = {
    **SHARED_HEADS,
    "eagle": (Eagle(4), ("--max-draft-len", 4)),
}


@pytest.mark.parametrize("mode", HEADS)
def test_heads_beside_ranks_change_no_token(
    built: RankEngines,
    requests: list[Request],
    plain_together: Callable[[Path], Outputs],
    device_requests: list[int],
    rounds: CountedRounds,
    mode: str,
) -> None:
    """Ranks share them, but for those of EAGLE; rounds are led by the devices, those of EAGLE heads
    by the host."""
    method, options = HEADS[mode]
    wanted, before = plain_together(built.demo("target")), rounds.ahead
    engine = built.headed(mode, *options)
    assert run_on_gpus(engine, method, requests, wanted, device_requests) > 30
    assert (rounds.ahead > before + 10) == (mode != "eagle")


def test_a_run_ends_with_the_name_of_a_rank_that_is_lost(built: RankEngines) -> None:
    run = subprocess.Popen(
        [sys.executable, "-m", "llmctl.cli.entry", "run", "--engine-dir", built.demo("target"),
         "--max-output-len", "900", "--end-id", "4000", "--input-text", "Once upon a time"],
        stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    assert run.stderr is not None
    lines = []
    for line in run.stderr:
        lines.append(line)
        if line.startswith("KV cache"):
            break
    (follower,) = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
    os.kill(int(follower), signal.SIGKILL)
    _, rest = run.communicate(timeout=60)
    assert run.returncode == 1, (lines, rest)
    assert "error[RankFailure]: rank 1" in rest and "was killed by SIGKILL" in rest, rest
