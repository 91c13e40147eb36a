"""Each failure has one class, a documented exit code and a stable name."""

from __future__ import annotations

import inspect

from llmctl import errors


def test_every_error_is_documented_and_has_a_known_exit_code() -> None:
    classes = [c for c in vars(errors).values() if inspect.isclass(c)]
    assert len(classes) > 20
    for cls in classes:
        assert issubclass(cls, errors.LlmctlError)
        assert cls.__doc__, cls
        assert cls.exit_code in (1, 2, 3, 4), cls


def test_an_error_carries_its_name_and_fix() -> None:
    error = errors.RebuildNeeded("schema 1, wanted 2", fix="llmctl build …")
    assert (error.name, error.fix, error.exit_code) == ("RebuildNeeded", "llmctl build …", 4)
    assert errors.OutputExists("out").fix


def test_a_class_may_have_a_usual_fix() -> None:
    assert errors.CorruptFile("x is cut").fix == errors.CorruptFile.usual_fix != ""
    assert errors.CorruptFile("x is cut", fix="fetch x").fix == "fetch x"
    assert errors.BadConfig("x is 3").fix == ""
