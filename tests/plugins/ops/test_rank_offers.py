"""The likeliest ids of rows of which ranks have shares: those of whole rows, by the peers' own
source on a CPU, as a beam search reads them, and compiled without spills."""

from __future__ import annotations

import random
import time
from dataclasses import replace

import pytest
import torch
from support.emulated_peers import OFFERS, compile_peers
from support.peer_buffers import Buffers, pointer, run_ranks
from support.rank_rows import shares_of

from llmctl.plugins.backends.cuda.compiler import compile_kernel
from llmctl.plugins.backends.cuda.kernel_spec import Peers
from llmctl.plugins.ops.beam_search.reference import top_log_probs
from llmctl.plugins.ops.rank_offers import kernel
from llmctl.plugins.ops.rank_offers.reference import LARGE, list_shares

NAN = float("nan")
OWN, CHUNK, MOST, LAUNCHES, MAX_BLOCKS = 80, 32, 12, 16, 3
MOST_ROWS, MOST_HEADS = 4, 3


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_every_rank_lists_what_whole_rows_have(ranks: int) -> None:
    """Launch after launch, of one head with sums and of several without, whoever is late."""
    vocab = (ranks - 1) * OWN + 5  # whose last chunks are padding
    macros = {"RANKS": ranks, "LEAVES": 1, "WIDTH": OWN, "OUT_WIDTH": vocab, "CHUNK": CHUNK}
    library = compile_peers(OFFERS, **macros, MOST=MOST)
    chunks = ranks * -(-OWN // CHUNK)
    slot = MOST_HEADS * MOST_ROWS * chunks // ranks * (MOST + 1) * 8
    draw, buffers, cases = random.Random(ranks), Buffers(ranks, slot), []
    for seed in range(LAUNCHES):
        heads, rows = draw.choice((1, 1, MOST_HEADS)), draw.choice((1, 2, MOST_ROWS))
        count = draw.choice((1, 4, MOST))
        shares = [shares_of(ranks, OWN, vocab, rows, 31 * seed + head) for head in range(heads)]
        stride = rows * chunks * count + 2
        found = [
            (torch.full((heads, stride), -7), torch.full((rows, chunks, 2), NAN))
            for _ in range(ranks)
        ]
        cases.append((shares, rows, count, found))

    def body(rank: int) -> None:
        own = random.Random(rank)
        for shares, rows, count, found in cases:
            time.sleep(own.choice((0, 0, 0.002, 0.006)))
            keys, sums = found[rank]
            addresses = torch.tensor([share[rank].data_ptr() for share in shares])
            places = [pointer(keys), pointer(sums) if len(shares) == 1 else None]
            places += [count, rows, keys.shape[1]]
            buffers.call(library, rank, addresses, (MAX_BLOCKS, 1), places, 30 * 10**9)

    run_ranks([lambda rank=rank: body(rank) for rank in range(ranks)])
    for shares, _, count, found in cases:
        for head, own in enumerate(shares):
            wanted, wanted_sums = list_shares(own, vocab, count, CHUNK)
            for keys, sums in found:
                assert torch.equal(keys[head, : wanted.numel()].view(wanted.shape), wanted)
                assert (keys[head, wanted.numel() :] == -7).all()
                if len(shares) > 1:
                    continue
                torch.testing.assert_close(sums, wanted_sums, rtol=1e-5, atol=0)
                assert torch.equal(sums.view(torch.int32), found[0][1].view(torch.int32)), (
                    "ranks draft alike"
                )
    buffers.require_left_empty(LAUNCHES)


def test_rows_of_a_rank_that_does_not_come_offer_nothing() -> None:
    macros = {"RANKS": 2, "LEAVES": 1, "WIDTH": OWN, "OUT_WIDTH": 2 * OWN, "CHUNK": CHUNK}
    library = compile_peers(OFFERS, **macros, MOST=MOST)
    share, buffers = torch.ones((1, OWN)), Buffers(2, 3 * 5 * 8)
    keys, sums = torch.full((1, 24), -7), torch.full((1, 6, 2), NAN)
    addresses = torch.tensor([share.data_ptr()])
    for limit_ns in (10**8, 60 * 10**9):  # the second launch sees that rank 1 is lost
        places = [pointer(keys), pointer(sums), 4, 1, 24]
        buffers.call(library, 0, addresses, (1, 1), places, limit_ns)
    assert int(buffers.lost[0]) == 2 and not keys.any()
    assert sums[0, :, 0].tolist() == [-torch.tensor(LARGE).item()] * 6 and not sums[0, :, 1].any()


@pytest.mark.parametrize("seed", range(12))
def test_the_reference_has_what_a_beam_search_reads_of_whole_rows(seed: int) -> None:
    """Of rows of finite logits: the likeliest ids, and their log-probabilities."""
    vocab, count = 4 * OWN - 61, 6
    shares = shares_of(4, OWN, vocab, 5, seed)
    logits = torch.cat(shares, 1)[:, :vocab]
    keys, sums = list_shares(shares, vocab, count, CHUNK)
    best = keys.flatten(1).topk(count).values
    ids = 0x7FFFFFFF - (best & 0x7FFFFFFF)
    order = (best >> 31) - (1 << 31)
    values = torch.where(order < 0, order ^ 0x7FFFFFFF, order).int().view(torch.float32)
    top = sums[..., 0].amax(1, keepdim=True)
    normalizer = top + ((sums[..., 0] - top).exp() * sums[..., 1]).sum(1, keepdim=True).log()
    is_finite = logits.isfinite().all(1)
    wanted, log_probs = top_log_probs(logits[is_finite], count)
    assert torch.equal(ids[is_finite], wanted) and is_finite.any()
    torch.testing.assert_close((values - normalizer)[is_finite], log_probs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("ranks", "own"), [(2, 64_128), (4, 32_064), (8, 16_064)])
def test_the_kernel_of_a_vocabulary_does_not_spill(ranks: int, own: int) -> None:
    """128,256 ids."""
    assert compile_kernel(kernel.spec(ranks, own, 128_256, has_sums=True)).local_bytes == 0


@pytest.mark.parametrize("heads", [1, 4])
def test_a_launch_has_what_the_kernel_takes(heads: int) -> None:
    """A beam search's, with sums, and a static tree's without: tensors where it takes pointers."""
    shares = [torch.zeros((3, OWN)) for _ in range(heads)]
    logits = kernel.SharedLogits.of(shares, 2 * OWN - 3, 2)
    assert logits.num_chunks == kernel.num_chunks(2, OWN) == 2
    keys = torch.zeros((heads, 3 * 2 * 4), dtype=torch.int64)
    sums = torch.zeros((3, 2, 2)) if heads == 1 else None
    places = [torch.zeros(4, dtype=torch.int32) for _ in range(3)]
    peers = Peers(1, 2, *places, kernel.given_bytes(OWN, 3 * heads), 10**9)
    made = kernel.launch(logits, peers, keys, sums, 3, 4)
    assert made.spec == kernel.spec(2, OWN, 2 * OWN - 3, has_sums=sums is not None)
    assert len(made.arguments) == len(made.spec.arguments)
    for kind, given in zip(made.spec.arguments, made.arguments, strict=True):
        assert isinstance(given, torch.Tensor) == kind.startswith("*"), kind
    with pytest.raises(AssertionError, match="a slot holds"):
        kernel.launch(logits, replace(peers, slot_bytes=100), keys, sums, 3, 4)
    with pytest.raises(AssertionError, match="keys hold"):
        kernel.launch(logits, peers, keys[:, :20].contiguous(), sums, 3, 4)
