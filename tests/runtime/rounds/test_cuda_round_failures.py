"""Failures of device rounds: which requests end, and by which name."""

from __future__ import annotations

import pytest
import torch
from support.cuda_rounds import (
    make_request,
)

from llmctl.errors import DeviceFailure, OutOfMemory
from llmctl.plugins.backends.cuda.queue import HostEvent
from llmctl.runtime.api.executor import Executor
from llmctl.runtime.request import Request

BROKEN = "CUDA error: an illegal memory access was encountered"


def first_error(executor: Executor, request: Request) -> Exception:
    """The error that ends a request, whatever it had produced before."""
    number = executor.enqueue_request(request)
    while True:
        for response in executor.await_responses(number, timeout_s=60):
            if response.error is not None:
                return response.error
            assert response.result is not None and not response.result.is_final


@pytest.mark.parametrize(
    ("raised", "wanted"),
    [
        (DeviceFailure("the driver refused a launch", fix="start again"), DeviceFailure),
        (RuntimeError(BROKEN), DeviceFailure),
        (torch.OutOfMemoryError("CUDA out of memory"), OutOfMemory),
    ],
    ids=["driver", "torch", "memory"],
)
def test_a_launch_that_fails_ends_its_requests_by_name_and_no_others(fake, device, raised, wanted):
    with device.executor() as executor:
        device.target.program.fail = raised
        error = first_error(executor, make_request(streaming=True))
        assert isinstance(error, wanted) and error.fix and str(raised).splitlines()[0] in str(error)
        device.target.program.fail = None
        number = executor.enqueue_request(make_request())
        (response,) = executor.await_responses(number, timeout_s=60)
        tokens = tuple(fake.plain_answer(fake.Engine(), make_request())[0])
        assert response.result is not None and response.result.output_token_ids == tokens
        assert executor.get_latest_iteration_stats()[-1].kv_cache_stats.used_num_blocks == 0


class LostEvent(HostEvent):
    """What every wait says after a kernel failed."""

    def synchronize(self) -> None:
        raise RuntimeError(f"{BROKEN}\nCUDA kernel errors might be asynchronously reported")


def test_a_lost_device_ends_all_requests_by_name_and_the_executor_closes(device, monkeypatch):
    with device.executor() as executor:
        monkeypatch.setattr(device.queue, "make_event", LostEvent)
        numbers = executor.enqueue_requests([make_request(i, streaming=True) for i in range(3)])
        waiting = set(numbers)
        while waiting:
            for response in executor.await_responses(timeout_s=60):
                if response.error is None:
                    continue
                assert isinstance(response.error, DeviceFailure)
                assert BROKEN in str(response.error) and "\n" not in str(response.error)
                waiting.remove(response.request_id)

        def lost() -> None:
            raise DeviceFailure(BROKEN)

        monkeypatch.setattr(device.queue, "synchronize", lost)  # not even that works any more
        assert isinstance(first_error(executor, make_request(streaming=True)), DeviceFailure)
    assert not executor.can_enqueue_requests()


def test_a_round_that_fails_while_another_is_in_flight_drops_both(fake, device):
    harness = fake.Harness(device.target, device.drafter, draft=device.draft, runner=device.runner)
    sequence = harness.add(make_request(max_tokens=30))
    for _ in range(3):
        harness.step()
    device.target.program.fail = RuntimeError(BROKEN)
    # Replays do not launch one by one: the next shape does.
    harness.add(make_request(1))
    with pytest.raises(DeviceFailure, match="illegal memory access"):
        harness.run()
    assert not harness.rounds.has_result
    device.target.program.fail = None
    for victim in list(harness.scheduler.active):
        harness.cancel(victim)
    assert harness.kv_cache.stats().used_num_blocks == 0
    again = harness.add(make_request(max_tokens=30))
    harness.run()
    assert again.tokens == sequence.tokens[:3] + fake.plain_answer(fake.Engine(), again.request)[0]
