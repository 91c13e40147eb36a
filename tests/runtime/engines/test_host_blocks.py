"""Blocks move between streams in an order that leaves no step with another's content.

The streams here run their work in any order that their marks allow, so whatever is not ordered goes
wrong sooner or later.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.kv import BLOCK, make_sequence

from llmctl.errors import DeviceFailure
from llmctl.plugins.backends.cuda.queue import DeviceQueue
from llmctl.runtime.engines.host_blocks import MOST_AT_ONCE, NUM_BUFFERS, HostBlocks
from llmctl.runtime.kv_cache import BlockCopy, CopyKind, KvCacheManager

LAYERS, LAYER_BYTES = 2, 8
OFFLOAD, ONBOARD, WITHIN = CopyKind.OFFLOAD, CopyKind.ONBOARD, CopyKind.WITHIN


class Mark:
    def __init__(self):
        self.is_passed = False

    def query(self):
        return self.is_passed


class Stream:
    """Work that has been given, and has not been done."""

    def __init__(self, device):
        self.device = device
        self.waiting = []
        device.streams.append(self)

    def run(self, work):
        self.waiting.append(work)

    def mark(self):
        mark = Mark()
        self.waiting.append(mark)
        return mark

    def wait(self, mark):
        self.waiting.append((mark,))

    def advance(self):
        """Do the next piece of work; False where there is none or it has to wait."""
        if not self.waiting:
            return False
        item = self.waiting[0]
        if isinstance(item, tuple):
            if not item[0].is_passed:
                return False
        elif isinstance(item, Mark):
            item.is_passed = True
        else:
            item()
        self.waiting.pop(0)
        return True


class Device:
    """Lanes that run by lot; `favour` them unequally."""

    def __init__(self, seed=0):
        self.random = np.random.default_rng(seed)
        self.streams = []
        self.main, self.out, self.inward = (Stream(self) for _ in range(3))
        self.favour = self.random.dirichlet([0.5] * 3)

    def advance(self, count):
        for _ in range(count):
            self.streams[self.random.choice(3, p=self.favour)].advance()

    def finish(self):
        while sum(stream.advance() for stream in self.streams):
            pass
        assert not any(stream.waiting for stream in self.streams), "streams wait for each other"

    def host_blocks(self, num_blocks):
        streams = (self.main, self.out, self.inward)
        return HostBlocks(DeviceQueue("cpu"), num_blocks, LAYERS, LAYER_BYTES, streams)


def content(value):
    return torch.full((LAYERS, LAYER_BYTES), value, dtype=torch.uint8)


def empty_cache(num_blocks):
    return torch.zeros((LAYERS, num_blocks, LAYER_BYTES), dtype=torch.uint8)


def test_a_step_overwrites_a_block_that_is_still_leaving():
    device = Device()
    cache, host = empty_cache(4), device.host_blocks(4)
    cache[:, 1] = content(7)
    assert host.copy(cache, [BlockCopy(1, 0, BLOCK, OFFLOAD)]) is None
    device.main.run(lambda: cache[:, 1].fill_(9))
    while device.main.advance():
        pass
    assert (cache[:, 1] == 9).all(), "the step did not wait for the link"
    device.finish()
    arrival = host.copy(cache, [BlockCopy(0, 2, BLOCK, ONBOARD)])
    device.finish()
    assert arrival.is_done() and (cache[:, 2] == 7).all()


def test_steps_go_on_while_blocks_come_in_and_one_may_wait_for_them():
    device = Device()
    cache, host, seen = empty_cache(8), device.host_blocks(8), []
    cache[:, 0] = content(5)
    host.copy(cache, [BlockCopy(0, 3, BLOCK, OFFLOAD)])
    device.finish()
    arrival = host.copy(cache, [BlockCopy(3, 6, BLOCK, ONBOARD)])
    device.main.run(lambda: seen.append("a step"))
    arrival.hold()
    device.main.run(lambda: seen.append(int(cache[0, 6, 0])))
    while device.main.advance():
        pass
    assert seen == ["a step"] and not arrival.is_done()
    device.finish()
    assert seen == ["a step", 5] and arrival.is_done()


def test_only_when_no_buffer_is_left_does_a_step_wait_for_the_link():
    device = Device()
    cache, host, done = empty_cache(20), device.host_blocks(20), []
    for block in range(NUM_BUFFERS + 1):
        host.copy(cache, [BlockCopy(block, block, BLOCK, OFFLOAD)])
        device.main.run(lambda block=block: done.append(block))
    while device.main.advance():
        pass
    assert done == list(range(NUM_BUFFERS))
    device.finish()
    assert len(done) == NUM_BUFFERS + 1


def test_the_host_starts_no_more_than_so_many_blocks_a_step():
    device = Device()
    count = 2 * MOST_AT_ONCE + 10
    cache, host = empty_cache(count), device.host_blocks(count)
    for slot in range(count):
        host._slots[slot] = content(slot % 200)
    arrival = host.copy(cache, [BlockCopy(n, n, BLOCK, ONBOARD) for n in range(count)])
    num_asked = 0
    while not arrival.is_done():
        device.finish()
        num_asked += 1
        brought = sum(bool((cache[:, n] == n % 200).all()) for n in range(1, count)) + 1
        assert brought in (count, num_asked * MOST_AT_ONCE, (num_asked + 1) * MOST_AT_ONCE)
    assert num_asked == 2 and brought == count


def test_a_step_that_cannot_wait_has_all_started():
    device = Device()
    count, seen = MOST_AT_ONCE + 10, []
    cache, host = empty_cache(count), device.host_blocks(count)
    host._slots[count - 1] = content(9)
    arrival = host.copy(cache, [BlockCopy(n, n, BLOCK, ONBOARD) for n in range(count)])
    arrival.hold()
    device.main.run(lambda: seen.append(int(cache[0, count - 1, 0])))
    device.finish()
    assert seen == [9]


def test_a_place_in_host_memory_is_not_overwritten_while_it_is_read():
    device = Device()
    cache, host = empty_cache(4), device.host_blocks(4)
    cache[:, 0], cache[:, 1] = content(5), content(6)
    host.copy(cache, [BlockCopy(0, 2, BLOCK, OFFLOAD)])
    device.finish()
    host.copy(cache, [BlockCopy(2, 3, BLOCK, ONBOARD)])
    host.copy(cache, [BlockCopy(1, 2, BLOCK, OFFLOAD)])
    while device.main.advance() or device.out.advance():
        pass
    device.finish()
    assert (cache[:, 3] == 5).all()


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
