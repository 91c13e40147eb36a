"""What ranks with a GPU each exchange, by the kernel's own source on a CPU: the bits of the
references on every rank, launch after launch, whatever the ranks' speeds."""

from __future__ import annotations

import ctypes
import random
import threading
import time
from typing import Any

import pytest
import torch
from support import emulated_peers
from support.emulated_peers import EXCHANGE, NORM, PRODUCT, THREADS, compile_peers
from support.peer_buffers import Buffers, optional, pointer, run_ranks, same

from llmctl.plugins.fused.all_reduce_norm.reference import reduce_and_normalize
from llmctl.plugins.ops.all_gather.reference import gather_ranks
from llmctl.plugins.ops.all_reduce.peers import TURN
from llmctl.plugins.ops.all_reduce.reference import reduce_ranks

WIDTH, OWN, MOST_ROWS = 48, 32, 7
LAUNCHES, MAX_BLOCKS = 24, 4
AFTER = ("weight_scale", "x_scale", "bias")
SLOT_BYTES = MOST_ROWS * WIDTH * 4
NORMED, EPSILON = ("out", "residual_out"), 1e-5


def launch(
    buffers: Buffers,
    library: ctypes.CDLL,
    rank: int,
    x: torch.Tensor,
    out: torch.Tensor,
    after: dict[str, torch.Tensor],
    limit_ns: int,
) -> None:
    grid = min(-(-(x.numel() // 4) // THREADS), MAX_BLOCKS)
    given = [*optional(after, *AFTER), pointer(out)]
    buffers.call(library, rank, x, (grid, 1), given, limit_ns)


def cases(ranks: int, has_gather: bool, num_launches: int) -> list[dict[str, Any]]:
    """Launches that follow one another: of all sizes, with and without what ends a product."""
    draw, made = random.Random(ranks), []
    for seed in range(num_launches):
        generator = torch.Generator().manual_seed(seed)
        rows = draw.choice((1, 1, 2, 3, MOST_ROWS))
        is_gather = has_gather and seed % 3 == 2
        parts = torch.randn((ranks, rows, OWN if is_gather else WIDTH), generator=generator)
        parts[draw.randrange(ranks), :, 3:6] = torch.tensor([0.0, -0.0, torch.nan])
        after: dict[str, torch.Tensor] = {}
        if not is_gather and seed % 2:
            after = {
                "weight_scale": torch.rand(WIDTH, generator=generator) + 0.5,
                "x_scale": torch.tensor([0.75]),
                "bias": torch.randn(WIDTH, generator=generator).bfloat16(),
            }
        columns = ranks * OWN - 13 if is_gather else WIDTH
        dtype = torch.float32 if is_gather else torch.bfloat16
        wanted = torch.empty((rows, columns), dtype=dtype)
        if is_gather:
            gather_ranks(list(parts), {"out": wanted})
        else:
            reduce_ranks(list(parts), after, {"out": wanted})
        outs = [torch.full((rows, columns), torch.nan, dtype=dtype) for _ in range(ranks)]
        made.append({"gather": is_gather, "parts": parts, "after": after, "wanted": wanted,
                     "outs": outs})  # fmt: skip
    return made


@pytest.mark.parametrize(("ranks", "has_gather"), [(2, True), (4, True), (8, False)])
def test_every_rank_has_the_bits_of_the_reference(ranks: int, has_gather: bool) -> None:
    require_bits(ranks, has_gather)


def require_bits(
    ranks: int,
    has_gather: bool = False,
    num_launches: int = LAUNCHES,
    limit_ns: int = 30 * 10**9,
) -> None:
    """Ranks wait a random time before a launch, so each is the last one sometimes."""
    kinds = {False: ("BF16", WIDTH, WIDTH), True: ("FP32", OWN, ranks * OWN - 13)}
    libraries = {
        gather: compile_peers(RANKS=ranks, LEAVES=1, WIDTH=width, GATHER=int(gather),
                              OUT_WIDTH=out_width, OUT_TYPE=out)
        for gather, (out, width, out_width) in kinds.items() if has_gather or not gather
    }  # fmt: skip
    buffers, launches = Buffers(ranks, SLOT_BYTES), cases(ranks, has_gather, num_launches)

    def body(rank: int) -> None:
        draw = random.Random(rank)
        for case in launches:
            time.sleep(draw.choice((0, 0, 0.002, 0.006)))
            x, out = case["parts"][rank], case["outs"][rank]
            launch(buffers, libraries[case["gather"]], rank, x, out, case["after"], limit_ns)

    run_ranks([lambda rank=rank: body(rank) for rank in range(ranks)])
    for number, case in enumerate(launches):
        for rank, out in enumerate(case["outs"]):
            assert same(out, case["wanted"]), (number, rank)
    buffers.require_left_empty(num_launches)


def test_a_rank_that_does_not_come_is_named_and_nothing_waits_for_it_again() -> None:
    library = compile_peers(RANKS=2, LEAVES=1, WIDTH=WIDTH, GATHER=0, OUT_WIDTH=WIDTH,
                            OUT_TYPE="BF16")  # fmt: skip
    buffers, x = Buffers(2, SLOT_BYTES), torch.ones((3, WIDTH))
    out = torch.zeros((3, WIDTH), dtype=torch.bfloat16)
    for limit_ns in (10**8, 60 * 10**9):  # the second launch sees that rank 1 is lost
        launch(buffers, library, 0, x, out, {}, limit_ns)
    assert int(buffers.lost[0]) == 2 and not out.any()
    assert buffers.state[0].tolist() == [2 * TURN]


def test_the_host_ends_the_waiting() -> None:
    library = compile_peers(RANKS=2, LEAVES=1, WIDTH=WIDTH, GATHER=0, OUT_WIDTH=WIDTH,
                            OUT_TYPE="BF16")  # fmt: skip
    buffers, x = Buffers(2, SLOT_BYTES), torch.ones((1, WIDTH))
    out = torch.zeros((1, WIDTH), dtype=torch.bfloat16)
    threading.Timer(0.2, lambda: buffers.lost[0].fill_(-1)).start()
    run_ranks([lambda: launch(buffers, library, 0, x, out, {}, 60 * 10**9)])
    assert int(buffers.lost[0]) == -1 and not out.any()


NORM_LAUNCHES = 6


@pytest.mark.parametrize(
    ("hidden", "ranks", "leaves", "warps", "row_warps", "hops", "is_given", "is_fp8"),
    [
        (512, 2, 1, 1, 2, 1, 0, True),
        (512, 4, 2, 1, 2, 1, 0, False),
        (512, 2, 4, 2, 2, 2, 0, False),
        (512, 4, 1, 1, 2, 2, 0, True),
        (512, 4, 1, 2, 2, 1, 1, True),
        (512, 2, 1, 1, 1, 1, 1, True),  # as of rows of more than 8,192: every thread has two units
        (512, 8, 1, 1, 1, 2, 0, False),
        (768, 2, 1, 2, 2, 1, 0, False),  # half of the threads have one
    ],
)
def test_sums_are_normalized_where_they_arrive(
    hidden: int,
    ranks: int,
    leaves: int,
    warps: int,
    row_warps: int,
    hops: int,
    is_given: int,
    is_fp8: bool,
) -> None:
    """The residual stream bit for bit on every rank, the norm as another order of its sum allows.
    Two clusters have three rows or less. is_given: products hand their sums on, in turns."""
    macros = {"RANKS": ranks, "LEAVES": leaves, "HIDDEN": hidden, "WARPS": warps, "HOPS": hops}
    macros |= {"MODEL_TYPE": "BF16", "QUANTIZED": int(is_fp8), "ROW_WARPS": row_warps, "KEEPS": 0}
    libraries = [compile_peers(NORM, **macros, IS_GIVEN=i) for i in range(1 + is_given)]
    sizes = {"RANKS": ranks, "LEAVES": 1, "WIDTH": hidden, "EPILOGUE": 3}
    types = {"OUT_TYPE": "FP32", "MODEL_TYPE": "BF16"}
    product = compile_peers(PRODUCT, **sizes, **types) if is_given else None
    cluster, draw = row_warps // warps, random.Random(ranks + warps)
    buffers, launches = Buffers(ranks, 3 * hidden * 4), []
    for seed in range(NORM_LAUNCHES):
        generator, rows = torch.Generator().manual_seed(seed), draw.choice((1, 2, 3))
        parts = torch.randn((ranks, rows, leaves * hidden), generator=generator)
        given = {
            "residual": torch.randn((rows, hidden), generator=generator).bfloat16(),
            "norm_weight": torch.randn(hidden, generator=generator).bfloat16(),
        }
        if seed % 2:
            given["weight_scale"] = torch.rand(hidden, generator=generator) + 0.5
            given["x_scale"] = torch.tensor([0.75])
        if seed % 3 == 0:
            given["bias"] = torch.randn(hidden, generator=generator).bfloat16()
        given |= {"scale": torch.tensor([0.03])} if is_fp8 else {}
        dtype = torch.float8_e4m3fn if is_fp8 else torch.bfloat16
        outs = [
            {
                "out": torch.zeros((rows, hidden), dtype=dtype),
                "residual_out": torch.zeros_like(given["residual"]),
            }
            for _ in range(ranks + 1)
        ]
        reduce_and_normalize(list(parts), given, outs[ranks], EPSILON)
        launches.append((parts, given, outs))

    def body(rank: int) -> None:
        draw = random.Random(rank)
        for number, (parts, given, outs) in enumerate(launches):
            time.sleep(draw.choice((0, 0, 0.005)))
            x, is_pushed = parts[rank], bool(is_given and number % 3)
            if is_pushed:
                assert product is not None
                x = torch.zeros_like(x)
                buffers.call(product, rank, parts[rank], (1, 1), [pointer(x)], 30 * 10**9)
            clusters = min(2, parts.shape[1])
            arguments = optional(given, *AFTER, "residual", "norm_weight", "scale")
            arguments += [*optional(outs[rank], *NORMED), ctypes.c_float(EPSILON)]
            blocks = (clusters * cluster, cluster)
            buffers.call(libraries[is_pushed], rank, x, blocks, arguments, 30 * 10**9)

    run_ranks([lambda rank=rank: body(rank) for rank in range(ranks)])
    for number, (_, _, outs) in enumerate(launches):
        wanted = outs[ranks]
        for rank in range(ranks):
            assert same(outs[rank]["residual_out"], wanted["residual_out"]), (number, rank)
            assert same(outs[rank]["out"], outs[0]["out"]), (number, rank)
        pair, bound = (outs[0]["out"].float(), wanted["out"].float()), 2**-3 if is_fp8 else 2**-7
        torch.testing.assert_close(*pair, rtol=bound, atol=1e-3)
    buffers.require_left_empty(NORM_LAUNCHES)


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_owner_of_a_row_keeps_what_only_the_next_sum_reads(ranks: int) -> None:
    """Two sums in a row: the first hands no residual stream on, the second needs none."""
    hidden, rows, clusters = 256, 5, 2
    macros = {"RANKS": ranks, "LEAVES": 1, "HIDDEN": hidden, "WARPS": 1, "ROW_WARPS": 1, "HOPS": 2}
    macros |= {"MODEL_TYPE": "BF16", "QUANTIZED": 1, "IS_GIVEN": 0}
    libraries = [compile_peers(NORM, **macros, KEEPS=keeps) for keeps in (1, 0)]
    generator = torch.Generator().manual_seed(ranks)
    residual = torch.randn((rows, hidden), generator=generator).bfloat16()
    given = {
        "residual": residual,
        "norm_weight": torch.randn(hidden, generator=generator).bfloat16(),
        "scale": torch.tensor([0.03]),
    }
    parts = torch.randn((2, ranks, rows, hidden), generator=generator)

    def made() -> dict[str, torch.Tensor]:
        out = torch.zeros((rows, hidden), dtype=torch.float8_e4m3fn)
        return {"out": out, "residual_out": torch.full_like(residual, torch.nan)}

    wanted, outs = [made(), made()], [[made(), made()] for _ in range(ranks)]
    reduce_and_normalize(list(parts[0]), given, wanted[0], EPSILON)
    second = {**given, "residual": wanted[0]["residual_out"]}
    reduce_and_normalize(list(parts[1]), second, wanted[1], EPSILON)
    buffers = Buffers(ranks, rows * hidden * 4)

    def body(rank: int) -> None:
        stream = residual
        for library, x, own in zip(libraries, parts[:, rank], outs[rank], strict=True):
            arguments = optional({**given, "residual": stream}, *AFTER, "residual", "norm_weight")
            arguments += [pointer(given["scale"]), *optional(own, *NORMED)]
            arguments.append(ctypes.c_float(EPSILON))
            buffers.call(library, rank, x, (clusters, 1), arguments, 30 * 10**9)
            stream = own["residual_out"]

    run_ranks([lambda rank=rank: body(rank) for rank in range(ranks)])
    owners = torch.tensor([(row + row // clusters) % ranks for row in range(rows)])
    for rank, (kept, last) in enumerate(outs):
        mine = kept["residual_out"][owners == rank]
        assert same(mine, wanted[0]["residual_out"][owners == rank])
        assert kept["residual_out"][owners != rank].isnan().all(), "nobody hands it on"
        assert same(last["residual_out"], wanted[1]["residual_out"]), "the last one does"
        for own, theirs in ((kept, 0), (last, 1)):
            assert same(own["out"], outs[0][theirs]["out"]), "all ranks alike"
            pair = own["out"].float(), wanted[theirs]["out"].float()
            torch.testing.assert_close(*pair, rtol=2**-3, atol=1e-3)
    buffers.require_left_empty(2)


@pytest.fixture
def paused() -> str:
    """The source where rank 0 has given its numbers, and takes the others' long after they have
    what they wanted."""
    text = emulated_peers.as_cpp(EXCHANGE)
    given, pause = "count_launch(state);\n\n", "std::chrono::milliseconds(20)"
    assert text.count(given) == 1
    return text.replace(given, f"{given}if (rank == 0) std::this_thread::sleep_for({pause});\n")


def test_a_slow_rank_has_the_bits_of_the_reference(
    monkeypatch: pytest.MonkeyPatch, paused: str
) -> None:
    monkeypatch.setattr(emulated_peers, "as_cpp", lambda _: paused)
    require_bits(4, num_launches=9)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("begun / TURN & 1", "0"),  # a fast rank overwrites what a slow one still reads
        ("tree<0, RANKS>([&]", "tree<1, RANKS / 2>([&]"),
        ("slot(bases.of[r], rank) + at, words", "slot(bases.of[r], r) + at, words"),
        ("uint4{0, 0, 0, 0}", "words[r][i]"),  # numbers of two launches before are taken again
    ],
    ids=["halves", "order", "slots", "cleared"],
)
def test_the_emulation_would_see_a_mistake(
    monkeypatch: pytest.MonkeyPatch, paused: str, right: str, wrong: str
) -> None:
    assert right in paused
    monkeypatch.setattr(emulated_peers, "as_cpp", lambda _: paused.replace(right, wrong))
    with pytest.raises(AssertionError, match=r"\(\d+, \d+\)"):
        require_bits(4, num_launches=9, limit_ns=3 * 10**8)
