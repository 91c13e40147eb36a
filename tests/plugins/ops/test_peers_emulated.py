"""What ranks with a GPU each exchange, by the kernel's own source on a CPU: the bits of the
references on every rank, launch after launch, whatever the ranks' speeds."""

from __future__ import annotations

import ctypes
import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from support import emulated_peers
from support.emulated_peers import MAX_BLOCKS, THREADS, compile_peers

from llmctl.plugins.ops.all_gather.reference import gather_ranks
from llmctl.plugins.ops.all_reduce.reference import reduce_ranks

WIDTH, OWN, MOST_ROWS = 48, 32, 7
LAUNCHES = 24
AFTER = ("weight_scale", "x_scale", "bias")


class Buffers:
    """What all ranks map, and what each has for itself."""

    def __init__(self, ranks: int) -> None:
        self.slot_bytes = MOST_ROWS * WIDTH * 4
        flags = 2 * ranks * MAX_BLOCKS * 4
        each = flags + 2 * ranks * self.slot_bytes
        self.shared = [torch.zeros(each // 4, dtype=torch.int32) for _ in range(ranks)]
        self.bases = torch.tensor([own.data_ptr() for own in self.shared])
        self.state = [torch.zeros(2, dtype=torch.int32) for _ in range(ranks)]
        self.lost = [torch.zeros(1, dtype=torch.int32) for _ in range(ranks)]

    def launch(self, library: ctypes.CDLL, rank: int, x: torch.Tensor, out: torch.Tensor,
               after: dict[str, torch.Tensor], limit_ns: int) -> None:  # fmt: skip
        grid = min(-(-(x.numel() // 4) // THREADS), MAX_BLOCKS)
        optional = [after[role].data_ptr() if role in after else None for role in AFTER]
        pointers = [self.bases.data_ptr(), self.state[rank].data_ptr(), self.lost[rank].data_ptr()]
        pointers += [x.data_ptr(), *optional, out.data_ptr()]
        library.launch(
            grid,
            *map(ctypes.c_void_p, pointers),
            *(rank, len(x), ctypes.c_longlong(self.slot_bytes), ctypes.c_longlong(limit_ns)),
        )


def cases(ranks: int, has_gather: bool) -> list[dict[str, Any]]:
    """Launches that follow one another: of all sizes, with and without what ends a product."""
    draw, made = random.Random(ranks), []
    for seed in range(LAUNCHES):
        generator = torch.Generator().manual_seed(seed)
        rows = draw.choice((1, 1, 2, 3, MOST_ROWS))
        is_gather = has_gather and seed % 3 == 2
        parts = torch.randn((ranks, rows, OWN if is_gather else WIDTH), generator=generator)
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


def run_ranks(bodies: list[Any]) -> None:
    threads = [threading.Thread(target=body, daemon=True) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads), "ranks wait for each other"


@pytest.mark.parametrize(("ranks", "has_gather"), [(2, True), (4, True), (8, False)])
def test_every_rank_has_the_bits_of_the_reference(
    tmp_path: Path, ranks: int, has_gather: bool
) -> None:
    require_bits(tmp_path, ranks, has_gather)


def require_bits(
    tmp_path: Path, ranks: int, has_gather: bool = False, limit_ns: int = 30 * 10**9
) -> None:
    """Ranks wait a random time before a launch, so each is the last one sometimes."""
    kinds = {False: ("BF16", WIDTH, WIDTH), True: ("FP32", OWN, ranks * OWN - 13)}
    libraries = {
        gather: compile_peers(tmp_path, RANKS=ranks, WIDTH=width, GATHER=int(gather),
                              OUT_WIDTH=out_width, OUT_TYPE=out)
        for gather, (out, width, out_width) in kinds.items() if has_gather or not gather
    }  # fmt: skip
    buffers, launches = Buffers(ranks), cases(ranks, has_gather)

    def body(rank: int) -> None:
        draw = random.Random(rank)
        for case in launches:
            time.sleep(draw.choice((0, 0, 0.002, 0.006)))
            x, out = case["parts"][rank], case["outs"][rank]
            buffers.launch(libraries[case["gather"]], rank, x, out, case["after"], limit_ns)

    run_ranks([lambda rank=rank: body(rank) for rank in range(ranks)])
    for number, case in enumerate(launches):
        for rank, out in enumerate(case["outs"]):
            found, wanted = (each.view(torch.uint8) for each in (out, case["wanted"]))
            assert torch.equal(found, wanted), (number, rank)
    assert [state.tolist() for state in buffers.state] == [[LAUNCHES, 0]] * ranks
    assert not any(int(lost) for lost in buffers.lost)


def test_a_rank_that_does_not_come_is_named_and_nothing_waits_for_it_again(tmp_path: Path) -> None:
    library = compile_peers(tmp_path, RANKS=2, WIDTH=WIDTH, GATHER=0, OUT_WIDTH=WIDTH,
                            OUT_TYPE="BF16")  # fmt: skip
    buffers, x = Buffers(2), torch.ones((3, WIDTH))
    out = torch.zeros((3, WIDTH), dtype=torch.bfloat16)
    for limit_ns in (10**8, 60 * 10**9):  # the second launch sees that rank 1 is lost
        buffers.launch(library, 0, x, out, {}, limit_ns)
    assert int(buffers.lost[0]) == 2 and not out.any()
    assert buffers.state[0].tolist() == [2, 0]


def test_the_host_ends_the_waiting(tmp_path: Path) -> None:
    library = compile_peers(tmp_path, RANKS=2, WIDTH=WIDTH, GATHER=0, OUT_WIDTH=WIDTH,
                            OUT_TYPE="BF16")  # fmt: skip
    buffers, x = Buffers(2), torch.ones((1, WIDTH))
    out = torch.zeros((1, WIDTH), dtype=torch.bfloat16)
    threading.Timer(0.2, lambda: buffers.lost[0].fill_(-1)).start()
    run_ranks([lambda: buffers.launch(library, 0, x, out, {}, 60 * 10**9)])
    assert int(buffers.lost[0]) == -1 and not out.any()


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("half = epoch & 1", "half = 0"),  # a fast rank overwrites what a slow one still reads
        ("tree<0, RANKS>(part)", "tree<1, RANKS / 2>(part)"),
        ("half, rank, slot_bytes)[i] = value", "half, r, slot_bytes)[i] = value"),
    ],
    ids=["halves", "order", "slots"],
)
def test_the_emulation_would_see_a_mistake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, right: str, wrong: str
) -> None:
    text = emulated_peers.as_cpp()
    assert right in text
    monkeypatch.setattr(emulated_peers, "as_cpp", lambda: text.replace(right, wrong))
    with pytest.raises(AssertionError, match=r"\(\d+, \d+\)"):
        require_bits(tmp_path, 4, limit_ns=10**9)
