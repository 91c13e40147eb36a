"""Another rank with a device of its own, in this process."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

from llmctl.runtime.ranks.commands import Command, decode, encode


class OtherRank:
    """Executes what rank 0 hands on, before rank 0 does it itself."""

    failure = None

    def __init__(self, executes: dict[str, Any]) -> None:
        self.executes = executes
        self.calls: list[str] = []
        self._is_leading = False

    def lead(self, command: Command, call: Callable[[], Any]) -> Any:
        if self._is_leading:
            return call()
        self.calls.append(command.call)
        heard = decode(io.BytesIO(encode(command)).read)
        heard.make(self.executes)
        self._is_leading = True
        try:
            return call()
        finally:
            self._is_leading = False

    def wait_for_all(self, what: str) -> None:
        pass
