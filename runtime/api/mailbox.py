"""Where finished responses wait for their readers. Thread-safe, no polling."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from contextlib import suppress
from time import monotonic

from llmctl.errors import RequestError
from llmctl.runtime.response import Response

Deliver = Callable[[Response], None]
_Receiver = tuple[Deliver, Callable[[int], None]]  # and what cancels the request if it raises


_NOBODY: _Receiver = (lambda response: None, lambda request_id: None)


class _Waiters(threading.Condition):
    """The readers that wait for one request, all with the mailbox's lock: a step that answers one
    of many requests does not wake the readers of all."""

    def __init__(self, lock: threading.Lock) -> None:
        super().__init__(lock)
        self.num_waiting = 0


class Mailbox:
    """Responses by request. A request is open from `open` until its final response is taken."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiters: dict[int | None, _Waiters] = {}  # by the request waited for; None: any
        self._ready: dict[int, list[Response]] = {}
        self._open: set[int] = set()
        self._deliver: dict[int, _Receiver] = {}
        self._is_closed = False

    def open(
        self,
        request_ids: Iterable[int],
        deliver: Deliver | None = None,
        cancel: Callable[[int], None] = lambda request_id: None,
    ) -> None:
        """Announce requests, before anything can be posted for them. `deliver` receives their
        responses instead of this mailbox, on the thread that posts: it must not block. It may call
        the executor, for new requests or to cancel. A request whose `deliver` raises is passed to
        `cancel` and gets nothing more; the exception goes to threading.excepthook."""
        with self._lock:
            self._open.update(request_ids)
            if deliver is not None:
                self._deliver.update(dict.fromkeys(request_ids, (deliver, cancel)))

    def post(self, responses: Items[Response]) -> bool:
        """Deliver responses; wakes each reader of any of them once. True if there was a reader, or
        a `deliver` to call: not if all are left for readers to come."""
        is_told = False
        calls: list[Response] = []
        receivers: dict[int, _Receiver] = {}
        with self._lock:
            for response in responses:
                request_id = response.request_id
                assert request_id in self._open, "a response after the final one"
                receiver = self._deliver.get(request_id)
                if receiver is None:
                    ready = self._ready.get(request_id)
                    if ready is None:
                        self._ready[request_id] = [response]
                    else:
                        ready.append(response)
                    continue
                receivers[request_id] = receiver
                calls.append(response)
                if is_final(response):
                    self._open.discard(request_id)
                    del self._deliver[request_id]
            if self._waiters:
                is_told = self._notify({None, *(response.request_id for response in responses)})
        for response in calls:  # not under the lock: the callables may open requests
            request_id = response.request_id
            deliver, cancel = receivers[request_id]
            try:
                deliver(response)
            except BaseException as error:  # it must not end any other request
                receivers[request_id] = _NOBODY
                with self._lock:
                    if request_id in self._deliver:
                        self._deliver[request_id] = _NOBODY
                cancel(request_id)
                thread = threading.current_thread()
                told = threading.ExceptHookArgs((type(error), error, error.__traceback__, thread))
                with suppress(Exception):  # there is no one to report an error of the hook to
                    threading.excepthook(told)
        return is_told or bool(calls)

    def close(self) -> None:
        """Nothing more will be posted; all readers stop waiting."""
        with self._lock:
            self._is_closed = True
            self._notify(set(self._waiters))

    def leave_to_parent(self) -> None:
        """In a process that was forked: responses come to the other process. Requests are unknown
        here, and nobody waits for them."""
        self._lock = threading.Lock()
        self._waiters, self._ready, self._deliver = {}, {}, {}
        self._open = set()
        self._is_closed = True

    def take_any(self, timeout_s: float | None) -> list[Response]:
        """All ready responses; waits for at least one. Empty after the timeout or `close`."""
        with self._lock:
            self._wait(None, lambda: bool(self._ready) or self._is_closed, timeout_s)
            return [r for request_id in list(self._ready) for r in self._take(request_id)]

    def take(self, request_id: int, timeout_s: float | None) -> list[Response]:
        """The ready responses of one request; waits for at least one, empty after the timeout or
        `close`.

        An id that is unknown, or whose final response was taken, gives one error response.
        """

        def is_due() -> bool:
            is_over = request_id not in self._open or self._is_closed
            return is_over or request_id in self._ready

        with self._lock:
            self._wait(request_id, is_due, timeout_s)
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
        with self._lock:
            if request_id is not None:
                return len(self._ready.get(request_id, ()))
            return sum(map(len, self._ready.values()))

    def _wait(
        self, request_id: int | None, is_due: Callable[[], bool], timeout_s: float | None
    ) -> None:
        """Wait until `is_due`, which is checked whenever the request's waiters are notified."""
        if is_due():
            return
        waiters = self._waiters.get(request_id)
        if waiters is None:
            waiters = self._waiters[request_id] = _Waiters(self._lock)
        waiters.num_waiting += 1
        try:
            waiters.wait_for(is_due, timeout_s)
        finally:
            waiters.num_waiting -= 1
            if not waiters.num_waiting:
                del self._waiters[request_id]

    def _notify(self, request_ids: set[int | None]) -> bool:
        """Wake who waits for any of these; whether there was anybody."""
        waited_for = request_ids & self._waiters.keys()
        for request_id in waited_for:
            self._waiters[request_id].notify_all()
        return bool(waited_for)

    def _take(self, request_id: int) -> list[Response]:
        responses = self._ready.pop(request_id, [])
        if responses and is_final(responses[-1]):
            self._open.discard(request_id)
            if self._waiters:
                self._notify({request_id})  # other readers of this request would wait for ever
        return responses


def is_final(response: Response) -> bool:
    """True for the last response of a request: an error, or the final result."""
    return response.result is None or response.result.is_final
