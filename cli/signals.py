"""SIGINT, SIGTERM and SIGHUP as exceptions of the main thread, so that every clean-up runs."""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType

Handler = Callable[[int, FrameType | None], object] | int | None


class Interrupted(KeyboardInterrupt):
    """SIGINT. A class of its own: when plain KeyboardInterrupt passes through exec(), as it does
    in an import that makes dataclasses, CPython kills itself at exit whatever exit code is set."""


class Terminated(KeyboardInterrupt):
    """SIGTERM, raised in the main thread so that every clean-up runs as it does for Ctrl-C; and
    SIGHUP, of a terminal or connection that has gone, which `nohup` makes an ignored one."""


_SIGNALS: dict[signal.Signals, type[KeyboardInterrupt]] = {
    signal.SIGINT: Interrupted,
    signal.SIGTERM: Terminated,
    signal.SIGHUP: Terminated,
}
REPEAT_S = 1.0  # a signal this soon after another one counts as the same


def install_handlers() -> dict[signal.Signals, Handler]:
    """Turn the signals that end a program into exceptions of the main thread; returns what they
    replace.

    An ignored signal (a background job of a script) stays ignored.
    """
    previous: dict[signal.Signals, Handler] = {}
    if threading.current_thread() is not threading.main_thread():
        return previous
    stop = _Stop()
    for number in _SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            previous[number] = signal.signal(number, stop)
    return previous


def put_back(previous: dict[signal.Signals, Handler]) -> None:
    """Undo `install_handlers`, which returned these."""
    for number, handler in previous.items():
        signal.signal(number, handler)


def ignore_all() -> None:
    """Everything is done: a late signal has no effect."""
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def last_raised() -> int | None:
    """The number of the last signal that was raised, also where native code dropped it."""
    stop = signal.getsignal(signal.SIGTERM)
    return stop.number if isinstance(stop, _Stop) else None


class _Stop:
    """The handler of every signal that ends the program.

    A second signal soon after the first is ignored: it would cut the first one's clean-up short.
    """

    def __init__(self) -> None:
        self._last_s = -math.inf
        self.number: int | None = None  # of the last signal raised

    def __call__(self, number: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        if now_s - self._last_s >= REPEAT_S:
            self._last_s = now_s
            kind = _SIGNALS[signal.Signals(number)]
            self.number = signal.SIGTERM if kind is Terminated else number
            raise kind


def resend_signal(unraisable: sys.UnraisableHookArgs) -> None:
    """Python prints and drops exceptions raised in a destructor or a weakref callback, such as
    those of the import system. A signal whose exception was dropped there is sent again
    afterwards."""
    for number, kind in _SIGNALS.items():
        if unraisable.exc_type is kind:
            again = threading.Timer(REPEAT_S, os.kill, (os.getpid(), number))
            again.daemon = True
            again.start()
            return
    sys.__unraisablehook__(unraisable)
