"""The soak of ranks, for seconds: two ranks answer as one does, and leave nothing behind."""

from __future__ import annotations

import argparse

import pytest
from support.e2e import DemoPair

from scripts.bench.soak import soak


def test_two_ranks_answer_as_one_does(demo: DemoPair, capsys: pytest.CaptureFixture[str]) -> None:
    given = argparse.Namespace(
        engine=demo.engine("target-fp8-tp2-invariant"),
        alone=demo.engine("target-fp8-invariant"),
        draft_engine=demo.engine("draft-fp8"),
        ngram=False,
        ranks_on_one_device=False,
        seconds=1.5,
        seed=2,
        requests=10,
        max_tokens=8192,
    )
    assert soak(given) == []
    assert "1 other processes" in capsys.readouterr().out
