"""What the tests of TensorRT's networks share."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from support.tensorrt.checkpoints import VOCAB, write_checkpoint
from support.tensorrt.evaluated import Request, Steps, networks_of, plan_engine
from support.tensorrt.execution import aligned, real
from support.tensorrt.fake_tensorrt import (
    FakeModule,
)
from support.tensorrt.small_networks import Net

from llmctl.builder.tensorrt.networks import PieceNetwork
from llmctl.builder.validation import kernels
from llmctl.plugins.backends.tensorrt import packages


@pytest.fixture(autouse=True)
def no_kernels_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines here have plans of the fake package alone; tests/builder/validation asks for kernels
    where they are."""
    monkeypatch.setattr(kernels, "check_kernels", lambda config, plan, stored: None)


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


@pytest.fixture(scope="module")
def networks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, PieceNetwork]:
    """The pieces of a model with two layers, of profiles for few and for many tokens."""
    folder = tmp_path_factory.mktemp("model") / "checkpoint"
    checkpoint = write_checkpoint(folder, "llama", "fp8", num_hidden_layers=2)
    return networks_of(plan_engine(checkpoint, "tensorrt-rtx", max_num_tokens=600, max_seq_len=640))


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeModule:
    monkeypatch.setattr(packages, "_loggers", {})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return FakeModule(real)


@pytest.fixture
def env() -> SimpleNamespace:
    arrays = {name: aligned(4096) for name in ("token_ids", "logit_rows")}
    limits = SimpleNamespace(max_draft_len=4, max_batch_size=4)
    return SimpleNamespace(step=SimpleNamespace(**arrays), limits=limits)


@pytest.fixture
def net() -> Net:
    return Net()


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(3)
