"""Drafts from a head of EAGLE-1 through the whole program: never another token than without. Its
layers are two, so that all that keeps a cache of a head meets one of several."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.e2e import DemoPair, Outputs, float_target, known_texts, run_all
from support.eagle import save_head
from support.eagle_first import fit_first_head
from support.fake_device_runs import accepted_by_host, never_need_the_host, rounds_on_device

from llmctl.runtime.drafting.eagle.method import Eagle
from llmctl.runtime.open import EngineOptions, OpenEngines, check_engines
from llmctl.runtime.request import Request

CHAIN = Eagle(5)
METHODS = {"chain": CHAIN, "tree": Eagle(12, num_offers=4)}
SIZES = {
    "hidden_size": 384,
    "intermediate_size": 2048,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 4096,
    "rms_norm_eps": 1e-5,
    "num_hidden_layers": 2,
}


@pytest.fixture(scope="module")
def engine(
    demo: DemoPair,
    requests: list[Request],
    plain: Outputs,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """With a head that knows what comes of the requests."""
    folder = tmp_path_factory.mktemp("eagle-1")
    head = fit_first_head(
        float_target(demo.checkpoint("target")), known_texts(requests, plain), **SIZES
    )
    save_head(folder / "head", head.tensors(), **SIZES, draft_vocab_size=None)
    demo.llmctl("build", "--backend", "cpu", "--checkpoint-dir", demo.quantized("target"),
                "--output-dir", folder / "engine", "--max-batch-size", 16, "--max-seq-len", 1024,
                "--speculative-decoding-mode", "eagle", "--max-draft-len", 12,
                "--max-non-leaves-per-layer", 3, "--draft-model-dir", folder / "head")  # fmt: skip
    return folder / "engine"


@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize("kind", METHODS)
def test_a_head_that_knows_the_text_changes_no_token(
    engine: Path, requests: list[Request], plain: Outputs, kind: str, reuse: bool
) -> None:
    """All together; prompts enter in chunks beside the drafts of others, or from the cache."""
    options = EngineOptions(engine, METHODS[kind], enable_block_reuse=reuse, max_num_tokens=220)
    with OpenEngines(check_engines(options)).executor() as executor:
        assert run_all(executor, requests) == plain
        assert run_all(executor, requests[:4]) == plain[:4], "again, from a warm cache"
        stats = executor.get_speculation_stats()
    assert stats.accepted_tokens > 100 and len(stats.accepted_at_position) > 2


def test_on_a_device_too(
    engine: Path, requests: list[Request], plain: Outputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over the fake device, steps that the host leads and rounds."""
    assert accepted_by_host(engine, CHAIN, requests, plain) > 80
    cases = ((CHAIN, never_need_the_host(requests)),)
    (run,) = rounds_on_device(engine, cases, requests, plain, monkeypatch)
    assert run.stats.accepted_tokens > 4 and run.num_rounds > 1


def test_inspect_says_what_the_head_reads(demo: DemoPair, engine: Path) -> None:
    said = demo.llmctl("inspect", engine)
    assert "eagle 1 or 2, reads what the last layer puts out, width 384, 2 layers, RoPE" in said
