"""Rows of a dataset: what trtllm-bench and `llmctl bench` read, a JSON object a line."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np

from llmctl.builder.engine_format import TOKENIZER_FOLDER
from llmctl.cli.dataset.lengths import Lengths
from llmctl.cli.output_files import replacing
from llmctl.cli.tokenizer import Tokenizer
from llmctl.errors import TokenizerError

_HUB_FILES = ["tokenizer.json", "tokenizer_config.json"]


@dataclass(frozen=True, slots=True)
class DatasetRow:
    """One request: its prompt as token ids, and the number of tokens to generate."""

    input_ids: Sequence[int]
    output_tokens: int

    def to_json(self, index: int) -> str:
        """trtllm-bench's line; task_id is the row's index there."""
        row = {
            "task_id": index,
            "input_ids": list(self.input_ids),
            "output_tokens": self.output_tokens,
        }
        return json.dumps(row, separators=(",", ":"))


@dataclass(slots=True)
class Counts:
    """Of numbers of tokens, row by row: rows themselves are not kept, there may be many."""

    least: int = 0
    most: int = 0
    total: int = 0

    def add(self, count: int) -> None:
        """A row's. Counts are 1 and more."""
        self.least = min(self.least or count, count)
        self.most = max(self.most, count)
        self.total += count


@dataclass(slots=True)
class Written:
    """How many rows were written, and how long they are."""

    num_rows: int
    inputs: Counts
    outputs: Counts


def random_rows(
    tokenizer: Tokenizer, num_requests: int, inputs: Lengths, outputs: Lengths, seed: int
) -> Iterator[DatasetRow]:
    """Prompts of random ordinary tokens: special ones (end of text, ...) are never drawn."""
    generator = np.random.default_rng(seed)
    ordinary = np.array(tokenizer.ordinary_ids, np.int64)
    if not len(ordinary):
        raise TokenizerError(
            f"the tokenizer in {tokenizer.folder} has special tokens alone; prompts are drawn from "
            "the others",
            fix="name the model's own tokenizer with --tokenizer",
        )
    for _ in range(num_requests):
        count = inputs.draw(generator)
        places = generator.integers(0, len(ordinary), count)
        yield DatasetRow(ordinary[places].tolist(), outputs.draw(generator))


def write_rows(rows: Iterable[DatasetRow], output: Path | None, stdout: IO[str] | None) -> Written:
    """Print the rows where there is a stdout, and write them to a file that appears when it is
    complete where there is an output."""
    written = Written(0, Counts(), Counts())
    with ExitStack() as stack:
        files = [] if stdout is None else [stdout]
        if output is not None:
            files.append(stack.enter_context(replacing(output, "w")))
        for row in rows:
            for file in files:
                file.write(row.to_json(written.num_rows) + "\n")
            written.num_rows += 1
            written.inputs.add(len(row.input_ids))
            written.outputs.add(row.output_tokens)
        if stdout is not None:
            stdout.flush()
    return written


def summary(written: Written, num_asked: int | None = None) -> str:
    """One line for people: how many requests, how long, and how many there were to be."""
    num_rows = written.num_rows
    parts = [
        f"{name} tokens {of.least} to {of.most}, mean {of.total / num_rows:.1f}"
        for name, of in (("input", written.inputs), ("output", written.outputs))
    ]
    count = f"{num_rows} request{'' if num_rows == 1 else 's'}"
    if num_asked is not None and num_asked > num_rows:
        count += f" of the {num_asked} requested, as the file has no more"
    return f"{count}: {'; '.join(parts)}"


def open_tokenizer(name: str) -> Tokenizer:
    """The tokenizer of a model folder or an engine directory, or of a model on the Hugging Face
    hub by its name. Raises TokenizerError."""
    folder = Path(name)
    if folder.exists():
        inner = folder / TOKENIZER_FOLDER
        return Tokenizer(inner if inner.is_dir() else folder, "--tokenizer")
    if folder.is_absolute() or name.count("/") != 1:
        raise TokenizerError(
            f"--tokenizer {name} is no folder, and no OWNER/NAME of a model",
            fix="name a folder with tokenizer.json, an engine directory, or a model on the Hugging "
            "Face hub by OWNER/NAME",
        )
    from huggingface_hub import snapshot_download

    try:
        return Tokenizer(Path(snapshot_download(name, allow_patterns=_HUB_FILES)), "--tokenizer")
    except TokenizerError:
        raise
    except Exception as error:  # the library raises whatever its network stack does
        reason = str(error).strip().split("\n")[0]
        raise TokenizerError(
            f"--tokenizer {name} is no folder, and the Hugging Face hub gives no tokenizer: "
            f"{type(error).__name__}: {reason}",
            fix="name a folder with tokenizer.json, or an engine directory",
        ) from error
