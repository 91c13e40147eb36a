"""Prompts from files: .txt, .csv, .npy, .jsonl.

Every reader checks the whole file before anything runs and names file and line.
"""

from __future__ import annotations

import codecs
import csv
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmctl.cli.run.npy import read_integers
from llmctl.errors import BadConfig
from llmctl.quantize.format import load_strict, shown, why_no_file

_PROMPT_KEYS = ("prompt", "input_ids")
# Keys a .jsonl row may have besides these, with the types each may take.
_NUMBER = (int, float)
_WORDS = ("stop_words", "bad_words")
ROW_KEYS: Mapping[str, tuple[type, ...]] = {
    "max_tokens": (int,),
    "output_tokens": (int,),  # the name trtllm-bench reads
    "temperature": _NUMBER,
    "top_k": (int,),
    "top_p": _NUMBER,
    "min_p": _NUMBER,
    "seed": (int,),
    "repetition_penalty": _NUMBER,
    "presence_penalty": _NUMBER,
    "frequency_penalty": _NUMBER,
    "no_repeat_ngram_size": (int,),
    "min_tokens": (int,),
    **dict.fromkeys(_WORDS, (list,)),
    "typical_acceptance": (str,),
    "priority": _NUMBER,
    "lookahead_config": (list,),
}
_NUMBER_WORD = re.compile(r"-?[0-9]{1,20}")  # int() reads also 1_000, and digits of any script
_ROW_FORM = "write an object on each line; of those of an array: jq -c '.[]' FILE"
_ROW_LABEL = "task_id"  # accepted for trtllm-bench's files; results carry the row's index anyway


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row of input: text or token ids, and what the row itself sets."""

    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)


def read_prompts(
    path: Path, option: str = "--input-file", suffix: str | None = None
) -> list[Prompt]:
    """The prompts of the file that `option` names, read as its suffix says, or as `suffix` does.
    Raises BadConfig for an unknown one or a bad row."""
    readers = {".txt": _read_txt, ".csv": _read_csv, ".npy": _read_npy, ".jsonl": _read_jsonl}
    reader = readers.get(suffix or path.suffix.lower())
    if reader is None:
        raise BadConfig(
            f"{option} is {path}; its name must end in one of {', '.join(readers)}",
        )
    if (why := why_no_file(path)) is not None:
        raise BadConfig(f"{option} {path} {why}")
    try:
        prompts = reader(path)
    except UnicodeDecodeError as error:
        raise not_utf8(path, error) from error
    except csv.Error as error:
        raise BadConfig(f"{path} is not rows of token ids with commas: {error}") from error
    if not prompts:
        raise BadConfig(f"{path} holds no prompts")
    return prompts


def not_utf8(path: Path, error: UnicodeDecodeError) -> BadConfig:
    """What is wrong with a file of another encoding. A byte order mark before UTF-8 is no other."""
    is_utf16 = error.object[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
    return BadConfig(
        f"{path} is {'UTF-16 and ' if is_utf16 else ''}not UTF-8 text: {error}",
        fix=f"save it as UTF-8{', with: iconv -f UTF-16 -t UTF-8' if is_utf16 else ''}",
    )


def _read_txt(path: Path) -> list[Prompt]:
    """One prompt a line; empty lines are skipped."""
    lines = path.read_text(encoding="utf-8-sig").split("\n")
    return [Prompt(text=line.rstrip("\r")) for line in lines if line.strip()]


def _read_csv(path: Path) -> list[Prompt]:
    """One row of token ids a line."""
    prompts = []
    with path.open(encoding="utf-8-sig", newline="") as file:
        for number, row in enumerate(csv.reader(file), start=1):
            where = f"{path}, line {number}"
            words = [word for item in row if (word := item.strip())]
            bad = next((word for word in words if not _NUMBER_WORD.fullmatch(word)), None)
            if bad is not None:
                raise BadConfig(f"{where} holds {shown(bad)}; token ids are wanted")
            if words:
                ids = [int(word) for word in words]
                prompts.append(Prompt(token_ids=_checked_ids(ids, where)))
    return prompts


def _read_npy(path: Path) -> list[Prompt]:
    """An integer array [rows, tokens]; negative ids around the tokens of a row are padding."""
    array = read_integers(path)
    if not array.shape[1]:
        return []  # whatever number of rows, none has a token
    prompts = []
    for number, row in enumerate(array):
        places = (row >= 0).nonzero()[0]
        first = int(places[0]) if places.size else 0
        ids = row[first : int(places[-1]) + 1 if places.size else 0]
        where = f"{path}, row {number}"
        if places.size < ids.size:
            at = int((ids < 0).argmax())
            raise BadConfig(
                f"{where} holds {shown(int(ids[at]))} between its token ids, at index "
                f"{first + at}; negative ids are padding, before a row's tokens or behind them"
            )
        prompts.append(Prompt(token_ids=_checked_ids(ids.tolist(), where)))
    return prompts


def _checked_ids(ids: Sequence[int], where: str) -> tuple[int, ...]:
    """Ids that can be token ids of some model; the engine compares with its own vocabulary."""
    bad = next((item for item in ids if not 0 <= item < 2**31), None)
    if bad is not None:
        raise BadConfig(f"{where} holds {shown(bad)}; token ids are 0 to {2**31 - 1}")
    return tuple(ids)


def _read_jsonl(path: Path) -> list[Prompt]:
    """One JSON object a line: "prompt" or "input_ids", and ROW_KEYS."""
    prompts = []
    for number, line in enumerate(path.read_text(encoding="utf-8-sig").split("\n"), start=1):
        if line.strip():
            prompts.append(_parse_row(line, f"{path}, line {number}"))
    return prompts


def _parse_row(line: str, where: str) -> Prompt:
    try:
        row = load_strict(line)
    except ValueError as error:
        raise BadConfig(f"{where} is not JSON: {error}", fix=_ROW_FORM) from error
    if not isinstance(row, dict):
        found = type(row).__name__
        raise BadConfig(f"{where} is {found}; a JSON object is wanted", fix=_ROW_FORM)
    row.pop(_ROW_LABEL, None)
    text, ids = (row.pop(key, None) for key in _PROMPT_KEYS)
    if ids is not None:  # input_ids win when both are there, as they do in trtllm-bench
        if not isinstance(ids, list) or not all(type(item) is int for item in ids):
            raise BadConfig(f'{where}: "input_ids" must be a list of integers')
        if not isinstance(text, str | None):
            raise BadConfig(f'{where}: "prompt" is {shown(text)}, not text')
        text, ids = None, _checked_ids(ids, where)
    elif not isinstance(text, str):
        others = f"; its keys are {shown(list(row))}" if row else ""
        raise BadConfig(f'{where} has neither a "prompt" string nor "input_ids"{others}')
    _check_settings(row, where)
    if "output_tokens" in row:
        if "max_tokens" in row:
            raise BadConfig(f"{where} has max_tokens and output_tokens, which are the same limit")
        row["max_tokens"] = row.pop("output_tokens")
    return Prompt(text=text, token_ids=ids, settings=row)


def _check_settings(row: Mapping[str, Any], where: str) -> None:
    for key, value in row.items():
        wanted = ROW_KEYS.get(key)
        if wanted is None:
            known = ", ".join((*_PROMPT_KEYS, *ROW_KEYS))
            raise BadConfig(f"{where} has the key {shown(key)}; known are: {known}")
        if not isinstance(value, wanted) or isinstance(value, bool):
            raise BadConfig(f"{where}: {key!r} is {shown(value)}, not {wanted[-1].__name__}")
        if isinstance(value, int) and abs(value) >= 2**64:
            raise BadConfig(f"{where}: {key!r} is beyond 64 bits")
        words = value if isinstance(value, list) and key in _WORDS else ()
        if not all(isinstance(item, str) for item in words):
            raise BadConfig(f"{where}: {key!r} must be a list of strings")
