"""Calibration text -> full rows of token ids.

Documents are tokenized, joined into one stream and cut into rows of equal length: no padding,
because padded positions would count in the activation maxima. The default text is a file beside
this one: documentation, Python and CUDA sources of llmctl as they once were. It is never brought up
to date, so that the same checkpoint gets the same scales with every Python, on every machine and
with every later llmctl.
"""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from llmctl.errors import BadCalibrationData, TokenizerError
from llmctl.quantize.files import not_a_file
from llmctl.quantize.strict_json import clipped, load_strict
from llmctl.quantize.tokenizer_file import guarded, open_tokenizer

if TYPE_CHECKING:
    import torch

DEMO_DATASET = "demo"
DEMO_TEXT = Path(__file__).with_name("calibration_text.jsonl.gz")
_BATCH_ROWS, _MOST_CHARS = 256, 1 << 30  # of a parquet file
TEXT_COLUMNS = ("text", "article", "content")  # `article` is cnn_dailymail's
DOCUMENT_CHARS = 32_768  # longer documents are cut: the tokenizer's time grows with the piece


def read_rows(
    dataset: str, tokenizer_file: Path, *, num_rows: int, row_length: int, vocab: int, seed: int
) -> torch.Tensor:
    """int64 token ids [num_rows, row_length].

    dataset: "demo", which is DEMO_TEXT, or a .txt, .jsonl or .parquet file. Raises
    BadCalibrationData when the text is unreadable or too short, TokenizerError when the tokenizer
    is or gives ids >= `vocab`.
    """
    import torch

    tokenizer, _ = open_tokenizer(tokenizer_file)
    wanted = num_rows * row_length
    stream: list[int] = []
    failure = f"{tokenizer_file} cannot encode the calibration text"
    for document in _documents(dataset, random.Random(seed)):
        stream += guarded(partial(tokenizer.encode, document), failure).ids
        if len(stream) >= wanted:
            break
    if len(stream) < wanted:
        raise BadCalibrationData(
            f"{dataset} has {len(stream)} tokens; {num_rows} rows of {row_length} need {wanted}",
            fix=f"--calib-size {len(stream) // row_length}"
            if len(stream) >= row_length
            else "give more text, or shorter rows: --calib-max-seq-length",
        )
    rows = torch.tensor(stream[:wanted], dtype=torch.int64).view(num_rows, row_length)
    largest = int(rows.max())
    if largest >= vocab:
        raise TokenizerError(
            f"{tokenizer_file} gives token {largest}; the model's vocabulary has {vocab}",
            fix="use the tokenizer that belongs to the checkpoint",
        )
    return rows


def _documents(dataset: str, order: random.Random) -> Iterator[str]:
    """The dataset's documents: shuffled, in pieces of bounded length, none empty."""
    texts = _demo_texts(order) if dataset == DEMO_DATASET else _file_texts(Path(dataset), order)
    for text in texts:
        for start in range(0, len(text), DOCUMENT_CHARS):
            yield text[start : start + DOCUMENT_CHARS]


def _demo_texts(order: random.Random) -> list[str]:
    try:
        with gzip.open(DEMO_TEXT, "rt", encoding="utf-8") as file:
            texts: list[str] = [json.loads(line)["text"] for line in file]
    except (OSError, EOFError) as error:
        raise BadCalibrationData(
            f"the text of --calib-dataset {DEMO_DATASET} cannot be read: {error}",
            fix="install llmctl again, or name a file of text: --calib-dataset FILE.txt",
        ) from error
    order.shuffle(texts)
    return texts


def check_dataset(dataset: str) -> None:
    """Refuse a dataset that cannot be read, before any work. Raises BadCalibrationData."""
    if dataset == DEMO_DATASET:
        return
    path = Path(dataset)
    found = not_a_file(path)
    if path.suffix not in READERS or not path.is_file() or found is not None:
        what = "is not a file of a known kind" if path.exists() else "does not exist"
        if found is not None:
            what = f"is {found}"
        raise BadCalibrationData(
            f"--calib-dataset {dataset} {what}; wanted: {DEMO_DATASET!r} or a file ending in "
            f"{', '.join(READERS)} (nothing is downloaded)",
        )


def _file_texts(path: Path, order: random.Random) -> list[str]:
    check_dataset(str(path))
    try:
        texts = [text for text in READERS[path.suffix](path) if text]
    except (OSError, UnicodeDecodeError) as error:
        raise BadCalibrationData(f"{path} cannot be read: {error}") from error
    order.shuffle(texts)
    return texts


def _read_txt(path: Path) -> list[str]:
    return [path.read_text(encoding="utf-8-sig")]


def _read_jsonl(path: Path) -> list[str]:
    texts = []
    for number, line in enumerate(path.read_text(encoding="utf-8-sig").split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = load_strict(line)
        except ValueError as error:
            raise BadCalibrationData(f"{path}, line {number} is not JSON: {error}") from error
        column = _text_column(row if isinstance(row, dict) else {}, f"{path}, line {number}")
        if not isinstance(row[column], str):
            raise BadCalibrationData(f"{path}, line {number}: {column} is not a string")
        texts.append(row[column])
    return texts


def _read_parquet(path: Path) -> list[str]:
    import pyarrow
    import pyarrow.parquet

    try:
        names = pyarrow.parquet.read_schema(path).names
        column = _text_column(dict.fromkeys(names), str(path))
        if names.count(column) > 1:
            raise BadCalibrationData(f"{path} has {names.count(column)} columns named {column}")
        file = pyarrow.parquet.ParquetFile(path)
        texts: list[str] = []
        num_chars = 0
        # A few rows at a time: a kilobyte of a compressed file may stand for gigabytes.
        for batch in file.iter_batches(batch_size=_BATCH_ROWS, columns=[column]):
            values = batch.column(0).to_pylist()
            if not all(isinstance(value, str | None) for value in values):
                raise BadCalibrationData(f"{path}: the column {column} does not hold text")
            texts += [value for value in values if value]
            num_chars += sum(len(value) for value in values if value)
            if num_chars > _MOST_CHARS:
                raise BadCalibrationData(
                    f"{path} holds more than {_MOST_CHARS} characters of text",
                    fix="name a file with a part of its rows",
                )
    except pyarrow.ArrowException as error:
        raise BadCalibrationData(f"{path} is not a parquet file: {error}") from error
    return texts


READERS = {".txt": _read_txt, ".jsonl": _read_jsonl, ".parquet": _read_parquet}


def _text_column(row: dict[str, object], where: str) -> str:
    for column in TEXT_COLUMNS:
        if column in row:
            return column
    found = clipped(", ".join(map(str, row)) or "no fields")
    raise BadCalibrationData(f"{where} has {found}; one of {', '.join(TEXT_COLUMNS)} is wanted")
