"""The best id of rows of which ranks have shares: the argmax of whole rows, in the interpreter and
by the peers' own source on a CPU, and compiled without spills."""

from __future__ import annotations

import random
import time
from dataclasses import replace

import pytest
import torch
from support.emulated_peers import BEST, compile_peers
from support.kernel import launch_env
from support.peer_buffers import Buffers, pointer, run_ranks
from support.rank_rows import shares_of

from llmctl.plugins.backends.cuda.compiler import compile_kernel
from llmctl.plugins.backends.cuda.interpret import run_launches
from llmctl.plugins.backends.cuda.kernel_spec import StepShape
from llmctl.plugins.core.calls import OpCall
from llmctl.plugins.core.example_parts import no_cache, plain_step
from llmctl.plugins.core.examples import Example
from llmctl.plugins.ops.all_gather import kernel as all_gather
from llmctl.plugins.ops.rank_argmax import kernel
from llmctl.plugins.ops.rank_argmax.reference import argmax_ranks
from llmctl.plugins.ops.sampling.reference import argmax_rows

COUNTS = (2, 4, 8)
NAN = float("nan")
STRIDE, OFFSET = 3, 1  # of the places of tokens
OWN, CHUNK, MOST_ROWS, LAUNCHES, MAX_BLOCKS = 80, 32, 7, 24, 4


def wanted_of(shares: list[torch.Tensor], vocab: int) -> torch.Tensor:
    logits = torch.cat(shares, dim=1)[:, :vocab].numpy()
    return torch.from_numpy(argmax_rows(logits)).int()


def gathering(shares: list[torch.Tensor], vocab: int) -> OpCall:
    out = torch.full((len(shares[0]), vocab), NAN)
    return OpCall("all_gather", "g", {"x": shares[0]}, {"out": out}, {"ranks": len(shares)})


@pytest.mark.parametrize("seed", range(20))
def test_the_reference_is_the_argmax_of_whole_rows(seed: int) -> None:
    shares = shares_of(4, OWN, 4 * OWN - 61, MOST_ROWS, seed)
    wanted = wanted_of(shares, 4 * OWN - 61)
    assert torch.equal(argmax_ranks(shares, 4 * OWN - 61), wanted)


@pytest.mark.parametrize("ranks", COUNTS)
@pytest.mark.parametrize(("own", "vocab"), [(64, 67), (1536, 6001)])
def test_ranks_on_one_device_find_what_one_finds(ranks: int, own: int, vocab: int) -> None:
    """One chunk a row, and up to three; whole ranks may be padding. Twice, for keys are cleared."""
    vocab = min(vocab, own * ranks - 5)
    for seed in range(3):
        shares = shares_of(ranks, own, vocab, 9, seed)
        call = gathering(shares, vocab)
        env = launch_env(Example(call, plain_step(9), no_cache()))
        env = replace(env, parts=lambda x, ranks, given=tuple(shares): given)
        for _ in range(2):
            out = torch.full((9 * STRIDE,), -7, dtype=torch.int32)
            run_launches([kernel.launch(call, env, out, 9, stride=STRIDE, offset=OFFSET)])
            assert torch.equal(out[OFFSET::STRIDE], wanted_of(shares, vocab))
            assert (out.view(9, STRIDE)[:, [0, 2]] == -7).all()


def test_logits_of_any_number_of_rows_have_their_own_keys() -> None:
    """A step's logits, and those of draft heads, which have other rows, on one device."""
    few, many = (gathering(shares_of(2, OWN, 2 * OWN - 5, rows, 0), 2 * OWN - 5) for rows in (3, 9))
    env = launch_env(Example(few, plain_step(9), no_cache()))
    assert kernel.keys_of(few, env) is kernel.keys_of(few, env)
    assert kernel.keys_of(few, env).shape == (3, 1) and kernel.keys_of(many, env).shape == (9, 1)


