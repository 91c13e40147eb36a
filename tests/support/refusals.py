"""What tests of refusals share."""

from __future__ import annotations

RUN = ("run", "--max-output-len", 3)


def refused(done, name: str, *parts: str) -> bool:
    return f"error[{name}]: " in done.err and all(part in done.err for part in parts)
