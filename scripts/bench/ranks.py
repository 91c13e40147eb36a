"""Times what ranks with a GPU each exchange: sums behind O and down products, alone and with the
norm that follows, logits, and instead of them the best ids, or draws without filters, which are
also drawn from gathered logits; and of draft heads what a layer puts out, and the likely ids.

    python -m scripts.bench.ranks [--ranks 2] [--hidden 8192] [--vocab 128256]

One line per kernel and number of rows: microseconds a launch in a CUDA graph of launches that wait
for each other, the slowest rank's median with the range over replays, and the share that the bytes
which enter a GPU would take of it at the link's rate (NVLink 4: 450 GB/s one way).
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import replace
from multiprocessing.connection import Connection

import torch

from llmctl.plugins.backends.cuda.read_rate import elapsed_ms
from llmctl.plugins.core.calls import OpCall
from llmctl.plugins.ops.all_reduce.peers import entering_bytes, hops_of
from llmctl.plugins.ops.rank_argmax.chunks import PEER_CHUNK
from llmctl.plugins.ops.rank_offers import kernel as rank_offers
from scripts.bench.ranks_support import ExchangingRank, run_ranks

ROWS = (1, 4, 11, 176)  # of which 4 are beams of a request
PROMPTS = (512, 2048)  # rows of prompts, of sums with the norm alone
REPEATS, REPLAYS, WARM_UP = 50, 25, 5
LINK_BYTES_S = 450e9
DRAW_BYTES = 32  # of a row's best draw
LISTED = 4  # likely ids of a chunk, as for four beams
Times = tuple[float, float, float]  # median, least, most, in microseconds


def measure(rank: int, ranks: int, pipe: Connection, hidden: int, vocab: int) -> None:
    """One process: sends (kernel, rows, times, bytes that enter the GPU) of each."""
    share = -(-vocab // (64 * ranks)) * 64
    most = max(max(ROWS) * max(hidden, share), max(PROMPTS) * hidden) * 4
    own = ExchangingRank(rank, ranks, pipe, most, limit_s=20.0)
    found = []
    for rows in ROWS:
        for call in (_sum(own, rows, hidden), _gathering(own, rows, share, vocab)):
            entering = call.inputs["x"].nbytes * (ranks - 1)
            found.append((call.op, rows, _time(own, call, rows), entering))
        columns, listing = _columns(own, rows, 2 * hidden), _listing(own, rows, share, vocab)
        for name, call, given in (
            ("columns", columns, columns.inputs["x"].nbytes),
            ("likely ids", listing, rows * _listed_bytes(share)),
        ):
            found.append((name, rows, _time(own, call, rows), given * (ranks - 1)))
        each = (
            ("best id", "best", 8 * -(-share // PEER_CHUNK)),
            ("draw", "drawn", DRAW_BYTES),
            ("gather and draw", "drawn_here", 4 * share),
        )
        for name, role, given in each:
            merged = _merging(own, rows, share, vocab, role)
            found.append((name, rows, _time(own, merged, rows), given * rows * (ranks - 1)))
    for rows in (*ROWS, *PROMPTS):
        entering = entering_bytes(ranks, rows, hidden, hops_of(ranks, rows, hidden))
        call = _norm(own, rows, hidden)
        found.append((call.op, rows, _time(own, call, rows), entering))
    pipe.send(found)
    pipe.recv()


def _sum(own: ExchangingRank, rows: int, hidden: int) -> OpCall:
    inputs = {
        "x": torch.randn(rows, hidden, device=own.device),
        "weight_scale": torch.rand(hidden, device=own.device),
        "x_scale": torch.tensor([0.01], device=own.device),
    }
    out = torch.empty(rows, hidden, dtype=torch.bfloat16, device=own.device)
    return OpCall("all_reduce", "sum", inputs, {"out": out}, {"ranks": own.ranks})


def _norm(own: ExchangingRank, rows: int, hidden: int) -> OpCall:
    summed = _sum(own, rows, hidden)
    stream = torch.randn(rows, hidden, device=own.device).bfloat16()
    inputs = {
        **summed.inputs,
        "residual": stream,
        "norm_weight": torch.ones(hidden, dtype=torch.bfloat16, device=own.device),
        "scale": torch.tensor([0.05], device=own.device),
    }
    out = torch.empty(rows, hidden, dtype=torch.float8_e4m3fn, device=own.device)
    outputs = {"out": out, "residual_out": torch.empty_like(stream)}
    attributes = {"ranks": own.ranks, "epsilon": 1e-5, "keeps": 1}  # as most sums of a model
    return OpCall("all_reduce_norm", "sum and norm", inputs, outputs, attributes)


def _gathering(own: ExchangingRank, rows: int, share: int, vocab: int) -> OpCall:
    x = torch.randn(rows, share, device=own.device)
    out = torch.empty(rows, vocab, device=own.device)
    return OpCall("all_gather", "gather", {"x": x}, {"out": out}, {"ranks": own.ranks})


def _columns(own: ExchangingRank, rows: int, width: int) -> OpCall:
    """As a layer of a ReDrafter head puts them out."""
    x = torch.randn(rows, width // own.ranks, device=own.device).bfloat16()
    out = torch.empty(rows, width, dtype=torch.bfloat16, device=own.device)
    return OpCall("all_gather", "c", {"x": x}, {"out": out}, {"ranks": own.ranks, "to_all": True})


def _listing(own: ExchangingRank, rows: int, share: int, vocab: int) -> OpCall:
    gathering = _gathering(own, rows, share, vocab)
    chunks = rank_offers.num_chunks(own.ranks, share)
    made = {
        "listed": torch.empty(rows, chunks, LISTED, dtype=torch.int64, device=own.device),
        "sums": torch.empty(rows, chunks, 2, device=own.device),
    }
    return replace(gathering, outputs={**gathering.outputs, **made})


def _listed_bytes(share: int) -> int:
    """Of a row, that a rank gives."""
    return 8 * (LISTED + 1) * -(-share // PEER_CHUNK)


def _merging(own: ExchangingRank, rows: int, share: int, vocab: int, role: str) -> OpCall:
    gathering = _gathering(own, rows, share, vocab)
    tokens = torch.empty(rows, dtype=torch.int32, device=own.device)
    return replace(gathering, outputs={**gathering.outputs, role: tokens})


def _time(own: ExchangingRank, call: OpCall, rows: int) -> Times:
    run = own.prepare(call, rows)

    def record() -> None:
        for _ in range(REPEATS):
            run(torch.cuda.current_stream().cuda_stream)

    record()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        record()
    times = [1e3 * ms / REPEATS for ms in elapsed_ms(graph.replay, WARM_UP + REPLAYS)[WARM_UP:]]
    assert not int(own.peers.lost[0]), "a rank did not come"
    return statistics.median(times), min(times), max(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=8192)
    parser.add_argument("--vocab", type=int, default=128256)
    options = parser.parse_args()
    cards = torch.cuda.device_count()
    print(f"{options.ranks} ranks on {min(cards, options.ranks)} x {torch.cuda.get_device_name()}")
    print(f"{'kernel':<16}{'rows':>6}{'us':>9}{'min':>9}{'max':>9}{'share':>9}")
    by_rank = run_ranks(options.ranks, measure, options.hidden, options.vocab)
    for each in zip(*by_rank, strict=True):
        op, rows, _, entering = each[0]
        median, least, most = max(times for _, _, times, _ in each)
        share = 1e6 * entering / LINK_BYTES_S / median
        print(f"{op:<16}{rows:>6}{median:>9.2f}{least:>9.2f}{most:>9.2f}{share:>9.1%}")


if __name__ == "__main__":
    main()
