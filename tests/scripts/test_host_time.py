"""Scripts that time the host's part of steps run with the executor of today: their engines compute
nothing, and lack what is asked of engines as soon as something new is."""

from __future__ import annotations

import sys

import pytest

from scripts.bench import rounds
from scripts.profile import host


def test_the_host_has_all_its_parts_in_both_kinds_of_steps(monkeypatch, capsys):
    words = "--requests 2 --step-ms 0.2 --mixed-ms 0.4 --input 40 --output 8 --simulate"
    monkeypatch.setattr(sys, "argv", ["host.py", *words.split()])
    host.main()
    shown = capsys.readouterr().out
    for kind in ("rounds", "steps with prompts"):
        assert f"| 2 | {kind} | **all** of" in shown
        assert f"| 2 | {kind} | device idle before" in shown


@pytest.mark.parametrize("backend", ["cpu", "numpy"])
def test_rounds_are_timed_with_and_without_drafts_of_every_rule(monkeypatch, capsys, backend):
    words = f"--vocab 100 --rounds 2 --backend {backend}"
    monkeypatch.setattr(sys, "argv", ["rounds.py", *words.split()])
    rounds.main()
    shown = capsys.readouterr().out
    for rule in ("by tokens", "by logits"):
        for sampling in ("greedy", "temperature", "top-k + top-p"):
            assert f"| {rule} | {sampling} |" in shown
