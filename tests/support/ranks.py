"""Shards of the weights of tensor-parallel engines, and programs of several ranks."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from llmctl.builder.engine_plan import EnginePlan
from llmctl.plugins.backends.cpu.ranks import Ranks, make_segment

COLUMNS = ("o_proj", "down_proj")


def require_whole(whole: EnginePlan, sharded: EnginePlan, rows: Mapping[str, tuple[int, ...]]):
    """The shards of all ranks are the weights of the engine of one rank, byte by byte. rows: of
    each part of a merged weight, in the whole model."""
    count, kv_heads = len(sharded.shards), sharded.shards[0].num_kv_heads
    assert set(sharded.sources) - {"lm_head.weight"} == set(whole.sources) - {"lm_head.weight"}
    for name, source in whole.sources.items():
        wanted = torch.cat(list(source.chunks(whole.checkpoint)))
        sliced = sharded.sources[name]
        parts = [torch.cat(list(sliced.chunks(shard))) for shard in sharded.shards]
        assert all(part.shape == sliced.shape for part in parts), name
        module, kind = name.split(".")[-2:] if "." in name else ("", name)
        if module in rows and kind in ("weight", "bias", "weight_scale"):
            owners = [_owners(module, index, count, kv_heads) for index in range(len(rows[module]))]
            sizes = [n // len(own) for n, own in zip(rows[module], owners, strict=True)]
            split = [part.split(sizes) for part in parts]
            found = torch.cat([split[r][i] for i, own in enumerate(owners) for r in own])
            for index, own in enumerate(owners):  # ranks that repeat a head have the same one
                for rank in range(count):
                    owner = own[rank * len(own) // count]
                    assert torch.equal(_bytes(split[rank][index]), _bytes(split[owner][index]))
        elif module in COLUMNS and kind == "weight":
            found = torch.cat(parts, dim=1)
        elif module == "lm_head" and kind in ("weight", "weight_scale") and count > 1:
            found = torch.cat(parts)[: len(wanted)]
            assert not torch.cat(parts)[len(wanted) :].float().any(), "padding is zero"
        else:
            found = parts[0]
            assert all(torch.equal(_bytes(part), _bytes(found)) for part in parts), name
        assert torch.equal(_bytes(found), _bytes(wanted)), name


def _owners(module: str, index: int, count: int, kv_heads: int) -> list[int]:
    """The ranks that have the parts of a merged weight, each part once."""
    parts = min(count, kv_heads) if module == "qkv_proj" and index else count
    return [part * count // parts for part in range(parts)]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


Body = Callable[[Ranks], Any]


def run_ranks(num_ranks: int, body: Body, limit_s: float = 60) -> list[Any]:
    """What body(ranks) returns in each of so many processes; they end with it."""
    (found,) = run_in_ranks([(num_ranks, body)], limit_s)
    return found


def run_in_ranks(cases: Sequence[tuple[int, Body]], limit_s: float = 60) -> list[list[Any]]:
    """The same of several cases, one after the other in the same processes, as many as the largest
    takes: to fork from a test worker and to end the fork takes 40 ms of CPU time and more."""
    context = multiprocessing.get_context("fork")
    segments = [make_segment(num_ranks) for num_ranks, _ in cases]
    size = max(num_ranks for num_ranks, _ in cases)
    pipes = [context.Pipe(duplex=False) for _ in range(size)]

    def run(rank: int) -> None:
        found = [
            body(Ranks(rank, num_ranks, segment, limit_s)) if rank < num_ranks else None
            for (num_ranks, body), segment in zip(cases, segments, strict=True)
        ]
        pipes[rank][1].send(found)

    processes = [context.Process(target=run, args=(rank,)) for rank in range(size)]
    for process in processes:
        process.start()
    try:
        by_rank = []
        for (receive, _), process in zip(pipes, processes, strict=True):
            assert receive.poll(120), f"process {process.pid} says nothing"
            by_rank.append(receive.recv())
    finally:
        for segment in segments:
            os.close(segment)
        for process in processes:
            process.join(30)
            process.kill()
    return [
        [by_rank[rank][index] for rank in range(num_ranks)]
        for index, (num_ranks, _) in enumerate(cases)
    ]
