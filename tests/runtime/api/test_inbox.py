"""What a worker that waits for requests gets, and what it leaves for later."""

from __future__ import annotations

import threading
from time import monotonic

from llmctl.runtime.api.inbox import Inbox
from llmctl.runtime.api.mailbox import Mailbox
from llmctl.runtime.request import Request

REQUEST = Request((1, 2, 3), 4)


def test_requests_are_there_as_soon_as_they_arrive():
    inbox = Inbox(Mailbox(), None)
    late = threading.Timer(0.01, inbox.put, [[REQUEST, REQUEST]])
    late.start()
    began = monotonic()
    arrived = inbox.arrivals(60.0)
    assert monotonic() - began < 30.0
    late.join()
    assert [tracked.request for tracked in arrived] == [REQUEST, REQUEST]
    assert inbox.num_queued == 2, "they have not started"
    assert inbox.arrivals(0.0) == []


def test_a_worker_that_waits_for_requests_is_not_woken_by_what_it_leaves_for_later():
    inbox = Inbox(Mailbox(), None)
    (number,) = inbox.put([REQUEST])
    assert len(inbox.arrivals(60.0)) == 1
    inbox.cancel(number)
    inbox.close()
    began = monotonic()
    assert inbox.arrivals(0.02) == []
    assert monotonic() - began >= 0.02
    update = inbox.receive(is_idle=True)
    assert update.arrived == [] and update.cancelled == {number} and update.is_closed
