"""Ranks that are processes, each with a GPU where there are as many, else on one in turns: what
they exchange has the bits of the references on all of them, in any order of sizes."""

from __future__ import annotations

import random
from multiprocessing.connection import Connection

import pytest
import torch

from llmctl.plugins.core.calls import OpCall
from llmctl.plugins.ops.all_gather.reference import gather_ranks
from llmctl.plugins.ops.all_reduce.peers import TURN
from llmctl.plugins.ops.all_reduce.reference import reduce_ranks
from llmctl.plugins.ops.rank_argmax.chunks import PEER_CHUNK
from llmctl.plugins.ops.rank_argmax.reference import argmax_ranks
from llmctl.plugins.ops.rank_offers.reference import list_shares
from llmctl.plugins.ops.sampling.reference import sample_rows
from llmctl.plugins.ops.sampling.spec import SamplingRow
from llmctl.runtime.request import SamplingConfig
from scripts.bench.ranks_support import DRAWN_AT, ExchangingRank, run_ranks

ROWS, HIDDEN, OWN = 1200, 1536, 192  # sums of 4 ranks take two hops from 96 rows on
WIDE, MOST_WIDE = 16_384, 96
WIDE_OWN, MOST_DRAWN = 64_128, 11  # ids of a rank: 32 chunks of one
SLOT_BYTES = ROWS * HIDDEN * 4
assert MOST_WIDE * WIDE * 4 <= SLOT_BYTES
LIMIT_S = 20.0
KINDS = ("sum", "scaled", "gather", "best", "drawn", "norm", "norm fp8", "wide norm fp8")
KINDS += ("wide drawn", "scaled parts", "norm fp8 parts", "kept norm fp8")
KINDS += ("columns", "columns with padding", "listed", "wide listed")
LISTED = 4  # ids of a chunk
LAUNCHES, EPSILON = 64, {"epsilon": 1e-5}
Wanted = dict[str, torch.Tensor]


class Rank(ExchangingRank):
    """One process's kernels, and what they are to compute."""

    def call(self, kind: str, rows: int, seed: int) -> tuple[OpCall, Wanted]:
        """(the call of this rank, its results by role), from numbers that all know."""
        generator = torch.Generator().manual_seed(seed)
        leaves = 4 if kind.endswith("parts") else 1
        hidden = WIDE if kind.startswith("wide") else HIDDEN
        width = OWN if kind in ("gather", "best", "drawn", "listed") else leaves * hidden
        width = OWN if kind.startswith("columns") else width
        width = WIDE_OWN if kind in ("wide drawn", "wide listed") else width
        parts = torch.randn((self.ranks, rows, width), generator=generator)
        x = parts[self.rank].to(self.device)
        if kind == "gather" or kind.startswith("columns"):
            columns = self.ranks * OWN - (0 if kind == "columns" else 61)
            dtype = torch.float32 if kind == "gather" else torch.bfloat16
            out = torch.full((rows, columns), torch.nan, dtype=dtype, device=self.device)
            wanted = torch.empty((rows, columns), dtype=dtype)
            gather_ranks(list(parts.to(dtype)), {"out": wanted})
            attributes = {"ranks": self.ranks, **({} if kind == "gather" else {"to_all": True})}
            call = OpCall("all_gather", "g", {"x": x.to(dtype)}, {"out": out}, attributes)
            return call, {"out": wanted}
        if kind.endswith("listed"):
            return self._listed(parts, rows)
        if kind == "best" or kind.endswith("drawn"):
            return self._merging(parts, rows, kind.removeprefix("wide "))
        after = {}
        if kind != "sum":
            after = {
                "weight_scale": torch.rand(hidden, generator=generator) + 0.5,
                "x_scale": torch.tensor([0.75]),
                "bias": torch.randn(hidden, generator=generator).bfloat16(),
            }
        wanted = torch.empty((rows, hidden), dtype=torch.bfloat16)
        reduce_ranks(list(parts), after, {"out": wanted})
        inputs = {"x": x, **{role: tensor.to(self.device) for role, tensor in after.items()}}
        parted = {"ranks": self.ranks, **({"leaves": leaves} if leaves > 1 else {})}
        parted |= {"keeps": 1} if kind.startswith("kept") else {}
        if "norm" in kind:
            return self._with_norm(inputs, wanted, generator, parted, is_fp8="fp8" in kind)
        out = torch.zeros((rows, hidden), dtype=torch.bfloat16, device=self.device)
        return OpCall("all_reduce", "s", inputs, {"out": out}, parted), {"out": wanted}

    def _listed(self, parts: torch.Tensor, rows: int) -> tuple[OpCall, Wanted]:
        """The likeliest ids of chunks, with ties between ranks and a number that is none."""
        columns = self.ranks * parts.shape[2] - 61
        parts[:2, 0, 7:9] = 9.0
        parts[self.ranks - 1, rows - 1, 3] = torch.nan
        keys, sums = list_shares(list(parts), columns, LISTED, PEER_CHUNK)
        made = {
            "out": torch.empty((rows, columns), device=self.device),
            "listed": torch.zeros_like(keys, device=self.device),
            "sums": torch.zeros_like(sums, device=self.device),
        }
        x = parts[self.rank].to(self.device)
        call = OpCall("all_gather", "l", {"x": x}, made, {"ranks": self.ranks})
        return call, {"listed": keys, "sums": sums}

    def _merging(self, parts: torch.Tensor, rows: int, role: str) -> tuple[OpCall, Wanted]:
        """Best ids or draws, with ties between ranks and a row without a number; not all ids are
        anybody's."""
        columns = self.ranks * parts.shape[2] - 61
        parts[:2, 0, 7:9] = 9.0
        if rows > 2:
            parts[self.ranks - 1, 2, 3] = torch.nan
        if role == "best":
            wanted = argmax_ranks(list(parts), columns)
        else:
            sampling = SamplingConfig(temperature=DRAWN_AT, top_k=0)
            drawn = [SamplingRow(sampling, i, i) for i in range(rows)]
            logits = torch.cat(list(parts), dim=1)[:, :columns].numpy()
            wanted = torch.from_numpy(sample_rows(logits, drawn)).int()
        x = parts[self.rank].to(self.device)
        made = {
            "out": torch.empty((rows, columns), device=self.device),
            role: torch.zeros(rows, dtype=torch.int32, device=self.device),
        }
        call = OpCall("all_gather", "b", {"x": x}, made, {"ranks": self.ranks})
        return call, {role: wanted}

    def _with_norm(
        self,
        inputs: dict[str, torch.Tensor],
        total: torch.Tensor,
        generator: torch.Generator,
        parted: dict[str, int],
        *,
        is_fp8: bool,
    ) -> tuple[OpCall, Wanted]:
        """The kernel of rms_norm says what is wanted of the sum: the bits are to be its bits."""
        total = total.to(self.device)
        residual = torch.randn(total.shape, generator=generator).to(total)
        given = {"residual": residual}
        given |= {"scale": torch.tensor([0.03], device=self.device)} if is_fp8 else {}
        weight = torch.randn(total.shape[1], generator=generator).to(total)
        dtype = torch.float8_e4m3fn if is_fp8 else total.dtype

        def made() -> dict[str, torch.Tensor]:
            out = torch.zeros(total.shape, dtype=dtype, device=self.device)
            return {"out": out, "residual_out": torch.zeros_like(total)}

        norm = OpCall("rms_norm", "n", {"x": total, "weight": weight, **given}, made(), EPSILON)
        self.prepare(norm, len(total))(torch.cuda.current_stream().cuda_stream)
        torch.cuda.synchronize()
        inputs = {**inputs, "norm_weight": weight, **given}
        attributes = {**parted, **EPSILON}
        call = OpCall("all_reduce_norm", "s", inputs, made(), attributes)
        checked = {role: tensor.cpu() for role, tensor in norm.outputs.items()}
        if "keeps" in parted:  # whose rows a rank has of the stream is the kernel's to know
            del checked["residual_out"]
        return call, checked


