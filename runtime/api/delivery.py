"""Makes the responses and statistics of a committed step.

The next step does not depend on them. So where a device computes, it first gets its next step, and
the results of the last one are delivered while it is busy. Only first tokens are delivered at once,
before the blocks of their prompts are published: they are few, and who waits for one has waited for
a prompt.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from time import monotonic, sleep
from typing import NamedTuple

from llmctl.runtime.api.mailbox import Mailbox
from llmctl.runtime.api.tracking import TrackedRequest
from llmctl.runtime.generate.commit import Commit
from llmctl.runtime.loop import StepReport
from llmctl.runtime.request import FinishReason, Sequence
from llmctl.runtime.response import Response
from llmctl.runtime.stats.recorder import Moment, Recorder

# After first tokens the executor's thread leaves Python's lock to who waits for them. Otherwise it
# keeps that until it launches the next step, 0.3 ms later on the host of an H200 and 1 to 4 on two
# busy cores. A thread that sleeps shortly is back when whoever it woke waits again: what waits for
# word from the reader instead is no faster (log/prompt_attention.md).
HAND_OVER_S = 20e-6


class _Held(NamedTuple):
    report: StepReport
    moment: Moment
    started: list[TrackedRequest]
    commits: Items[Commit]  # whose responses have not been posted


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
        # A step whose first tokens have been posted, and what of it has not.
        self._begun: StepReport | None = None
        self._rest: Items[Commit] = ()

    def post_first_tokens(self, report: StepReport) -> None:
        """Post what a step brought to requests whose prompts it has read, but for those that end
        with it. The step is held next, or fails; the previous one has been flushed."""
        num_prompts = len(report.batch.context)
        if not num_prompts:
            return
        first, left = list[Commit](), list[Commit]()
        for commit in report.commits[:num_prompts]:
            (first if commit.num_tokens and not _ends(commit) else left).append(commit)
        self._begun, self._rest = report, [*left, *report.commits[num_prompts:]]
        responses = self._make(first, monotonic(), [])
        if responses and self._mailbox.post(responses):
            sleep(HAND_OVER_S)

    def hold(self, report: StepReport, started: list[TrackedRequest], num_queued: int) -> None:
        """Keep a committed step; the previous one has been flushed."""
        assert self._held is None
        moment = self._recorder.look(len(self._active), num_queued)
        commits = self._rest if report is self._begun else report.commits
        self._held = _Held(report, moment, started, commits)
        self._begun, self._rest = None, ()

    def flush(self) -> None:
        """Post the responses of the step that have not been posted, count it, and retire the
        requests it completed; once."""
        if self._held is None:
            return
        held, self._held = self._held, None
        active, ended = self._active, list[int]()
        responses = self._make(held.commits, held.moment.now_s, ended)
        self._recorder.record(held.report, held.moment, active.values(), held.started, len(ended))
        for request_id in ended:
            del active[request_id]
        if responses:
            self._mailbox.post(responses)

    def _make(self, commits: Items[Commit], now_s: float, ended: list[int]) -> list[Response]:
        """The responses of commits; requests that these complete are appended to `ended`."""
        responses, iteration = list[Response](), self._recorder.num_iterations + 1
        for commit in commits:
            sequence, is_over = commit.sequence, _ends(commit)
            tracked = self._active[sequence.request_id]
            tracked.note(commit, iteration, now_s)
            if is_over or (commit.num_tokens and tracked.request.streaming):
                responses.append(tracked.respond(sequence))
            if is_over:
                self._forget(sequence)
                if not tracked.num_unfinished:
                    ended.append(tracked.request_id)
        return responses


def _ends(commit: Commit) -> bool:
    return commit.sequence.finish_reason is not FinishReason.NOT_FINISHED
