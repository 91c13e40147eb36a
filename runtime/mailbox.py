"""Where finished responses wait for their readers. Thread-safe, no polling."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from time import monotonic

from llmctl.errors import RequestError
from llmctl.runtime.core import Response

Deliver = Callable[[Response], None]


class Mailbox:
    """Responses by request. A request is open from `open` until its final response is taken."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._ready: dict[int, list[Response]] = {}
        self._open: set[int] = set()
        self._deliver: dict[int, Deliver] = {}
        self._is_closed = False

    def open(self, request_ids: Iterable[int], deliver: Deliver | None = None) -> None:
        """Announce requests, before anything can be posted for them. `deliver` gets their
        responses instead of this mailbox, on the thread that posts: it must not block or raise."""
        with self._changed:
            self._open.update(request_ids)
            if deliver is not None:
                self._deliver.update(dict.fromkeys(request_ids, deliver))

    def post(self, responses: Items[Response]) -> None:
        """Deliver; wakes every reader."""
        with self._changed:
            for response in responses:
                request_id = response.request_id
                assert request_id in self._open, "a response after the final one"
                deliver = self._deliver.get(request_id)
                if deliver is None:
                    self._ready.setdefault(request_id, []).append(response)
                    continue
                deliver(response)
                if is_final(response):
                    self._open.discard(request_id)
                    del self._deliver[request_id]
            self._changed.notify_all()

    def close(self) -> None:
        """Nothing more will be posted; readers of any request stop waiting."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def take_any(self, timeout_s: float | None) -> list[Response]:
        """All ready responses; waits for at least one. Empty after the timeout or `close`."""
        with self._changed:
            self._wait(lambda: bool(self._ready) or self._is_closed, timeout_s)
            return [r for request_id in list(self._ready) for r in self._take(request_id)]

    def take(self, request_id: int, timeout_s: float | None) -> list[Response]:
        """The ready responses of one request; waits for at least one, empty after the timeout.

        An id that is unknown, or whose final response was taken, gives one error response.
        """
        with self._changed:
            self._wait(lambda: request_id in self._ready or request_id not in self._open, timeout_s)
            if request_id in self._open:
                return self._take(request_id)
        ended = RequestError(
            f"request {request_id} is not known: it was never enqueued, "
            "or it was already processed and terminated"
        )
        return [Response(request_id, error=ended)]

    def take_each(self, request_ids: Items[int], timeout_s: float | None) -> list[list[Response]]:
        """`take` for each id, in order, within one timeout for all."""
        deadline = None if timeout_s is None else monotonic() + timeout_s
        taken = []
        for request_id in request_ids:
            left = None if deadline is None else max(0.0, deadline - monotonic())
            taken.append(self.take(request_id, left))
        return taken

    def count(self, request_id: int | None = None) -> int:
        """Responses ready now, of one request or of all."""
        with self._changed:
            if request_id is not None:
                return len(self._ready.get(request_id, ()))
            return sum(map(len, self._ready.values()))

    def _wait(self, is_due: Callable[[], bool], timeout_s: float | None) -> None:
        self._changed.wait_for(is_due, timeout_s)

    def _take(self, request_id: int) -> list[Response]:
        responses = self._ready.pop(request_id, [])
        if responses and is_final(responses[-1]):
            self._open.discard(request_id)
            self._changed.notify_all()  # other readers of this request wait in vain
        return responses


def is_final(response: Response) -> bool:
    """True for the last response of a request: an error, or the final result."""
    return response.result is None or response.result.is_final
