"""Sums and columns over ranks, each a process: bits of a tree, whatever runs together. The cases of
a test share their processes, whose start takes longer than what most of them compute."""

from __future__ import annotations

import random
from functools import partial
from itertools import product

import numpy as np
import pytest
import torch
from support.ranks import Body, run_in_ranks, run_ranks

from llmctl.errors import RankFailure, Unsupported
from llmctl.plugins.backends import cpu
from llmctl.plugins.backends.cpu.ranks import Ranks, make_segment
from llmctl.plugins.core.calls import OpCall
from llmctl.plugins.core.example_parts import no_cache, plain_step
from llmctl.plugins.ops.all_reduce.reference import add_ranks, finish
from llmctl.plugins.ops.sampling.reference import argmax_rows

COUNTS = (2, 4, 8)
SIZES = ((64, 131), (64, 512), (16, 33))  # columns of each rank, and at most of all


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def run_call(call: OpCall, tokens: int, ranks: Ranks | None = None) -> np.ndarray:
    cpu.set_num_threads(1)
    cpu.CpuProgram([call], ranks=ranks).run(plain_step(tokens), no_cache())
    return call.outputs["out"].view(torch.uint8).numpy().copy()


def sum_call(x: torch.Tensor, num_ranks: int) -> OpCall:
    """With everything that may follow a sum."""
    width = x.shape[1]
    inputs = {
        "x": x,
        "weight_scale": normal(width, seed=91).abs() + 0.5,
        "x_scale": torch.tensor([0.75]),
        "bias": normal(width, seed=92).bfloat16(),
    }
    out = torch.zeros(x.shape, dtype=torch.bfloat16)
    return OpCall("all_reduce", "sum", inputs, {"out": out}, {"ranks": num_ranks})


def test_ranks_are_added_as_a_balanced_tree() -> None:
    """The last size has rows of which two fit into what ranks share."""
    cases: list[tuple[int, Body]] = []
    wanted, others = [], []
    for (tokens, width), num_ranks in product([(1, 384), (7, 37), (3, 400_000)], COUNTS):
        parts = [normal(tokens, width, seed=rank) for rank in range(num_ranks)]
        calls = [sum_call(part, num_ranks) for part in parts]

        def add(ranks: Ranks, calls: list[OpCall] = calls, tokens: int = tokens) -> np.ndarray:
            return run_call(calls[ranks.rank], tokens, ranks)

        cases.append((num_ranks, add))
        total, inputs = add_ranks(parts), calls[0].inputs
        wanted.append(finish(total, inputs).to(torch.bfloat16).view(torch.uint8).numpy())
        ascending = sum(parts[1:], parts[0])
        others.append(torch.equal(finish(ascending, inputs), finish(total, inputs)))
    for found, bits in zip(run_in_ranks(cases), wanted, strict=True):
        assert all(np.array_equal(each, bits) for each in found), (len(found), bits.shape)
    # Of more than two, another order is another number: the test would see it.
    assert others == [num_ranks == 2 for num_ranks, _ in cases]


def test_columns_of_all_ranks_lie_side_by_side_in_the_first() -> None:
    cases: list[tuple[int, Body]] = []
    wanted = []
    for (own, most), num_ranks in product(SIZES, COUNTS):
        columns = min(most, own * num_ranks)
        parts = [normal(5, own, seed=rank) for rank in range(num_ranks)]

        def gather(
            ranks: Ranks, parts: list[torch.Tensor] = parts, columns: int = columns
        ) -> np.ndarray:
            outputs = {"out": torch.full((5, columns), torch.nan)}
            attributes = {"ranks": ranks.num_ranks}
            call = OpCall("all_gather", "g", {"x": parts[ranks.rank]}, outputs, attributes)
            return run_call(call, 5, ranks)

        cases.append((num_ranks, gather))
        wanted.append(torch.cat(parts, dim=1)[:, :columns].contiguous())
    for found, columns_of_all in zip(run_in_ranks(cases), wanted, strict=True):
        bits = columns_of_all.view(torch.uint8).numpy()
        assert np.array_equal(found[0], bits), (len(found), columns_of_all.shape)


