"""Processes of ranks with a GPU each, where there are as many, else on one in turns; each launches
what ranks exchange."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

from llmctl.plugins.backends.cuda.compiler import compile_kernel
from llmctl.plugins.backends.cuda.driver import cuda_driver
from llmctl.plugins.backends.cuda.kernel_spec import (
    DeviceStep,
    Launch,
    LaunchEnv,
    Peers,
    StepLimits,
    StepShape,
    step_shapes,
)
from llmctl.plugins.backends.cuda.peers import PeerMemory
from llmctl.plugins.core.calls import OpCall
from llmctl.plugins.core.operators import operator_module
from llmctl.plugins.ops.rank_argmax import kernel as rank_argmax
from llmctl.plugins.ops.rank_draw import kernel as rank_draw
from llmctl.plugins.ops.rank_offers import kernel as rank_offers
from llmctl.plugins.ops.sampling import kernel as sampling
from llmctl.plugins.ops.sampling.arrays import DrawnRows, SamplingArrays, SamplingScratch

DRAWN_AT = 0.8  # the temperature; seed and position of a row are its number
Draws = tuple[torch.Tensor, SamplingScratch, DrawnRows]
START_S = 150.0  # that processes have to import, and to say what they found


class ExchangingRank:
    """One process's end: its kernels meet those of the others."""

    def __init__(
        self, rank: int, ranks: int, pipe: Connection, slot_bytes: int, limit_s: float
    ) -> None:
        index = rank % torch.cuda.device_count()
        torch.cuda.set_device(index)
        self.rank, self.ranks, self.device = rank, ranks, torch.device("cuda", index)
        self._driver = cuda_driver(index)
        memory = PeerMemory(rank, ranks, slot_bytes, self._driver)
        pipe.send(memory.handle)
        self.peers: Peers = memory.join(pipe.recv(), self.device, limit_s)

    def prepare(self, call: OpCall, rows: int) -> Callable[[int], None]:
        """What is launched for the first rows, to be called with a stream."""
        limits = StepLimits(rows, rows, 1, rows, 0, 32, "bfloat16")
        sizes = step_shapes(limits).items()
        step = DeviceStep(**{name: torch.zeros(size, dtype=torch.int32) for name, size in sizes})
        env = LaunchEnv(step, torch.zeros(1), limits, "tokens", _no_scratch, peers=self.peers)
        shape = StepShape(rows, 1, rows, rows, rows)
        if "best" in call.outputs:  # of the logits that the call would gather
            launches = [rank_argmax.launch(call, env, call.outputs["best"], rows)]
        elif "listed" in call.outputs:  # as what a beam search reads
            launches = [self._listing(call, rows)]
        elif "drawn" in call.outputs:
            launches = rank_draw.launches(call, self.peers, *self._drawing(call, "drawn", rows))
        else:
            launches = operator_module(call.op, "kernel").launches(call, env, shape)
        if "drawn_here" in call.outputs:  # from what was gathered
            given = call.outputs["out"], *self._drawing(call, "drawn_here", rows)
            launches += sampling.sample(*given, has_wide=False)
        prepared = []
        for launch in launches:
            loaded = self._driver.load(compile_kernel(launch.spec))
            prepared.append(self._driver.prepare(loaded, launch.grid, launch.arguments, True))

        def run(stream: int, tensors: object = launches) -> None:  # which must outlive them
            for each in prepared:
                each(stream)

        return run

    def _listing(self, call: OpCall, rows: int) -> Launch:
        """The likeliest ids of each chunk, as many as there is room for."""
        x, keys = call.inputs["x"], call.outputs["listed"]
        logits = rank_offers.SharedLogits.of([x], call.outputs["out"].shape[1], self.ranks)
        given = (keys.view(1, -1), call.outputs["sums"], rows, keys.shape[2])
        return rank_offers.launch(logits, self.peers, *given)

    def _drawing(self, call: OpCall, role: str, rows: int) -> Draws:
        """Where tokens go, and how: every row is a request of its own, without filters."""
        arrays = SamplingArrays.allocate(rows, self.device)
        arrays.greedy.zero_()
        arrays.temperature.fill_(DRAWN_AT)
        arrays.seed_low.copy_(torch.arange(rows))
        vocab = call.outputs["out"].shape[1]
        scratch = SamplingScratch.allocate(rows, vocab, self.device)
        return call.outputs[role], scratch, DrawnRows(rows, arrays, arrays.seed_low)


def run_ranks(ranks: int, body: Callable[..., None], *arguments: Any) -> list[Any]:
    """What each process sends after handles were exchanged. body(rank, ranks, pipe, *arguments)
    makes an ExchangingRank, sends one object, and may wait for one."""
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(ranks)]
    processes = [
        context.Process(target=body, args=(rank, ranks, pipes[rank][1], *arguments), daemon=True)
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    try:
        handles = [_receive(own) for own, _ in pipes]
        for own, _ in pipes:
            own.send(handles)
        found = [_receive(own) for own, _ in pipes]
        for own, _ in pipes:
            own.send("end")
        return found
    finally:
        for process in processes:
            process.join(10)
            process.kill()


def _receive(own: Connection) -> Any:
    if not own.poll(START_S):
        raise TimeoutError(f"a rank has said nothing for {START_S:g} s")
    return own.recv()


def _no_scratch(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    raise AssertionError(f"exchanges need no scratch; {name} {shape} {dtype} was asked for")
