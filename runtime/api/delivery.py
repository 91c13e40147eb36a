"""Makes the responses and statistics of a committed step.

The next step does not depend on them. So where a device computes, it first gets its next step, and
the results of the last one are delivered while it is busy. Only first tokens are delivered at once:
they are few, and who waits for one has waited for a prompt.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import NamedTuple

from llmctl.runtime.api.mailbox import Mailbox
from llmctl.runtime.api.tracking import TrackedRequest
from llmctl.runtime.generate.commit import Commit
from llmctl.runtime.loop import StepReport
from llmctl.runtime.request import FinishReason, Response, Sequence
from llmctl.runtime.stats.recorder import Moment, Recorder


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

    def hold(self, report: StepReport, started: list[TrackedRequest], num_queued: int) -> None:
        """Keep a committed step; the previous one has been flushed."""
        assert self._held is None
        moment = self._recorder.look(len(self._active), num_queued)
        self._held = _Held(report, moment, started, report.commits)

    def post_first_tokens(self) -> None:
        """Post what the held step brought to requests whose prompts it has read, but for those that
        end with it."""
        held = self._held
        assert held is not None and held.commits is held.report.commits, "once, after `hold`"
        num_prompts = len(held.report.batch.context)
        first, left = list[Commit](), list[Commit]()
        for commit in held.commits[:num_prompts]:
            (first if commit.num_tokens and not _ends(commit) else left).append(commit)
        if first:
            self._held = held._replace(commits=[*left, *held.commits[num_prompts:]])
            if responses := self._make(first, held.moment, []):
                self._mailbox.post(responses)

    def flush(self) -> None:
        """Post the responses of the step that have not been posted, count it, and retire the
        requests it completed; once."""
        if self._held is None:
            return
        held, self._held = self._held, None
        active, ended = self._active, list[int]()
        responses = self._make(held.commits, held.moment, ended)
        self._recorder.record(held.report, held.moment, active.values(), held.started, len(ended))
        for request_id in ended:
            del active[request_id]
        if responses:
            self._mailbox.post(responses)

    def _make(self, commits: Items[Commit], moment: Moment, ended: list[int]) -> list[Response]:
        """The responses of commits; requests that these complete are appended to `ended`."""
        responses, iteration = list[Response](), self._recorder.num_iterations + 1
        for commit in commits:
            sequence, is_over = commit.sequence, _ends(commit)
            tracked = self._active[sequence.request_id]
            tracked.note(commit, iteration, moment.now_s)
            if is_over or (commit.num_tokens and tracked.request.streaming):
                responses.append(tracked.respond(sequence))
            if is_over:
                self._forget(sequence)
                if not tracked.num_unfinished:
                    ended.append(tracked.request_id)
        return responses


def _ends(commit: Commit) -> bool:
    return commit.sequence.finish_reason is not FinishReason.NOT_FINISHED
