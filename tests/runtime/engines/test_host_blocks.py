"""Blocks move between streams in an order that leaves no step with another's content."""

from __future__ import annotations

from support.host_blocks import (
    OFFLOAD,
    ONBOARD,
    Device,
    content,
    empty_cache,
)
from support.kv import BLOCK

from llmctl.runtime.engines.host_blocks import MOST_AT_ONCE, NUM_BUFFERS
from llmctl.runtime.kv_cache import BlockCopy


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
