"""Blocks moved between streams at random, and copies that fail."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.host_blocks import (
    OFFLOAD,
    ONBOARD,
    WITHIN,
    Device,
    content,
    empty_cache,
)
from support.kv import BLOCK, make_sequence

from llmctl.errors import DeviceFailure
from llmctl.runtime.engines.host_blocks import HostBlocks
from llmctl.runtime.kv_cache import BlockCopy, KvCacheManager


def perform(cache, slots, copy):
    """What a copy means, one after another."""
    source = slots[copy.src_block] if copy.kind is ONBOARD else cache[:, copy.src_block]
    if copy.kind is OFFLOAD:
        slots[copy.dst_block] = source.clone()
    else:
        cache[:, copy.dst_block] = source.clone()


@pytest.mark.parametrize("most", [2, 64])
@pytest.mark.parametrize("seed", range(150))
def test_any_copies_in_any_order_of_lanes_end_as_one_after_another(seed, most, monkeypatch):
    monkeypatch.setattr(HostBlocks.advance, "__defaults__", (most,))
    device = Device(seed)
    chance = np.random.default_rng([seed, 2])
    num_blocks, num_slots = int(chance.integers(3, 12)), int(chance.integers(2, 8))
    cache, host = empty_cache(num_blocks), device.host_blocks(num_slots)
    for block in range(num_blocks):
        cache[:, block] = content(block + 1)
    host._slots.zero_()
    wanted, slots = cache.clone(), host._slots.clone()
    for _ in range(int(chance.integers(1, 8))):
        copies = []
        for _ in range(int(chance.integers(1, 14))):
            kind = [OFFLOAD, ONBOARD, WITHIN][int(chance.choice(3, p=[0.45, 0.45, 0.1]))]
            numbers = [int(chance.integers(n)) for n in (num_blocks, num_slots, num_blocks)]
            block, slot, other = numbers
            if kind is WITHIN and block == other:
                continue
            ends = {OFFLOAD: (block, slot), ONBOARD: (slot, block), WITHIN: (block, other)}[kind]
            copies.append(BlockCopy(*ends, BLOCK, kind))
        host.copy(cache, copies)
        for copy in copies:
            perform(wanted, slots, copy)
        device.advance(int(chance.integers(0, 30)))
        host.advance(int(chance.integers(0, 9)))
    host.settle()
    device.finish()
    assert torch.equal(cache, wanted) and torch.equal(host._slots, slots)


def test_after_a_copy_that_failed_steps_wait_for_what_was_started():
    device = Device()
    cache, host = empty_cache(4), device.host_blocks(4)
    copies = [BlockCopy(0, 1, BLOCK, ONBOARD), BlockCopy(99, 2, BLOCK, WITHIN)]
    with pytest.raises(IndexError):
        host.copy(cache, copies)
    reached = []
    device.main.run(lambda: reached.append(True))
    while device.main.advance():
        pass
    assert not reached
    device.finish()
    assert reached


def test_an_error_of_the_device_is_named():
    device = Device()
    host = device.host_blocks(4)

    def broken():
        raise RuntimeError("the link is gone")

    device.inward.mark = lambda: SimpleNamespace(query=broken)
    arrival = host.copy(empty_cache(4), [BlockCopy(0, 1, BLOCK, ONBOARD)])
    with pytest.raises(DeviceFailure, match="bringing KV blocks from host memory: the link"):
        arrival.is_done()


class Traffic:
    """Sequences over a small cache; each block of theirs holds a number that follows from its
    tokens. Steps write new blocks and read all blocks of whom they run."""

    def __init__(self, seed):
        self.random = np.random.default_rng([seed, 1])
        self.device = Device(seed)
        self.kv_cache = KvCacheManager(12, BLOCK, num_host_blocks=10, onboards_aside=True)
        self.cache = empty_cache(12)
        self.host = self.device.host_blocks(10)
        self.running, self.arrivals = [], []
        self.num_reads = self.num_asides = 0

    def block_value(self, tokens, index):
        return hash(tuple(tokens[: (index + 1) * BLOCK])) % 251 + 1

    def arrive(self, number):
        stem = [int(self.random.integers(3))] * (BLOCK * int(self.random.integers(1, 6)))
        sequence = make_sequence(number, [*stem, 100 + number])
        match = self.kv_cache.lookup(sequence)
        wanted = self.kv_cache.num_blocks_for(len(sequence.tokens)) - match.num_blocks_in_use
        if wanted <= self.kv_cache.num_available_blocks:
            self.kv_cache.attach(sequence, match)
            self.running.append(sequence)

    def step(self):
        ready = [s for s in self.running if not self.kv_cache.is_arriving(s)]
        ready = [s for s in ready if self.kv_cache.reserve(s, len(s.tokens))]
        number = self.kv_cache.arrivals.hand_over()
        arrival = self.host.copy(self.cache, self.kv_cache.pending_copies())
        self.arrivals.append((number, arrival))
        if self.kv_cache.arrivals.take_wait():
            for _, item in self.arrivals:
                if item is not None:
                    item.hold()
        self.num_asides += arrival is not None
        for sequence in ready:
            self.compute(sequence, sequence.kv_len // BLOCK)
            sequence.kv_len = len(sequence.tokens) - 1
            self.kv_cache.publish(sequence)
        self.kv_cache.check_invariants()
        return ready

    def compute(self, sequence, first):
        """Write the blocks from `first` on, then read all that are full, and no part of one."""
        table, tokens = list(sequence.block_table), list(sequence.tokens)
        values = [self.block_value(tokens, index) for index in range(len(table))]

        def work():
            for index in range(first, len(table)):
                self.cache[:, table[index]] = content(values[index])
            for index in range((len(tokens) - 1) // BLOCK):
                assert (self.cache[:, table[index]] == values[index]).all(), "another's content"
                self.num_reads += 1

        self.device.main.run(work)

    def poll(self):
        while self.arrivals and (self.arrivals[0][1] is None or self.arrivals[0][1].is_done()):
            self.kv_cache.arrivals.note_arrived(self.arrivals.pop(0)[0])


@pytest.mark.parametrize("most", [1, 64])
@pytest.mark.parametrize("seed", range(40))
def test_random_traffic_reads_its_own_content_in_every_order(seed, most, monkeypatch):
    monkeypatch.setattr(HostBlocks.advance, "__defaults__", (most,))
    traffic = Traffic(seed)
    for number in range(120):
        traffic.arrive(number)
        ready = traffic.step()
        traffic.device.advance(int(traffic.random.integers(0, 40)))
        traffic.poll()
        for sequence in list(traffic.running):
            is_over = sequence in ready and traffic.random.random() < 0.6
            if is_over or traffic.random.random() < 0.05:
                traffic.kv_cache.release(sequence)
                traffic.running.remove(sequence)
    traffic.host.settle()
    traffic.device.finish()
    assert traffic.num_reads > 100 and traffic.num_asides >= 5
