"""The protocol of the model card, on models whose answers are known."""

import itertools
import math

import pytest
import torch

CPU = torch.device("cpu")
VOCAB = 11


def successor(step):
    """A model that is sure the next token is the last one plus `step`, above the special ids."""

    def logits(ids):
        return 50.0 * torch.nn.functional.one_hot(3 + (ids - 3 + step) % (VOCAB - 3), VOCAB)

    return logits


def misled(model, period):
    """The same, but wrong behind every `period`-th position of the row."""

    def logits(ids):
        out = model(ids).clone()
        out[:, period - 1 :: period] = model(ids + 1)[:, period - 1 :: period]
        return out

    return logits


def test_a_draft_equal_to_the_target_is_accepted_whole():
    from scripts.demo.evaluation import greedy_acceptance

    result = greedy_acceptance(successor(1), successor(1), [[0, 3], [0, 5]], CPU, 4, 20)
    assert result.acceptance == 1.0
    assert result.tokens_per_round == 5.0
    assert result.num_rounds == 2 * 4


def test_a_draft_that_is_always_wrong_costs_a_round_per_token():
    from scripts.demo.evaluation import greedy_acceptance

    result = greedy_acceptance(successor(1), successor(2), [[0, 3]], CPU, 4, 20)
    assert result.acceptance == 0.0
    assert result.tokens_per_round == 1.0
    assert result.num_rounds == 20


@pytest.mark.parametrize(("period", "draft_len"), [*itertools.product((2, 3, 5, 7), (1, 2, 4))])
def test_acceptance_counts_what_a_plain_loop_counts(period, draft_len):
    from scripts.demo.evaluation import greedy_acceptance

    target, draft = successor(1), misled(successor(1), period)
    text, accepted, rounds = [0, 4], 0, 0
    while len(text) < 2 + 32:
        own = list(text)
        for _ in range(draft_len):
            own.append(int(draft(torch.tensor([own]))[0, -1].argmax()))
        rounds += 1
        for proposal in own[len(text) :]:
            right = int(target(torch.tensor([text]))[0, -1].argmax())
            text.append(right)
            if proposal != right:
                break
            accepted += 1
        else:
            text.append(int(target(torch.tensor([text]))[0, -1].argmax()))
    result = greedy_acceptance(target, draft, [[0, 4]], CPU, draft_len, 32)
    assert (result.num_rounds, result.acceptance) == (rounds, accepted / (rounds * draft_len))
    assert math.isclose(result.tokens_per_round, 1 + draft_len * result.acceptance)


def test_a_row_ends_with_the_round_that_emits_the_end_token():
    from scripts.demo.evaluation import greedy_acceptance
    from scripts.demo.tokenizer import EOS_ID

    def ends(ids):
        out = successor(1)(ids).clone()
        out[:, 5:] = 50.0 * torch.nn.functional.one_hot(torch.tensor(EOS_ID), VOCAB)
        return out

    result = greedy_acceptance(ends, ends, [[0, 3]], CPU, 4, 100)
    assert result.num_rounds == 1  # the end token comes fifth


def test_a_uniform_model_has_the_vocabulary_as_perplexity():
    from scripts.demo.evaluation import losses

    rows = [[0, 3, 4, 5], [0, 6], [0, *range(3, 10)]]
    total, num_tokens = losses(lambda ids: torch.zeros(*ids.shape, VOCAB), rows, CPU, batch=2)
    assert num_tokens == 3 + 1 + 7
    assert math.isclose(math.exp(total / num_tokens), VOCAB, rel_tol=1e-5)


def test_agreement_counts_every_position_once_and_no_padding():
    from scripts.demo.evaluation import agreement

    rows = [[0, 3, 4, 5, 6], [0, 6]]
    assert agreement(successor(1), successor(1), rows, CPU) == 1.0
    assert agreement(successor(1), misled(successor(1), 2), rows, CPU) == 3 / 5


def test_repeats_are_those_a_plain_search_finds():
    from scripts.demo.evaluation import find_repeats

    rows = torch.randint(0, 2, (4, 50), generator=torch.Generator().manual_seed(1))
    found = find_repeats(rows, 4)
    for row, marks in zip(rows.tolist(), found.tolist(), strict=True):
        for at, mark in enumerate(marks):
            earlier = [row[start : start + 4] for start in range(max(0, at - 3))]
            assert mark == (at >= 3 and row[at - 3 : at + 1] in earlier)
    assert found.any() and not found.all()
