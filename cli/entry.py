"""The program's first lines. A signal that arrives while the rest is being imported ends it at
once, with the exit code a shell expects and no traceback: there is nothing to clean up yet."""

from __future__ import annotations

import gc
import os
import signal
from types import FrameType


def main() -> None:
    """Entry point of the `llmctl` program; see cli/main.py for what it does."""
    # What is imported stays: to look for garbage among it every 700 objects, the default, takes a
    # fifth of importing transformers. Cycles of longer runs are still collected.
    gc.set_threshold(50_000)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # of a background job: stays ignored
            signal.signal(number, _leave)
    from llmctl.cli.main import main as program

    program()


def _leave(number: int, frame: FrameType | None) -> None:
    os._exit(128 + (signal.SIGTERM if number == signal.SIGHUP else number))


if __name__ == "__main__":
    main()
