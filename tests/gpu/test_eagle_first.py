"""A head of EAGLE-1, of two layers, on a GPU: the tokens of plain decoding, with chains and trees.

What it asserts held on an H200 on 2026-11-26, with an engine that was built elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.counted_rounds import CountedRounds
from support.e2e import Outputs, float_target, known_texts, llmctl
from support.eagle import save_head
from support.eagle_first import fit_first_head
from support.gpu import quantize
from support.gpu_drafting import plain_texts, run_in_every_company

from llmctl.runtime.drafting.eagle.method import Eagle
from llmctl.runtime.request import Request

SIZES = {
    "hidden_size": 384,
    "intermediate_size": 2048,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 4096,
    "rms_norm_eps": 1e-5,
    "num_hidden_layers": 2,
}
MOST = 8  # drafts


@pytest.fixture(scope="module", params=["bfloat16", "fp8"])
def build(
    request: pytest.FixtureRequest, repository: Path, tmp_path_factory: pytest.TempPathFactory
) -> Any:
    """build(head) -> the demo target's engine; None: without one."""
    folder = tmp_path_factory.mktemp("engines")
    checkpoint, options = repository / "examples/demo-target", ["--dtype", request.param]
    if request.param == "fp8":
        checkpoint, options = quantize(checkpoint, folder / "checkpoint"), []

    def built(head: Path | None) -> Path:
        path = folder / ("bare" if head is None else "engine")
        mode = ["--speculative-decoding-mode", "eagle", "--draft-model-dir", head,
                "--max-draft-len", MOST, "--max-non-leaves-per-layer", MOST]  # fmt: skip
        llmctl("build", "--checkpoint-dir", checkpoint, "--output-dir", path, "--backend", "cuda",
               "--max-batch-size", 16, "--max-seq-len", 1024, *options,
               *(mode if head else []))  # fmt: skip
        return path

    return built


def test_a_head_that_knows_the_text_changes_no_token(
    build: Any, requests: list[Request], repository: Path, tmp_path: Path, rounds: CountedRounds
) -> None:
    """Chains on the device, then trees that the host grows."""
    plain: Outputs = plain_texts(build(None), requests)
    head = fit_first_head(
        float_target(repository / "examples/demo-target"), known_texts(requests, plain), **SIZES
    )
    engine = build(save_head(tmp_path, head.tensors(), **SIZES, draft_vocab_size=None))
    for method in (Eagle(5), Eagle(num_offers=3)):
        stats = run_in_every_company(engine, method, requests, plain)
        assert stats.accepted_tokens > 100 and len(stats.accepted_at_position) > 2
    assert rounds.total > 0
