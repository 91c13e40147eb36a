"""The progress of a benchmark on stderr: a bar in a terminal, an occasional line elsewhere."""

from __future__ import annotations

import sys
from time import perf_counter
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bar

from llmctl.cli.bench.records import RequestRecord

LINES = 10  # in a long run without a terminal
LONG_RUN = 100  # requests
SILENCE_S = 5.0  # after which a shorter run prints a line, too


class Progress:
    """A listener of the driver, and a context manager: the bar is shown while it is open."""

    def __init__(self, total: int, *, is_quiet: bool = False) -> None:
        self._total = total
        self._done = 0
        self._tokens = 0
        self._began_s = self._said_s = perf_counter()
        console = Console(stderr=True)
        self._is_quiet = is_quiet
        self._bar: Bar | None = None
        if console.is_terminal and not is_quiet:
            self._bar = Bar(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("requests, {task.fields[rate]:,.0f} tok/s"),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
                console=console,
                transient=True,
            )
            self._task = self._bar.add_task("requests", total=total, rate=0.0)

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def say(self, what: str) -> None:
        """Announce what runs now."""
        if self._bar is not None:
            self._bar.update(self._task, description=what)

    def __call__(self, record: RequestRecord) -> None:
        """A response has come; tok/s are those since the first request ended or went on."""
        if record.arrivals:
            self._tokens += record.arrivals[-1].num_tokens
        is_over = record.is_done or record.error is not None
        self._done += is_over
        rate = self._tokens / (perf_counter() - self._began_s)
        if self._bar is not None:
            self._bar.update(self._task, advance=int(is_over), rate=rate)
        elif is_over and not self._is_quiet and self._is_milestone():
            line = f"{self._done:,} of {self._total:,} requests, {rate:,.0f} tok/s"
            print(line, file=sys.stderr, flush=True)

    def _is_milestone(self) -> bool:
        """True at every tenth of a long run, and after a silence."""
        now_s = perf_counter()
        is_tenth = self._total >= LONG_RUN and self._done % (self._total // LINES) == 0
        if not is_tenth and now_s - self._said_s < SILENCE_S:
            return False
        self._said_s = now_s
        return True
