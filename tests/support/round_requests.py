"""Requests for random schedules of rounds that draft trees."""

from __future__ import annotations

import numpy as np

from llmctl.runtime.request import Request, SamplingConfig


def random_request(generator: np.random.Generator, vocab: int) -> Request:
    """Mostly requests that a device can run alone, some that it cannot."""
    style = generator.integers(6)
    config = SamplingConfig()
    if style in (1, 2):
        top_k = 0 if style == 1 else 9
        config = SamplingConfig(temperature=0.8, top_k=top_k, seed=int(generator.integers(99)))
    elif style == 3:
        config = SamplingConfig(presence_penalty=0.5)
    return Request(
        tuple(generator.integers(0, vocab, generator.integers(1, 30)).tolist()),
        int(generator.integers(1, 50)),
        config,
        end_id=5 if generator.random() < 0.3 else None,
        stop_words=((3, 4),) if generator.random() < 0.2 else (),
        max_draft_len=2 if style == 4 and generator.random() < 0.5 else None,
    )
