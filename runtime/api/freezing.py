"""What full garbage collections pass over while executors run."""

from __future__ import annotations

import gc
import threading

_MOST_OF_PYTHON = 10_000  # objects that the interpreter may freeze itself: Python 3.12 some 400

_lock = threading.Lock()
_num_freezing = 0  # executors that froze and have not ended
_is_left_to_program = False


def freeze() -> bool:
    """Exclude the objects that there are from garbage collection. Whether `unfreeze` is due.

    A program that froze its own objects, as servers do before they fork, decides for itself.
    Whether it did is asked until it has: the answer visits each frozen object, 0.1 s for a million.
    """
    global _num_freezing, _is_left_to_program
    with _lock:
        if not _num_freezing and not _is_left_to_program:
            _is_left_to_program = gc.get_freeze_count() >= _MOST_OF_PYTHON
        if _is_left_to_program:
            return False
        _num_freezing += 1
        gc.freeze()
        return True


def unfreeze() -> None:
    """One of those that froze has ended; with the last, objects are collected as before."""
    global _num_freezing
    with _lock:
        _num_freezing -= 1
        if not _num_freezing:
            gc.unfreeze()
