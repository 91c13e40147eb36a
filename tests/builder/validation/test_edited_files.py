"""Engine files whose tensors lie elsewhere than `build` puts them are refused by name."""

from __future__ import annotations

import pytest
from support.hostile import attempt
from support.hostile_engine import Edited, HostileEngine, refuse, write_text

from llmctl.errors import CorruptEngine


def test_negative_places_in_the_file_are_refused(edited: Edited) -> None:
    def change(engine: HostileEngine) -> None:
        begin, end = engine.header["lm_head.weight"]["data_offsets"]
        engine.header["lm_head.weight"]["data_offsets"] = [begin - end, 0]

    with pytest.raises(CorruptEngine, match=r"lm_head.weight is .* at \[-"):
        write_text(edited(change))


def test_tensors_that_share_bytes_of_the_file_are_refused(edited: Edited) -> None:
    def change(engine: HostileEngine) -> None:
        first, second = (f"model.layers.{i}.input_layernorm.weight" for i in range(2))
        engine.header[first]["data_offsets"] = engine.header[second]["data_offsets"]

    refuse(edited(change), "input_layernorm.weight is bfloat16")


def test_two_weights_that_changed_places_are_refused(edited: Edited) -> None:
    def change(engine: HostileEngine) -> None:
        one, two = (engine.header[f"model.layers.{i}.input_layernorm.weight"] for i in range(2))
        one["data_offsets"], two["data_offsets"] = two["data_offsets"], one["data_offsets"]

    refuse(edited(change), "input_layernorm.weight is bfloat16")


def test_a_tensor_that_the_plan_does_not_use_is_refused(edited: Edited) -> None:
    def change(engine: HostileEngine) -> None:
        size = len(engine.data)
        entry = {"dtype": "U8", "shape": [64], "data_offsets": [size, size + 64]}
        engine.header["more"] = entry
        engine.data += bytes(64)

    refuse(edited(change), "'more', which its plan does not use")


@pytest.mark.parametrize(("key", "value"), [("schema_version", "10"), ("format", "pt")])
def test_a_header_of_another_format_is_refused(edited: Edited, key: str, value: str) -> None:
    refuse(edited(lambda engine: engine.metadata.update({key: value})), f"its {key} is '{value}'")


def test_what_a_file_says_commands_no_terminal_and_is_cut(edited: Edited) -> None:
    def change(engine: HostileEngine) -> None:
        engine.header["lm_head.weight"]["dtype"] = "\x1b[2J" * 10_000

    outcome = attempt("inspect", edited(change))
    assert outcome.code == 1 and "lm_head.weight is \\x1b[2J" in outcome.message
    assert outcome.message.replace("\n", "").isprintable() and len(outcome.message) < 10_000
