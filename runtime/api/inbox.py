"""What callers send to the worker: new requests, cancellations, shutdown. Thread-safe."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Collection
from collections.abc import Sequence as Items
from dataclasses import dataclass
from time import monotonic

from llmctl.errors import BadConfig, ExecutorClosed, QueueFull
from llmctl.runtime.api.mailbox import Deliver, Mailbox
from llmctl.runtime.api.tracking import TrackedRequest
from llmctl.runtime.request import Request


@dataclass(frozen=True, slots=True)
class InboxUpdate:
    """What has arrived since the worker last looked."""

    arrived: list[TrackedRequest]
    cancelled: set[int]
    is_closed: bool
    drains: bool  # closed, but accepted requests are to be finished


class Inbox:
    """Passes requests to the worker. A request counts as queued until the worker says that it
    started or ended, so `max_queue_size` also limits those that wait in the scheduler."""

    def __init__(self, mailbox: Mailbox, max_queue_size: int | None) -> None:
        self._mailbox = mailbox
        self._max_queue_size = max_queue_size
        self._changed = threading.Condition()
        self._request_ids = itertools.count(1)
        self._arrived: list[TrackedRequest] = []
        self._cancelled: set[int] = set()
        self._num_queued = 0
        self._is_closed = False
        self._error: Exception | None = None
        self._drains = False

    @property
    def num_queued(self) -> int:
        """Requests that have not started."""
        return self._num_queued

    @property
    def is_closed(self) -> bool:
        """True once no more requests are accepted."""
        return self._is_closed

    def put(self, requests: Items[Request], deliver: Deliver | None = None) -> list[int]:
        """Queue all or none; returns the new ids. `deliver`: see Mailbox.open. Raises
        ExecutorClosed or QueueFull, and BadConfig for what is no Request."""
        if isinstance(requests, Request) or not isinstance(requests, Collection):
            raise BadConfig(
                f"{requests!r:.80} ({type(requests).__name__}) is no list of requests",
                fix="enqueue_request takes one, enqueue_requests a list of them",
            )
        for request in requests:
            if not isinstance(request, Request):
                raise BadConfig(
                    f"{request!r:.80} ({type(request).__name__}) is no Request",
                    fix="Request(input_token_ids, max_tokens, ...)",
                )
        limit = self._max_queue_size
        now_s = monotonic()
        with self._changed:
            if self._is_closed:
                raise _closed(self._error) from self._error
            if limit is not None and self._num_queued + len(requests) > limit:
                raise QueueFull(
                    f"{self._num_queued} requests are queued and {len(requests)} more exceed "
                    f"max_queue_size {limit}",
                    fix="try again later, or raise max_queue_size",
                )
            tracked = [TrackedRequest(next(self._request_ids), r, now_s) for r in requests]
            ids = [item.request_id for item in tracked]
            self._mailbox.open(ids, deliver, self.cancel)
            self._arrived += tracked
            self._num_queued += len(tracked)
            self._changed.notify()
        return ids

    def cancel(self, request_id: int) -> None:
        """Pass a cancellation to the worker."""
        with self._changed:
            self._cancelled.add(request_id)
            self._changed.notify()

    def close(self, *, drain: bool = False, error: Exception | None = None) -> None:
        """Accept nothing more, and tell the worker to finish the accepted requests or to cancel
        them. error: what ended the worker, of which later requests are told."""
        with self._changed:
            self._error = self._error or error
            self._is_closed = True
            self._drains = drain
            self._changed.notify()

    def leave_to_parent(self) -> None:
        """In a process that was forked: its worker is another process's. Whoever held the lock
        when it was forked is not there to let it go."""
        self._changed = threading.Condition()
        self._is_closed = True
        self._mailbox.leave_to_parent()
        self._error = ExecutorClosed("this process was forked from the one that it runs in")

    def leave_queue(self, num_requests: int) -> None:
        """The worker has started or ended so many queued requests."""
        with self._changed:
            self._num_queued -= num_requests

    def stays_empty(self, seconds: float) -> bool:
        """Whether nothing arrives within so many seconds."""
        with self._changed:
            return not self._changed.wait_for(self._has_news, seconds)

    def arrivals(self, seconds: float) -> list[TrackedRequest]:
        """New requests alone, as soon as there are any within so many seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self._arrived, seconds)
            arrived, self._arrived = self._arrived, []
        return arrived

    def receive(self, is_idle: bool) -> InboxUpdate:
        """Everything new; if `is_idle`, waits until there is something."""
        with self._changed:
            while is_idle and not self._has_news():
                self._changed.wait()
            update = InboxUpdate(self._arrived, self._cancelled, self._is_closed, self._drains)
            self._arrived, self._cancelled = [], set()
        return update

    def _has_news(self) -> bool:
        return bool(self._arrived or self._cancelled or self._is_closed)


def _closed(error: Exception | None) -> ExecutorClosed:
    if error is None:
        return ExecutorClosed("the executor has been shut down")
    if isinstance(error, ExecutorClosed):
        return ExecutorClosed(
            f"the executor does not answer here: {error}",
            fix="open the engine after forking, in the process that uses it",
        )
    return ExecutorClosed(f"the executor has ended: {type(error).__name__}: {error}")
