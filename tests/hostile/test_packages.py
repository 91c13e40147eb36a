"""A Python package that is not installed is named as that, with the command that installs it."""

from __future__ import annotations

import builtins
from typing import Any

import pytest
from support.hostile import attempt, require_named


@pytest.mark.parametrize("name", ["yaml", "tokenizers"])
def test_an_import_that_fails_names_the_package(
    sound: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    real = builtins.__import__

    def without(module: str, *rest: Any, **others: Any) -> Any:
        if module.partition(".")[0] == name:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(module, *rest, **others)

    config = sound.checkpoint.parent / "options.yaml"
    config.write_text("log-level: error\n")
    monkeypatch.setattr(builtins, "__import__", without)
    outcome = attempt("run", "--engine-dir", sound.engine, "--max-output-len", 1, "--json",
                      "--config", config)  # fmt: skip
    require_named(outcome, "MissingPackage")
    assert outcome.code == 3 and f"package {name} is not installed" in outcome.message
    assert outcome.fix.startswith("pip install") and name in outcome.fix
