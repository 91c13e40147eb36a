"""How drafts are made, from run.py's list-in-a-string options or their plain forms."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from llmctl.errors import BadConfig, Unsupported

DRAFT_TARGET_FORM = "[draft_len, [draft devices], [target devices], use_logits]"
NGRAM_FORM = "[draft_len, max_ngram, [devices]]"


@dataclass(frozen=True, slots=True)
class Speculation:
    """A drafting method. draft_len None: as many as the target engine was built for.

    `draft_engine` is None for n-gram drafting, which uses max_ngram instead.
    """

    draft_len: int | None
    draft_engine: Path | None = None
    max_ngram: int = 0
    acceptance: Literal["tokens", "logits"] = "tokens"


def parse_speculation(
    draft_engine: Path | None,
    draft_target_model_config: str | None,
    draft_len: int | None,
    ngram_config: str | None,
) -> Speculation | None:
    """One method from the options, or None for plain decoding.

    Raises BadConfig for malformed or contradicting values, Unsupported for several devices.
    """
    if draft_len is not None and draft_len < 1:
        raise BadConfig(f"--draft-len is {draft_len}; it must be at least 1")
    if ngram_config is not None:
        if draft_engine is not None or draft_target_model_config is not None:
            raise BadConfig(
                "--ngram-config and --draft-engine are both given; one method drafts at a time"
            )
        num_tokens, max_ngram = _parse_ngram(ngram_config)
        _require_equal("--ngram-config", num_tokens, draft_len)
        return Speculation(draft_len=num_tokens, max_ngram=max_ngram)
    if draft_engine is None:
        for name, value in (
            ("--draft-target-model-config", draft_target_model_config),
            ("--draft-len", draft_len),
        ):
            if value is not None:
                raise BadConfig(f"{name} is given without a draft", fix="add --draft-engine DIR")
        return None
    if draft_target_model_config is None:
        return Speculation(draft_len=draft_len, draft_engine=draft_engine)
    num_tokens, use_logits = _parse_draft_target(draft_target_model_config)
    _require_equal("--draft-target-model-config", num_tokens, draft_len)
    return Speculation(
        draft_len=num_tokens,
        draft_engine=draft_engine,
        acceptance="logits" if use_logits else "tokens",
    )


def _parse_draft_target(text: str) -> tuple[int, bool]:
    option = "--draft-target-model-config"
    values = _parse_list(option, text, 4, DRAFT_TARGET_FORM)
    use_logits = values[3]
    if not isinstance(use_logits, bool):
        raise BadConfig(f"use_logits in {option} is {use_logits!r}; it must be True or False")
    _require_one_device(option, values[1])
    _require_one_device(option, values[2])
    return _positive(option, "draft_len", values[0]), use_logits


def _parse_ngram(text: str) -> tuple[int, int]:
    option = "--ngram-config"
    values = _parse_list(option, text, 3, NGRAM_FORM)
    _require_one_device(option, values[2])
    draft_len = _positive(option, "draft_len", values[0])
    return draft_len, _positive(option, "max_ngram", values[1])


def _parse_list(option: str, text: str, length: int, form: str) -> list[Any]:
    try:
        value = ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        value = None
    if not isinstance(value, list) or len(value) != length:
        raise BadConfig(f"{option} is {text!r}; it must have the form {form}")
    return value


def _require_one_device(option: str, devices: object) -> None:
    if not isinstance(devices, list) or not all(type(device) is int for device in devices):
        raise BadConfig(f"{option} has the devices {devices!r}; a list such as [0] is wanted")
    if devices != [0]:
        raise Unsupported(
            f"{option} names the devices {devices}; the engine runs on one device, [0]",
            fix="write [0] for both models",
        )


def _positive(option: str, name: str, value: object) -> int:
    if type(value) is not int or value < 1:
        raise BadConfig(f"{name} in {option} is {value!r}; it must be an integer >= 1")
    return value


def _require_equal(option: str, found: int, draft_len: int | None) -> None:
    if draft_len is not None and draft_len != found:
        raise BadConfig(f"{option} says draft_len {found}, --draft-len says {draft_len}")
