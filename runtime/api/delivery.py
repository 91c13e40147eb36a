"""Makes the responses and statistics of a committed step.

The next step does not depend on them. So where a device computes, it first gets its next step, and
the results of the last one are delivered while it is busy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from llmctl.runtime.api.mailbox import Mailbox
from llmctl.runtime.api.tracking import TrackedRequest
from llmctl.runtime.loop import StepReport
from llmctl.runtime.request import FinishReason, Response, Sequence
from llmctl.runtime.stats.recorder import Moment, Recorder


class _Held(NamedTuple):
    report: StepReport
    moment: Moment
    started: list[TrackedRequest]


class Delivery:
    """Holds the last step until `flush`. `active` are the requests that have not ended, by id;
    requests that end are removed, and their sequences are passed to `forget`.

    Code that ends or fails requests has to flush first, so that each request gets its responses in
    order.
    """

    def __init__(
        self,
        active: dict[int, TrackedRequest],
        recorder: Recorder,
        mailbox: Mailbox,
        forget: Callable[[Sequence], None],
    ) -> None:
        self._active = active
        self._recorder = recorder
        self._mailbox = mailbox
        self._forget = forget
        self._held: _Held | None = None

    def hold(self, report: StepReport, started: list[TrackedRequest], num_queued: int) -> None:
        """Keep a committed step; the previous one has been flushed."""
        assert self._held is None
        moment = self._recorder.look(len(self._active), num_queued)
        self._held = _Held(report, moment, started)

    def flush(self) -> None:
        """Post the responses of the step, count it, and retire the requests it completed; once."""
        if self._held is None:
            return
        (report, moment, started), self._held = self._held, None
        active, iteration = self._active, self._recorder.num_iterations + 1
        responses: list[Response] = []
        ended: list[int] = []
        for commit in report.commits:
            sequence = commit.sequence
            tracked = active[sequence.request_id]
            tracked.note(commit, iteration, moment.now_s)
            is_over = sequence.finish_reason is not FinishReason.NOT_FINISHED
            if is_over or (commit.num_tokens and tracked.request.streaming):
                responses.append(tracked.respond(sequence))
            if is_over:
                self._forget(sequence)
                if not tracked.num_unfinished:
                    ended.append(tracked.request_id)
        self._recorder.record(report, moment, active.values(), started, len(ended))
        for request_id in ended:
            del active[request_id]
        if responses:
            self._mailbox.post(responses)
