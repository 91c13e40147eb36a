"""All ranks of an engine in lockstep on one GPU: the same tokens alone, together and with drafts,
logits near those of one rank, and the planted text at 2, 4 and 8 ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from support.counted_rounds import CountedRounds
from support.e2e import DRAFT_LEN, Outputs, llmctl, run_all
from support.gpu import quantize
from support.gpu_drafting import opened, plain_texts, run_chosen, run_in_every_company
from support.tensorrt.checkpoints import write_checkpoint

from llmctl.builder.engine_format import read_engine_config
from llmctl.errors import Unsupported
from llmctl.runtime.drafting.draft_engine.method import DraftEngine
from llmctl.runtime.drafting.ngram.method import NgramLookup
from llmctl.runtime.drafting.plain.method import PlainDecoding
from llmctl.runtime.engines.planted_text import planted_text
from llmctl.runtime.open import EngineOptions, check_engines
from llmctl.runtime.request import OutputConfig, Request, SamplingConfig
from scripts.models.make_planted_checkpoints import Recipe
from scripts.models.make_planted_checkpoints import write_checkpoint as write_planted

# Of the demo target's sizes, but with heads for eight ranks; random weights.
WIDE = {
    "vocab_size": 4096,
    "hidden_size": 384,
    "intermediate_size": 896,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
}
LIMITS = ("--max-batch-size", 16, "--max-seq-len", 1024)
TOGETHER = {"ranks_on_one_device": True}
ACCEPTANCE, SEED = 0.66, 5


@dataclass
class Engines:
    """Checkpoints and engines by name, made on first use."""

    folder: Path
    examples: Path

    def build(self, name: str, checkpoint: Path, *options: object) -> Path:
        path = self.folder / name
        if not path.exists():
            llmctl("build", "--backend", "cuda", "--checkpoint-dir", checkpoint,
                   "--output-dir", path, *LIMITS, *options)  # fmt: skip
        return path

    def wide(self, form: str, ranks: int) -> Path:
        """The same random model for every number of ranks. It also drafts for itself."""
        checkpoint = self.folder / f"wide-{form}"
        if not checkpoint.exists():
            write_checkpoint(checkpoint, "llama", form, **WIDE)
        drafts = ("--max-draft-len", DRAFT_LEN)
        return self.build(f"wide-{form}-{ranks}", checkpoint, *drafts, "--tp-size", ranks)

    def demo(self, role: str) -> Path:
        """Of two ranks."""
        checkpoint = self.folder / f"demo-{role}"
        if not checkpoint.exists():
            quantize(self.examples / f"demo-{role}", checkpoint)
        drafts = ("--max-draft-len", DRAFT_LEN) if role == "target" else ()
        return self.build(f"demo-{role}-2", checkpoint, *drafts, "--tp-size", 2)

    def planted(self, role: str, ranks: int, quantization: str = "fp8") -> Path:
        checkpoint = self.folder / f"planted-{role}-{quantization}"
        if not checkpoint.exists():
            recipe = Recipe("tiny", role, ACCEPTANCE, SEED, quantization)
            write_planted(checkpoint, recipe, config_only=True)
            config = json.loads((checkpoint / "config.json").read_text())
            config |= {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64}
            (checkpoint / "config.json").write_text(json.dumps(config))
        weights = ("--load-format", "planted", "--seed", SEED, "--planted-role", role)
        drafts = ("--max-draft-len", DRAFT_LEN) if role == "target" else ()
        options = (*weights, "--planted-acceptance", ACCEPTANCE, *drafts, "--tp-size", ranks)
        return self.build(f"planted-{role}-{quantization}-{ranks}", checkpoint, *options)


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory, repository: Path) -> Engines:
    return Engines(tmp_path_factory.mktemp("engines"), repository / "examples")


@pytest.fixture(scope="module")
def plain(engines: Engines, requests: list[Request]) -> Callable[[Path], Outputs]:
    """Of each request alone, without drafts."""
    known: dict[Path, Outputs] = {}

    def texts(engine: Path) -> Outputs:
        if engine not in known:
            known[engine] = plain_texts(engine, requests, **TOGETHER)
        return known[engine]

    return texts


WIDE_KINDS = [("fp8", 2), ("fp8", 4), ("fp8", 8), ("bfloat16", 4)]


@pytest.mark.parametrize(("form", "ranks"), WIDE_KINDS)
def test_drafts_of_one_rank_change_no_token(
    engines: Engines,
    requests: list[Request],
    plain: Callable[[Path], Outputs],
    device_requests: list[int],
    rounds: CountedRounds,
    form: str,
    ranks: int,
) -> None:
    """The model itself drafts, on one rank: where ranks only round differently, it is mostly right.
    Rounds are led by the device, and between them steps by the host."""
    engine, method = engines.wide(form, ranks), DraftEngine(engines.wide(form, 1), DRAFT_LEN)
    stats = run_in_every_company(engine, method, requests, plain(engine), **TOGETHER)
    assert stats.accepted_tokens > 0.5 * stats.draft_tokens
    before = rounds.ahead
    run_chosen(engine, method, requests, plain(engine), device_requests, **TOGETHER)
    assert rounds.ahead > before + 10, "the device leads"


@pytest.mark.parametrize(("form", "ranks"), WIDE_KINDS)
def test_ngrams_change_no_token(
    engines: Engines,
    requests: list[Request],
    plain: Callable[[Path], Outputs],
    form: str,
    ranks: int,
) -> None:
    engine = engines.wide(form, ranks)
    method = NgramLookup(DRAFT_LEN, 3)
    stats = run_in_every_company(engine, method, requests, plain(engine), **TOGETHER)
    assert stats.accepted_tokens > 0


@pytest.mark.parametrize(("form", "ranks"), WIDE_KINDS)
def test_log_probabilities_are_near_those_of_one_rank(
    engines: Engines, ids: list[int], form: str, ranks: int
) -> None:
    """Of the first token behind prompts of all lengths: ranks round at other places."""
    asked = [
        Request(
            tuple(ids[53 * index : 53 * index + 1 + 11 * index]),
            1,
            SamplingConfig(),
            OutputConfig(return_log_probs=True),
        )
        for index in range(30)
    ]

    def log_probs(engine: Path, **options: bool) -> np.ndarray:
        with opened(engine, PlainDecoding(), **options).executor() as executor:
            found = []
            for request_id in executor.enqueue_requests(asked):
                (response,) = executor.await_responses(request_id)
                assert response.result is not None and response.result.log_probs is not None
                found.append(response.result.log_probs[0])
        return np.array(found)

    wanted = log_probs(engines.wide(form, 1))
    found = log_probs(engines.wide(form, ranks), **TOGETHER)
    print(f"{form}, {ranks} ranks: log-probabilities differ by {np.abs(found - wanted).max():.4f}")
    assert np.abs(wanted).min() > 0.1 and wanted.std() > 0.1, "the test would see it"
    assert np.abs(found - wanted).max() < (0.05 if form == "bfloat16" else 0.25)


def test_a_draft_of_as_many_ranks_changes_no_token(
    engines: Engines,
    requests: list[Request],
    plain: Callable[[Path], Outputs],
    rounds: CountedRounds,
) -> None:
    engine, method = engines.demo("target"), DraftEngine(engines.demo("draft"), DRAFT_LEN)
    stats = run_in_every_company(engine, method, requests, plain(engine), **TOGETHER)
    assert stats.accepted_tokens > 50 and rounds.ahead > 10


@pytest.mark.parametrize(
    ("ranks", "quantization"), [(2, "fp8"), (4, "fp8"), (8, "fp8"), (2, "w4a8_mxfp4_fp8")]
)
@pytest.mark.parametrize("is_drafted", [False, True])
def test_ranks_say_the_planted_text(
    engines: Engines, ids: list[int], ranks: int, quantization: str, is_drafted: bool
) -> None:
    engine = engines.planted("target", ranks, quantization)
    recipe = read_engine_config(engine).weights
    method = PlainDecoding()
    if is_drafted:
        method = DraftEngine(engines.planted("draft", 1), DRAFT_LEN)
    first, stop = recipe["ordinary_tokens"]
    prompts = [tuple(ids[91 * index : 91 * index + 1 + 37 * index]) for index in range(16)]
    prompts = [prompt for prompt in prompts if first <= prompt[-1] < stop]
    asked = [Request(prompt, 40 + 3 * index) for index, prompt in enumerate(prompts)]
    wanted = [[tuple(planted_text(recipe, r.input_token_ids[-1], r.max_tokens))] for r in asked]
    with opened(engine, method, **TOGETHER).executor() as executor:
        assert run_all(executor, asked) == wanted
        assert [run_all(executor, [request])[0] for request in asked] == wanted
        stats = executor.get_speculation_stats()
    assert (stats.accepted_tokens > 100) == is_drafted


def test_several_ranks_are_refused_where_nobody_asked_for_one_device(engines: Engines) -> None:
    options = EngineOptions(engines.wide("fp8", 2))
    with pytest.raises(Unsupported, match="the engine has 2 ranks; ranks with a GPU each"):
        check_engines(options)
    check_engines(replace(options, ranks_on_one_device=True))


def test_run_says_how_many_ranks_there_are(engines: Engines) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "llmctl.cli.entry", "run", "--engine-dir", engines.demo("target"),
         "--draft-engine", engines.demo("draft"), "--ranks-on-one-device", "--max-output-len", "20",
         "--input-text", "Once upon a time", "--verify-exact"],
        capture_output=True,
        text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for words in ("backend cuda, 2 ranks on one device", "exact: "):
        assert words in done.stderr, done.stderr