@pytest.mark.parametrize(
    ("own", "columns", "rows"), [(64, 131, 5), (16, 33, 1), (40_000, 320_000, 60)]
)
def test_what_operators_read_is_gathered_in_every_rank(own: int, columns: int, rows: int) -> None:
    """Also where a step wants best ids of logits; the last case comes in several parts."""
    step = plain_step(rows)
    step.logit_rows, step.best_only = np.arange(rows, dtype=np.int32), True
    whole = [normal(rows, own, seed=rank) for rank in range(max(COUNTS))]

    def gather(ranks: Ranks, dtype: torch.dtype) -> bool:
        parts = [part.to(dtype) for part in whole[: ranks.num_ranks]]
        wanted = torch.cat(parts, dim=1)[:, :columns]
        x, out = parts[ranks.rank], torch.zeros(wanted.shape, dtype=dtype)
        attributes = {"ranks": ranks.num_ranks, "to_all": True}
        call = OpCall("all_gather", "g", {"x": x}, {"out": out}, attributes)
        cpu.set_num_threads(1)
        cpu.CpuProgram([call], [x], ranks).run(step, no_cache(), np.zeros(rows, np.int32))
        return torch.equal(out, wanted)

    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    cases = [(n, partial(gather, dtype=dtype)) for n, dtype in product(COUNTS, dtypes)]
    assert run_in_ranks(cases) == [[True] * num_ranks for num_ranks, _ in cases]


def test_best_ids_are_merged_where_a_step_wants_no_logits() -> None:
    """Ties within a rank and between ranks, NaN, and zeros of padding above all logits."""
    cases: list[tuple[int, Body]] = []
    wanted = []
    step = plain_step(9)
    step.logit_rows = np.arange(9, dtype=np.int32)
    step.best_only = True
    for (own, most), num_ranks in product(SIZES, COUNTS):
        columns = min(most, own * num_ranks)
        rows = torch.cat([normal(9, columns) - 9, torch.zeros(9, own * num_ranks - columns)], dim=1)
        rows[1, 5], rows[2, [3, columns - 1]], rows[3, [6, 7]] = torch.nan, 1.0, 2.0
        rows[4, :columns], rows[5, columns - 1] = -torch.inf, torch.inf
        rows[6, [8, columns - 2]] = torch.tensor([-0.0, 0.0])
        parts = [part.contiguous() for part in rows.split(own, dim=1)]

        def merge(
            ranks: Ranks, parts: list[torch.Tensor] = parts, columns: int = columns
        ) -> list[int]:
            x, logits = parts[ranks.rank], torch.full((9, columns), torch.nan)
            attributes = {"ranks": ranks.num_ranks}
            call = OpCall("all_gather", "g", {"x": x}, {"out": logits}, attributes)
            best = np.full(9, -7, np.int32)
            cpu.set_num_threads(1)
            cpu.CpuProgram([call], [x], ranks).run(step, no_cache(), best)
            assert logits.isnan().all(), "nothing is gathered"
            return best.tolist()

        cases.append((num_ranks, merge))
        wanted.append(argmax_rows(rows[:, :columns].numpy()).tolist())
    for found, ids in zip(run_in_ranks(cases), wanted, strict=True):
        assert found[0] == ids, len(found)
        assert ids[1:3] == [-1, 3] and ids[4] == 0 and ids[6] == 8, "the test would see it"


