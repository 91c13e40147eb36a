"""What tests of the program share."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType

import pytest

from llmctl.cli import app


def replace_run(monkeypatch: pytest.MonkeyPatch, command: Callable[[], None]) -> None:
    """Let `llmctl run` import this command, which has no options."""
    module = ModuleType("replaced_run")
    vars(module)["command"] = command
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(app.COMMANDS, "run", (module.__name__, "command", "Replaced."))
