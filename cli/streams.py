"""stdout and stderr as a command finds them: possibly closed, full, or with a narrow encoding."""

from __future__ import annotations

import codecs
import io
import json
import os
import select
import stat
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO


class LossyStream:
    """stderr. Messages that cannot be written are lost without any other effect: results and the
    exit code stay the same."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """As of the stream; never raises OSError."""
        with suppress(OSError):
            return self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """As of the stream; never raises OSError."""
        with suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class LateStream:
    """stdout of a command that may write files as well. With files, when its disk is full or its
    reader has gone, the rest is not shown, and `raise_failure` says so once they are whole."""

    def __init__(self, stream: TextIO, *, has_files: bool) -> None:
        self._stream, self._has_files = stream, has_files
        self._failure: OSError | None = None

    def write(self, text: str) -> int:
        """As of the stream; raises OSError only without files."""
        self._try(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        """As of the stream; raises OSError only without files."""
        self._try(self._stream.flush)

    def _try(self, act: Callable[[], object]) -> None:
        if self._failure is None:
            try:
                act()
            except OSError as error:
                if not self._has_files:
                    raise
                self._failure = error

    def raise_failure(self) -> None:
        """Raises the first OSError, if there was one."""
        if self._failure is not None:
            raise self._failure


class _PatientWriter(io.FileIO):
    """A descriptor that somebody else made non-blocking, as a parent process does that shares it.
    Python writes what a pipe has room for and loses the rest."""

    def write(self, data: Any) -> int:
        """All of it, however long the reader takes."""
        left = memoryview(data).cast("B")
        room = select.poll()
        room.register(self.fileno(), select.POLLOUT)
        while left:
            left = left[super().write(left) or 0 :]
            if left:
                room.poll()
        return memoryview(data).nbytes


def _patient(stream: io.TextIOWrapper) -> io.TextIOWrapper:
    """The stream, or one that waits in the place of one that does not block."""
    if os.get_blocking(stream.fileno()):
        return stream
    buffered = io.BufferedWriter(_PatientWriter(stream.fileno(), "w", closefd=False))
    return io.TextIOWrapper(buffered, stream.encoding, line_buffering=stream.line_buffering)


def open_streams() -> None:
    """Give a closed stdout or stderr a target, wait for the reader of one that does not block, keep
    a narrow encoding from raising errors, and let no command fail because a message cannot be
    shown."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            # It stands in for the stream until the process ends, so nothing may close it.
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  # stays open
        elif isinstance(stream, io.TextIOWrapper):
            stream = _patient(stream)
            stream.reconfigure(errors="backslashreplace")
            setattr(sys, name, stream)
    vars(sys)["stderr"] = LossyStream(sys.stderr)


def json_line(value: object) -> str:
    """An object of results for stdout. JSON is read as UTF-8, so where stdout has another encoding
    (of the locale, or PYTHONIOENCODING) other characters than ASCII's are escaped."""
    is_utf8 = codecs.lookup(sys.stdout.encoding or "utf-8").name == "utf-8"
    return json.dumps(value, ensure_ascii=not is_utf8, allow_nan=False)


_HAS_RESULTS = "_results_are_on_stdout"


@contextmanager
def results_on_stdout(measured: Collection[object] | None = None) -> Iterator[None]:
    """What is raised inside is told on stderr: stdout has the results, the one object of --json.
    measured: what is printed; where nothing is in it, nothing was."""
    try:
        yield
    except Exception as error:
        setattr(error, _HAS_RESULTS, measured is None or bool(measured))
        raise


def has_results(error: Exception) -> bool:
    """Whether it was raised when stdout had the results already."""
    return getattr(error, _HAS_RESULTS, False)


def is_stdout_an_empty_file(*others: Path) -> bool:
    """Whether stdout goes to a file that is still empty, as a shell's `>` makes it, and is neither
    stderr nor one of `others`."""
    try:
        out, err = os.fstat(sys.stdout.fileno()), os.fstat(sys.stderr.fileno())
    except (OSError, ValueError):  # closed, or no descriptor at all
        return False
    if not stat.S_ISREG(out.st_mode) or out.st_size > 0 or os.path.samestat(out, err):
        return False
    return not any(path.exists() and os.path.samestat(out, path.stat()) for path in others)


def silence_stdout() -> None:
    """Let the interpreter's last flush of a closed stdout go nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