def exchange(rank: int, ranks: int, pipe: Connection) -> None:
    own = Rank(rank, ranks, pipe, SLOT_BYTES, LIMIT_S)
    draw = random.Random(5)
    calls = []
    for seed in range(LAUNCHES):
        kind, rows = draw.choice(KINDS), draw.choice((1, 2, 11, MOST_WIDE, ROWS))
        rows = min(rows, MOST_WIDE) if kind.startswith("wide") else rows
        rows = min(rows, MOST_DRAWN) if kind in ("wide drawn", "wide listed") else rows
        calls.append((*own.call(kind, rows, seed), rows))
    prepared = [own.prepare(call, rows) for call, _, rows in calls]
    stream, graph = torch.cuda.Stream(own.device), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    for run in prepared:
        run(stream.cuda_stream)
    stream.synchronize()
    wrong = [i for i, (call, wanted, _) in enumerate(calls) if not same(call, wanted)]
    with torch.cuda.graph(graph, stream=stream):
        for run in prepared:
            run(stream.cuda_stream)
    for turn in range(5):
        for call, _, _ in calls:
            for out in call.outputs.values():
                out.zero_()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            graph.replay()
        stream.synchronize()
        wrong += [100 + turn for call, wanted, _ in calls if not same(call, wanted)]
    pipe.send((wrong, own.peers.lost.tolist(), own.peers.state.tolist()))
    pipe.recv()


def same(call: OpCall, wanted: Wanted) -> bool:
    """Bit for bit, but for sums of exponentials, which the reference takes from other functions."""
    pairs = {role: (call.outputs[role].cpu(), tensor) for role, tensor in wanted.items()}
    close = pairs.pop("sums", None)
    return (close is None or torch.allclose(*close, rtol=1e-5)) and all(
        torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs.values()
    )


def leave_alone(rank: int, ranks: int, pipe: Connection) -> None:
    """Rank 1 never comes: rank 0 stops waiting, and says for whom it waited."""
    own = Rank(rank, ranks, pipe, SLOT_BYTES, 1.0)
    call, _ = own.call("sum", 3, 1)
    run = own.prepare(call, 3)
    torch.cuda.synchronize()
    if rank == 0:
        run(torch.cuda.current_stream().cuda_stream)
        run(torch.cuda.current_stream().cuda_stream)
        torch.cuda.synchronize()
    pipe.send(own.peers.lost.tolist())
    pipe.recv()


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_exchange_the_bits_of_the_references(ranks: int) -> None:
    for wrong, lost, state in run_ranks(ranks, exchange):
        assert (wrong, lost[0], state[0]) == ([], 0, 6 * LAUNCHES * TURN)


def test_a_rank_that_does_not_come_is_named() -> None:
    found = run_ranks(2, leave_alone)
    assert found[0][0] == 2 and found[1][0] == 0
