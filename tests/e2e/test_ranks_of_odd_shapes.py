"""Two and four ranks of a model of odd shapes with everything that a request can ask for: fewer KV
heads than ranks, a vocabulary that does not divide, drafts of every kind."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.e2e import Outputs, run_all
from support.tensorrt.checkpoints import write_checkpoint

from llmctl.builder.build import plan_build, run_build
from llmctl.builder.config import BuildRequest
from llmctl.runtime.api.executor import Executor
from llmctl.runtime.drafting.draft_engine.method import DraftEngine
from llmctl.runtime.drafting.draft_engine.tree import DraftTree
from llmctl.runtime.drafting.method import DraftMethod
from llmctl.runtime.drafting.ngram.method import NgramLookup
from llmctl.runtime.drafting.plain.method import PlainDecoding
from llmctl.runtime.open import EngineOptions, OpenEngines, check_engines
from llmctl.runtime.request import OutputConfig, Request, SamplingConfig

pytestmark = pytest.mark.usefixtures("forked_ranks")
VOCAB, DRAFT_LEN, NUM_REQUESTS = 1013, 4, 24  # 1,013 ids: shares of 256, the last of 245
SHAPE = {
    "vocab_size": VOCAB,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 160,
}
LIMITS = {"max_batch_size": 6, "max_seq_len": 256, "max_num_tokens": 64}
GREEDY, KEYS = SamplingConfig(temperature=0.0), {"seed": 7}
KINDS = (
    (GREEDY, {}),
    (SamplingConfig(temperature=0.8, **KEYS), {}),
    (SamplingConfig(temperature=1.1, top_k=40, top_p=0.9, min_p=0.02, **KEYS), {}),
    (SamplingConfig(temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.2), {}),
    (SamplingConfig(temperature=0.0, no_repeat_ngram_size=2), {"bad_words": ((3,), (5, 6))}),
    (GREEDY, {"output_config": OutputConfig(return_log_probs=True)}),
    (SamplingConfig(temperature=0.0, min_tokens=9), {"stop_words": ((11,), (17, 2))}),
    (SamplingConfig(temperature=1.0, num_return_sequences=3, **KEYS), {}),
)
Engines = Callable[[int], Path]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Engines:
    """Engines of the one model by number of ranks."""
    folder = tmp_path_factory.mktemp("odd")
    checkpoint = write_checkpoint(folder / "checkpoint", "llama", "fp8", **SHAPE)

    def build(ranks: int) -> Path:
        if not (folder / str(ranks)).exists():
            request = BuildRequest(
                **LIMITS,
                max_draft_len=DRAFT_LEN,
                speculative_decoding_mode="draft_tokens_external",
                tp_size=ranks,
            )
            run_build(plan_build(checkpoint, request, backend="cpu"), folder / str(ranks))
        return folder / str(ranks)

    return build


@pytest.fixture(scope="module")
def asked() -> list[Request]:
    draw = random.Random(3)
    return [
        Request(
            tuple(draw.randrange(VOCAB) for _ in range(draw.choice((1, 2, 33, 90)))),
            draw.randint(1, 24),
            sampling,
            end_id=1,
            **others,
        )
        for sampling, others in KINDS * (NUM_REQUESTS // len(KINDS))
    ]


@contextmanager
def running(engine: Path, method: DraftMethod) -> Iterator[Executor]:
    engines = OpenEngines(check_engines(EngineOptions(engine, method)))
    try:
        with engines.executor() as executor:
            yield executor
    finally:
        engines.close()


def drafting(name: str, built: Engines, ranks: int) -> DraftMethod:
    if name == "ngram":
        return NgramLookup(DRAFT_LEN, 2)
    if name == "tree":
        tree = DraftTree(3, 2, DRAFT_LEN)
        return DraftEngine(built(ranks), DRAFT_LEN, tree=tree)
    return DraftEngine(built(1 if name == "one rank" else ranks), DRAFT_LEN)


@pytest.mark.parametrize("ranks", [2, 4])
def test_nothing_that_requests_ask_for_changes_a_token(
    built: Engines, asked: list[Request], ranks: int
) -> None:
    """Alone, together, and with the model's own drafts, by one rank and by all, or n-grams."""
    with running(built(ranks), PlainDecoding()) as executor:
        alone: Outputs = [run_all(executor, [request])[0] for request in asked]
        assert run_all(executor, asked) == alone
    for name in ("one rank", "all ranks", "tree", "ngram"):
        with running(built(ranks), drafting(name, built, ranks)) as executor:
            assert run_all(executor, asked) == alone, name
            accepted = executor.get_speculation_stats().accepted_tokens
        assert accepted > 0 or name == "ngram", name
    assert len({tuple(map(tuple, output)) for output in alone}) > NUM_REQUESTS // 2
