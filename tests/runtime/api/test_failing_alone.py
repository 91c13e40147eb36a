"""A request whose own logits are no numbers fails; those beside it and behind it do not notice."""

from __future__ import annotations

import numpy as np
import pytest
from support.executor import answer, collect

from llmctl.builder.engine_format import LookaheadDecodingConfig
from llmctl.errors import BadLogits
from llmctl.runtime.drafting.draft_engine.drafter import DraftEngineDrafter
from llmctl.runtime.drafting.drafter import Drafter
from llmctl.runtime.drafting.growth.growth import DynamicShape
from llmctl.runtime.drafting.lookahead.drafter import LookaheadDrafter
from llmctl.runtime.drafting.ngram.drafter import NgramDrafter
from llmctl.runtime.request import Request, SamplingConfig

MARK = 9  # prompts that begin with it have NaN logits from some length on


def drafter_of(fake, method: str) -> Drafter | None:
    draft = fake.Engine(agreement=0.7)
    if method == "chain":
        return DraftEngineDrafter(draft, 3)
    if method == "tree":
        return DraftEngineDrafter(draft, 6, DynamicShape(num_offers=2, width=2, depth=3))
    if method == "lookahead":
        return LookaheadDrafter(LookaheadDecodingConfig(3, 3, 3), 8)
    return NgramDrafter(3, 2) if method == "ngram" else None


@pytest.mark.parametrize("at", [5, 6, 17])  # of the first token, the second one, a later one
@pytest.mark.parametrize(
    ("method", "acceptance"),
    [
        ("plain", "tokens"),
        ("chain", "tokens"),
        ("chain", "logits"),
        ("tree", "tokens"),
        ("lookahead", "tokens"),
        ("ngram", "tokens"),
    ],
)
def test_others_of_the_step_go_on(fake, make, method, acceptance, at):
    class Broken(fake.Engine):
        def logits(self, tokens):
            is_bad = tokens[0] == MARK and len(tokens) >= at
            return super().logits(tokens) * np.float32("nan" if is_bad else 1)

    executor = make(Broken(), drafter_of(fake, method), acceptance=acceptance)
    sampled = SamplingConfig(temperature=0.8, top_k=0, seed=5)
    own = sampled if acceptance == "tokens" else SamplingConfig()  # by logits, draws are others
    good = [Request((3, 1, 4, 1, 5), 30, streaming=True), Request((2, 7, 1, 8), 25, own)]
    several = SamplingConfig(top_k=0, seed=3, num_return_sequences=3)
    bad = [
        Request((MARK, 5, 3, 5, 8), 30, streaming=True),
        Request((MARK, 2, 6, 5, 3), 30, several),
    ]
    ids = executor.enqueue_requests([bad[0], good[0], bad[1], good[1]])
    found = dict(zip(ids, (collect(executor, each) for each in ids), strict=True))
    for request_id in ids[0], ids[2]:
        *earlier, last = found[request_id]
        assert isinstance(last.error, BadLogits) and "the target engine" in str(last.error)
        assert not any(each.has_error for each in earlier)
        (behind,) = executor.await_responses(request_id, 0.0)
        assert "is not known" in str(behind.error), "it has ended once"
    num_tokens = sum(len(each.result.output_token_ids) for each in found[ids[0]][:-1])
    # Of a round that reaches the first bad row, nothing is committed.
    assert num_tokens <= at - 5 and (num_tokens == at - 5 or method != "plain")
    for request_id, request in zip((ids[1], ids[3]), good, strict=True):
        tokens = [t for each in found[request_id] for t in each.result.output_token_ids]
        assert tokens == fake.plain_answer(fake.Engine(), request)[0]
    again = Request((3, 1, 4, 1, 5), 8)
    wanted = fake.plain_answer(fake.Engine(), again)[0]
    assert list(answer(executor, again).result.output_token_ids) == wanted
