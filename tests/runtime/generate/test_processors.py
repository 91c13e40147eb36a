"""Whatever a request asks for together: the next token's distribution is that of transformers'
generate, which puts its processors in an order of its own."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig

from llmctl.plugins.ops.sampling.reference import ReferenceSampling, processed_probs, sample_rows
from llmctl.runtime.generate.sampler import Sampler
from llmctl.runtime.request import Request, SamplingConfig, Sequence

VOCAB = 12
# field of ours -> (name in GenerationConfig, values)
FIELDS: dict[str, tuple[str, list[Any]]] = {
    "temperature": ("temperature", [0.3, 0.9, 2.5]),
    "top_k": ("top_k", [0, 1, 2, 5, 50]),
    "top_p": ("top_p", [0.05, 0.4, 0.9, 1.0]),
    "min_p": ("min_p", [0.02, 0.3, 1.0]),
    "repetition_penalty": ("repetition_penalty", [0.4, 1.3, 30.0]),
    "no_repeat_ngram_size": ("no_repeat_ngram_size", [1, 2, 3]),
    "min_tokens": ("min_new_tokens", [1, 2, 6]),
}


@pytest.fixture(scope="module")
def generator() -> Any:
    """A model for its `generate`: its own logits are never asked for."""
    sizes = {"vocab_size": VOCAB, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    config = LlamaConfig(**sizes, num_attention_heads=1, num_key_value_heads=1)
    return AutoModelForCausalLM.from_config(config)


def wanted_scores(
    generator: Any, request: Request, tokens: list[int], logits: np.ndarray
) -> torch.Tensor:
    params = request.sampling_config
    given = {theirs: getattr(params, ours) for ours, (theirs, _) in FIELDS.items()}
    if params.top_k is None:  # theirs is 50 where ours is no limit
        given["top_k"] = 0
    config = GenerationConfig(
        do_sample=not params.is_greedy,
        eos_token_id=list(request.end_ids) or None,
        bad_words_ids=[list(word) for word in request.bad_words] or None,
        **given,
    )
    ids = torch.tensor([tokens])
    generator._prepare_special_tokens(config, device="cpu")
    processors = generator._get_logits_processor(
        config, input_ids_seq_length=len(request.input_token_ids), device="cpu", model_kwargs={}
    )
    return processors(ids, torch.tensor(logits)[None].double())[0]


@pytest.mark.parametrize("seed", range(6))
def test_distributions_are_those_of_generate(seed, generator):
    draws, numbers = random.Random(seed), np.random.default_rng(seed)
    num_seen = 0
    for _ in range(60):
        chosen = {k: draws.choice(v) for k, (_, v) in FIELDS.items() if draws.random() < 0.5}
        ends = draws.sample(range(VOCAB), draws.randrange(3))
        bad_words = [
            tuple(draws.choices(range(VOCAB), k=draws.randint(1, 3)))
            for _ in range(draws.randrange(3))
        ]
        # transformers drops a word that is an end id and nothing else; here it is banned, as asked.
        bad_words = [word for word in bad_words if len(word) > 1 or word[0] not in ends]
        prompt = tuple(draws.choices(range(VOCAB), k=draws.randint(1, 8)))
        request = Request(
            prompt,
            20,
            SamplingConfig(**chosen),
            end_id=ends[0] if ends else None,
            further_end_ids=tuple(ends[1:]),
            bad_words=tuple(bad_words),
        )
        new = draws.choices(range(VOCAB), k=draws.randrange(6))
        path = tuple(draws.choices(range(VOCAB), k=draws.randrange(4)))  # drafts before the token
        tokens = [*prompt, *new]
        sequence = Sequence(1, 1, request, 0, tokens, len(prompt), len(prompt) + 20)
        logits = (numbers.standard_normal(VOCAB) * 3).astype(np.float32)
        scores = wanted_scores(generator, request, [*tokens, *path], logits)
        if scores.isneginf().all():  # no token is left: neither has a distribution
            continue
        num_seen += 1
        row = Sampler(VOCAB, ReferenceSampling()).row(sequence, path)
        if request.sampling_config.is_greedy:
            assert sample_rows(logits[None], [row])[0] == scores.argmax(), request
        else:
            found, wanted = processed_probs(logits, row), torch.softmax(scores, -1).numpy()
            np.testing.assert_allclose(found, wanted, atol=1e-6, err_msg=str(request))
    assert num_seen > 40