def test_best_ids_of_one_rank_are_refused() -> None:
    """They are asked of engines alone whose logits are apart."""
    x, step = normal(1, 16), plain_step(1)
    step.logit_rows, step.best_only = np.zeros(1, np.int32), True
    call = OpCall("all_gather", "g", {"x": x}, {"out": torch.zeros(1, 16)}, {"ranks": 1})
    program = cpu.CpuProgram([call], [x])
    with pytest.raises(AssertionError, match="best ids of logits that no other rank has parts of"):
        program.run(step, no_cache(), np.zeros(1, np.int32))


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_products_over_leaves_have_the_same_bits_on_any_number_of_ranks(dtype: str) -> None:
    """Each rank's leaves are a subtree of the tree that one rank adds alone."""
    inner, outputs = 8 * 48, 33
    kind = getattr(torch, dtype)
    weight = normal(outputs, inner, seed=1).to(kind)
    scales = {} if dtype == "bfloat16" else {"weight_scale": normal(outputs).abs() + 0.1,
                                             "x_scale": torch.tensor([0.5])}  # fmt: skip

    def multiply(ranks: Ranks | None, tokens: int) -> np.ndarray:
        x = normal(tokens, inner).to(kind)
        out = torch.zeros((tokens, outputs), dtype=torch.bfloat16)
        if ranks is None:
            inputs = {"x": x, "weight": weight, **scales}
            return run_call(OpCall("linear", "o", inputs, {"out": out}, {"leaves": 8}), tokens)
        size = inner // ranks.num_ranks
        mine = slice(ranks.rank * size, (ranks.rank + 1) * size)
        inputs = {"x": x[:, mine].contiguous(), "weight": weight[:, mine].contiguous()}
        share = torch.zeros((tokens, outputs))
        attributes = {"is_partial": True, "leaves": 8 // ranks.num_ranks}
        run_call(OpCall("linear", "o", inputs, {"out": share}, attributes), tokens)
        total = {"x": share, **scales}
        attributes = {"ranks": ranks.num_ranks}
        return run_call(OpCall("all_reduce", "s", total, {"out": out}, attributes), tokens, ranks)

    given = list(product((1, 3, 40), COUNTS))
    found = run_in_ranks([(n, partial(multiply, tokens=tokens)) for tokens, n in given])
    for (tokens, num_ranks), rows in zip(given, found, strict=True):
        wanted = multiply(None, tokens)
        assert all(np.array_equal(bits, wanted) for bits in rows), (tokens, num_ranks)


def test_bytes_of_the_first_rank_reach_all_others_in_order() -> None:
    """In pieces that meet the end of the ring at every offset, larger than it, too."""
    draw = random.Random(3)
    pieces = [draw.randbytes(draw.choice([1, 17, 4096, 300_000, 2_500_000])) for _ in range(40)]

    def talk(ranks: Ranks) -> bool:
        if ranks.rank == 0:
            for piece in pieces:
                ranks.write(piece)
            return True
        return all(ranks.read(len(piece)) == piece for piece in pieces)

    assert run_ranks(4, talk) == [True] * 4


@pytest.mark.parametrize("limit_s", [0.3, 0.0005])
def test_a_rank_that_does_not_come_is_named(limit_s: float) -> None:
    def wait(ranks: Ranks) -> str:
        if ranks.rank == 1:
            return "absent"
        call = sum_call(normal(1, 16), 2)
        with pytest.raises(RankFailure) as failure:
            run_call(call, 1, ranks)
        return str(failure.value)

    assert run_ranks(2, wait, limit_s) == ["rank 1 is late", "absent"]


def test_a_rank_that_is_known_to_have_ended_ends_the_waiting_of_all() -> None:
    def wait(ranks: Ranks) -> str:
        if ranks.rank == 2:
            ranks.lose(2)
            return "ended"
        with pytest.raises(RankFailure) as failure:
            if ranks.rank == 3:
                ranks.read(1)
            else:
                run_call(sum_call(normal(1, 16), 4), 1, ranks)
        return str(failure.value)

    said = "rank 2 has ended"
    assert run_ranks(4, wait, limit_s=0) == [said, said, "ended", said]


def test_a_program_for_other_ranks_is_refused() -> None:
    with pytest.raises(Unsupported, match="over 2 ranks where 1 run"):
        cpu.CpuProgram([sum_call(normal(1, 16), 2)])
    with pytest.raises(Unsupported, match="9 ranks"):
        make_segment(9)
    too_wide = sum_call(normal(1, 2**20 + 1), 1)
    with pytest.raises(Unsupported, match="the limit is 1048576"):
        cpu.CpuProgram([too_wide])
