"""Requests of the demo target on a GPU, with what drafts in the target's engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from llmctl.runtime.drafting.method import DraftMethod
from llmctl.runtime.drafting.plain.method import PlainDecoding
from llmctl.runtime.kv_cache.attention_windows import WindowOptions
from llmctl.runtime.open import EngineOptions, OpenEngines, check_engines
from llmctl.runtime.request import Request
from llmctl.runtime.stats.counters import SpeculationStats
from support.counted_rounds import CountedRounds
from support.e2e import Outputs, run_all


def opened(engine: Path, method: DraftMethod, **options: Any) -> OpenEngines:
    """An engine for 16,384 tokens, if the options say nothing else."""
    options = {"max_tokens": 16384, **options}
    return OpenEngines(check_engines(EngineOptions(engine, method, **options)))


def plain_texts(engine: Path, requests: list[Request], **options: Any) -> Outputs:
    """Of each request alone, without drafts."""
    with opened(engine, PlainDecoding(), **options).executor() as executor:
        return [run_all(executor, [request])[0] for request in requests]


def run_in_every_company(
    engine: Path, method: DraftMethod, requests: list[Request], plain: Outputs, **options: Any
) -> SpeculationStats:
    """Rounds on the device, and between them steps of the host: prompts, penalties, own lengths.
    The text is asserted to be that of plain decoding."""
    with opened(engine, method, **options).executor() as executor:
        assert [run_all(executor, [request])[0] for request in requests] == plain
        assert run_all(executor, requests) == plain, "all together"
        assert run_all(executor, requests) == plain, "with blocks that are reused"
        stats = executor.get_speculation_stats()
    print(f"tokens a round: {1 + stats.accepted_tokens / stats.rounds:.3f}")
    return stats


def run_chosen(
    engine: Path,
    method: DraftMethod,
    requests: list[Request],
    plain: Outputs,
    chosen: Sequence[int],
    **options: Any,
) -> None:
    """Some of the requests, three times. The text is asserted to be that of plain decoding."""
    asked, wanted = [requests[index] for index in chosen], [plain[index] for index in chosen]
    with opened(engine, method, **options).executor() as executor:
        for _ in range(3):
            assert run_all(executor, asked) == wanted


def lengths_of_device_and_host(
    engine: Path,
    method: DraftMethod,
    requests: list[Request],
    plain: Outputs,
    chosen: Sequence[int],
    rounds: CountedRounds,
    monkeypatch: pytest.MonkeyPatch,
) -> tuple[float, float]:
    """Tokens a round of some of the requests, one by one. The text is asserted to be that of plain
    decoding."""
    lengths = []
    monkeypatch.setattr(type(method), "has_lengths", True)  # the host's would follow costs
    for is_device_led in (True, False):
        monkeypatch.setattr(type(method), "is_device_led", is_device_led)
        before = rounds.total
        with opened(engine, method).executor() as executor:
            for index in chosen:
                assert run_all(executor, [requests[index]]) == [plain[index]]
            stats = executor.get_speculation_stats()
        assert (rounds.total > before) == is_device_led
        lengths.append(1 + stats.accepted_tokens / stats.rounds)
    print(f"{method}: tokens a round: device {lengths[0]:.3f}, host {lengths[1]:.3f}")
    return lengths[0], lengths[1]


def run_narrow_windows(
    bare: Path, engine: Path, method: DraftMethod, requests: list[Request]
) -> None:
    """Windows of 40 tokens and 4 sinks: the text is asserted to be that of `bare`, undrafted."""
    options = {"windows": WindowOptions((40,), 4), "enable_block_reuse": False}
    with opened(bare, PlainDecoding(), **options).executor() as executor:
        wanted = run_all(executor, requests)
    with opened(engine, method, **options).executor() as executor:
        assert run_all(executor, requests) == wanted
