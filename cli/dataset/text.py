"""Requests from real text: a prompt per row, or excerpts of a long text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from llmctl.cli.dataset.lengths import Lengths
from llmctl.cli.dataset.rows import DatasetRow
from llmctl.cli.run.text_io import not_utf8
from llmctl.cli.tokenizer import Tokenizer
from llmctl.errors import BadConfig
from llmctl.quantize.format import clipped, load_strict, why_no_file

DEFAULT_INPUT_KEY = "text"


@dataclass(frozen=True, slots=True)
class TextOptions:
    """What to take out of a text file. num_requests None: every row.

    With `input_lengths` the whole text is one stream of tokens, cut at random places; otherwise a
    row is a prompt, and rows longer than max_input_len are skipped, never cut.
    """

    path: Path
    input_key: str | None = None
    output_key: str | None = None
    prompt: str | None = None
    prompt_key: str | None = None
    num_requests: int | None = None
    max_input_len: int | None = None
    input_lengths: Lengths | None = None
    output_lengths: Lengths | None = None

    def __post_init__(self) -> None:
        if (self.output_key is None) == (self.output_lengths is None):
            raise BadConfig(
                "--dataset-output-key and --output-len-dist: exactly one is wanted, it says how "
                "long outputs are"
            )
        if self.prompt is not None and self.prompt_key is not None:
            raise BadConfig("--dataset-prompt and --dataset-prompt-key are both given")
        if self.input_lengths is None:
            return
        for name in ("output_key", "prompt", "prompt_key", "max_input_len"):
            if getattr(self, name) is not None:
                raise BadConfig(f"--input-len-dist cuts one stream of text; {name} is for rows")
        if self.num_requests is None:
            raise BadConfig("--input-len-dist needs --num-requests")


def text_rows(options: TextOptions, tokenizer: Tokenizer, seed: int) -> Iterator[DatasetRow]:
    """The requests in the file's order, or windows of it. Raises BadConfig for an unusable file."""
    records = _read(options)
    generator = np.random.default_rng(seed)
    if options.input_lengths is not None:
        yield from _windows(options, options.input_lengths, records, tokenizer, generator)
        return
    count = 0
    for record in records:
        if count == options.num_requests:
            return
        prefix = options.prompt
        if options.prompt_key is not None:
            prefix = record[options.prompt_key]
        text = record[_input_key(options)]
        ids = tokenizer.encode(text if prefix is None else f"{prefix} {text}")
        if not ids or (options.max_input_len is not None and len(ids) > options.max_input_len):
            continue
        count += 1
        yield DatasetRow(ids, _output_tokens(options, record, tokenizer, generator))
    if count == 0:
        raise BadConfig(f"{options.path} has no row of {options.max_input_len} tokens or fewer")


def _windows(
    options: TextOptions,
    lengths: Lengths,
    records: list[Mapping[str, str]],
    tokenizer: Tokenizer,
    generator: np.random.Generator,
) -> Iterator[DatasetRow]:
    text = "\n".join(record[_input_key(options)] for record in records)
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert options.output_lengths is not None and options.num_requests is not None
    for _ in range(options.num_requests):
        count = lengths.draw(generator)
        if count > len(ids):
            raise BadConfig(
                f"{options.path} has {len(ids)} tokens; a prompt of {count} is requested",
                fix="lower --input-len-dist, or use a longer text",
            )
        start = int(generator.integers(0, len(ids) - count + 1))
        yield DatasetRow(ids[start : start + count], options.output_lengths.draw(generator))


def _output_tokens(
    options: TextOptions,
    record: Mapping[str, str],
    tokenizer: Tokenizer,
    generator: np.random.Generator,
) -> int:
    if options.output_lengths is not None:
        return options.output_lengths.draw(generator)
    assert options.output_key is not None
    return max(1, len(tokenizer.encode(record[options.output_key], add_special_tokens=False)))


def _input_key(options: TextOptions) -> str:
    return options.input_key or DEFAULT_INPUT_KEY


def _read(options: TextOptions) -> list[Mapping[str, str]]:
    """.txt: a row a line. .jsonl: objects with string fields."""
    path = options.path
    if (why := why_no_file(path)) is not None:
        raise BadConfig(f"--input-file {path} {why}")
    if path.suffix not in (".txt", ".jsonl"):
        raise BadConfig(f"--input-file is {path}; its name must end in .txt or .jsonl")
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise not_utf8(path, error) from error
    keep_empty = options.input_lengths is not None  # a stream keeps its empty lines
    if path.suffix == ".txt":
        keys = (options.input_key, options.output_key, options.prompt_key)
        if any(key is not None for key in keys):
            raise BadConfig(f"{path} has lines, no keys; --dataset-...-key is for .jsonl files")
        records = [{DEFAULT_INPUT_KEY: line} for line in lines if line.strip() or keep_empty]
    else:
        records = [
            _record(line, options, f"{path}, line {number}")
            for number, line in enumerate(lines, start=1)
            if line.strip()
        ]
    if not any(record[_input_key(options)].strip() for record in records):
        raise BadConfig(f"{path} holds no text")
    return list(records)


def _record(line: str, options: TextOptions, where: str) -> dict[str, Any]:
    try:
        record = load_strict(line)
    except ValueError as error:
        raise BadConfig(f"{where} is not JSON: {error}") from error
    if not isinstance(record, dict):
        raise BadConfig(f"{where} is {type(record).__name__}; a JSON object is wanted")
    for key in (_input_key(options), options.output_key, options.prompt_key):
        if key is not None and not isinstance(record.get(key), str):
            raise BadConfig(
                f"{where} has no string {key!r}; its keys are "
                f"{clipped(', '.join(record) or 'none')}",
                fix="name the right one with --dataset-input-key",
            )
    return record
