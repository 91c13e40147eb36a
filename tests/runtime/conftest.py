"""A model small enough to recompute by hand, a loop to drive it, and the plain answer."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from support.fake_engine import FakeEngine, plain_answer
from support.fake_loop import Harness
from support.fake_rounds import FakeRunner


@pytest.fixture(scope="session")
def fake():
    """The fakes as a namespace: Engine, Harness, Runner, plain_answer."""
    return SimpleNamespace(
        Engine=FakeEngine, Harness=Harness, Runner=FakeRunner, plain_answer=plain_answer
    )