@pytest.mark.parametrize("ranks", COUNTS)
def test_peers_find_what_one_finds(ranks: int) -> None:
    """Launch after launch, whoever is late; what was given is cleared."""
    vocab = (ranks - 1) * OWN + 5  # whose last chunks are padding
    macros = {"RANKS": ranks, "LEAVES": 1, "WIDTH": OWN, "OUT_WIDTH": vocab, "CHUNK": CHUNK}
    library = compile_peers(BEST, **macros)
    draw, buffers = random.Random(ranks), Buffers(ranks, MOST_ROWS * OWN * 4)
    cases = []
    for seed in range(LAUNCHES):
        rows = draw.choice((1, 2, MOST_ROWS))
        outs = [torch.full((rows * STRIDE,), -7, dtype=torch.int32) for _ in range(ranks)]
        cases.append((shares_of(ranks, OWN, vocab, rows, seed), outs))

    def body(rank: int) -> None:
        own = random.Random(rank)
        for shares, outs in cases:
            time.sleep(own.choice((0, 0, 0.002, 0.006)))
            x = shares[rank]
            grid = min(len(x) * -(-OWN // CHUNK), MAX_BLOCKS)
            places = [pointer(outs[rank]), STRIDE, OFFSET]
            buffers.call(library, rank, x, (grid, 1), places, 30 * 10**9)

    run_ranks([lambda rank=rank: body(rank) for rank in range(ranks)])
    for number, (shares, outs) in enumerate(cases):
        for out in outs:
            assert torch.equal(out[OFFSET::STRIDE], wanted_of(shares, vocab)), number
            assert (out.view(-1, STRIDE)[:, [0, 2]] == -7).all()
    buffers.require_left_empty(LAUNCHES)


def test_rows_of_a_rank_that_does_not_come_are_nobodys() -> None:
    """What follows may read them: -1 is what a row with NaN gives."""
    macros = {"RANKS": 2, "LEAVES": 1, "WIDTH": OWN, "OUT_WIDTH": 2 * OWN, "CHUNK": CHUNK}
    library, buffers = compile_peers(BEST, **macros), Buffers(2, MOST_ROWS * OWN * 4)
    out = torch.full((3,), -7, dtype=torch.int32)
    for limit_ns in (10**8, 60 * 10**9):  # the second launch sees that rank 1 is lost
        places = [pointer(out), 1, 0]
        buffers.call(library, 0, torch.ones((3, OWN)), (2, 1), places, limit_ns)
    assert int(buffers.lost[0]) == 2 and out.tolist() == [-1] * 3


def test_a_step_of_best_ids_gathers_nothing() -> None:
    shares = shares_of(2, OWN, 2 * OWN, 3, 1)
    call = gathering(shares, 2 * OWN)
    env = launch_env(Example(call, plain_step(3), no_cache()))
    env = replace(env, parts=lambda x, ranks: tuple(shares))
    shape = StepShape(3, 1, 3, 3, 3)
    assert len(all_gather.launches(call, env, shape)) == 1
    assert all_gather.launches(call, env, replace(shape, best_only=True)) == []


@pytest.mark.parametrize(("ranks", "own"), [(2, 64_128), (4, 32_064), (8, 16_064)])
def test_kernels_of_a_vocabulary_do_not_spill(ranks: int, own: int) -> None:
    """128,256 ids. Both kernels are in the engine beside those that gather."""
    x, out = (torch.empty((16, width), device="meta") for width in (own, 128_256))
    call = OpCall("all_gather", "g", {"x": x}, {"out": out}, {"ranks": ranks})
    limits = launch_env(Example(call, plain_step(1), no_cache())).limits
    specs = [s for s in all_gather.kernels(call, limits) if s.name.startswith("rank_argmax")]
    assert [spec.is_triton for spec in specs] == [True, False]
    assert all(compile_kernel(spec).local_bytes == 0 for spec in specs)
