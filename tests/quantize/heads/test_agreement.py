"""Which positions count, and what is right there, against a loop over all of them."""

from __future__ import annotations

import torch

from llmctl.quantize.heads.agreement import TargetRows, agreement, choose, count_positions

DEPTHS, VOCAB, HIDDEN = 3, 7, 5


def made(seed: int) -> tuple[TargetRows, torch.Tensor]:
    """Rows whose text is often what the target chose; and matrices that stand for heads."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn((6, 20, HIDDEN), generator=generator)
    matrices = torch.randn((DEPTHS + 1, VOCAB, HIDDEN), generator=generator)
    chosen = choose(hidden, matrices[0])
    other = torch.randint(0, VOCAB, chosen.shape, generator=generator)
    same = torch.rand(chosen.shape, generator=generator) < 0.7
    tokens = torch.where(same, chosen, other).roll(1, dims=1)
    return TargetRows(tokens, hidden, chosen), matrices[1:]


def test_a_depth_counts_where_the_text_until_there_is_what_the_target_chose() -> None:
    rows, matrices = made(1)
    right, counted = [0] * DEPTHS, [0] * DEPTHS
    for row in range(6):
        for at in range(20 - DEPTHS - 1):
            for depth in range(DEPTHS):
                text = rows.tokens[row, at + 1 : at + 2 + depth]
                if not torch.equal(text, rows.chosen[row, at : at + 1 + depth]):
                    break
                counted[depth] += 1
                said = int((matrices[depth] @ rows.hidden[row, at]).argmax())
                right[depth] += said == int(rows.chosen[row, at + 1 + depth])

    def heads(hidden: torch.Tensor, tokens: torch.Tensor) -> list[torch.Tensor]:
        return [hidden @ matrix.T for matrix in matrices]

    assert count_positions(rows, DEPTHS) == counted
    assert agreement(heads, rows, DEPTHS, 0, torch.device("cpu")) == right
    assert counted[0] > counted[1] > counted[2] > 0 and sum(right) > 0


def test_a_head_that_knows_the_target_is_right_everywhere() -> None:
    rows, _ = made(2)
    known = [rows.chosen[:, depth + 1 :][:, : 20 - DEPTHS - 1].flatten() for depth in range(DEPTHS)]
    places = iter(torch.split(torch.arange(len(known[0])), 256))

    def heads(hidden: torch.Tensor, tokens: torch.Tensor) -> list[torch.Tensor]:
        part = next(places)
        return [torch.nn.functional.one_hot(each[part], VOCAB).float() for each in known]

    found = agreement(heads, rows, DEPTHS, 0, torch.device("cpu"))
    assert found == count_positions(rows, DEPTHS)


def test_a_head_that_reads_tokens_gets_those_behind_each_position() -> None:
    rows, _ = made(3)
    length = 20 - DEPTHS - 1
    seen = []

    def heads(hidden: torch.Tensor, tokens: torch.Tensor) -> list[torch.Tensor]:
        seen.append(tokens)
        return [torch.zeros(len(hidden), VOCAB)] * DEPTHS

    agreement(heads, rows, DEPTHS, 2, torch.device("cpu"))
    wanted = torch.stack((rows.tokens[:, 1 : 1 + length], rows.tokens[:, 2 : 2 + length]), dim=-1)
    assert torch.equal(torch.cat(seen), wanted.flatten(0, 1))
    assert rows.following(2).shape == (6, 18, 2) and rows.following(0).shape == (6, 20, 0)
