"""What the tests of TensorRT's networks share."""

from __future__ import annotations

import numpy as np
import pytest
from support.tensorrt.checkpoints import VOCAB
from support.tensorrt.evaluated import Request, Steps


@pytest.fixture
def steps() -> Steps:
    """Prompts, chunks, generation and verification, alone and together, with empty groups."""
    rng = np.random.default_rng(2)

    def ids(count: int) -> list[int]:
        return rng.integers(0, VOCAB, count).tolist()

    a = Request((3, 17, 5, 9, 11, 2), 0, ids(21), 1)
    b = Request((7, 1, 20), 0, ids(6), 0)
    found = [("prompts, one without logits", [a, b])]
    a, b = a.then(ids(1), 1), b.then(ids(5), 1)
    found.append(("a chunk and generation", [b, a]))
    a, b = a.then(ids(5), 5), b.then(ids(5), 5)
    found.append(("verification", [a, b]))
    a, b = a.then(ids(1), 1, keep=2), b.then(ids(1), 1, keep=5)
    c = Request((4, 6), 0, ids(1), 1)
    found.append(("a prompt of one token and generation", [c, a, b]))
    c = c.then(ids(8), 0)
    found.append(("no rows of logits", [c]))
    c, a = c.then(ids(2), 1), a.then(ids(3), 3)
    found.append(("a chunk and fewer drafts", [c, a]))
    return found


@pytest.fixture
def float32_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Networks, which no kernel would run, with float32 where there are 16 bits otherwise."""
    monkeypatch.setattr("llmctl.builder.build.require_gpu_model", lambda *_: None)
