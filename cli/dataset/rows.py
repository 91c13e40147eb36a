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


def write_rows(
    rows: Iterable[DatasetRow], output: Path | None, stdout: IO[str] | None
) -> list[DatasetRow]:
    """Print the rows where there is a stdout, and write them to a file that appears when it is
    complete where there is an output."""
    written = []
    with ExitStack() as stack:
        files = [] if stdout is None else [stdout]
        if output is not None:
            files.append(stack.enter_context(replacing(output, "w")))
        for index, row in enumerate(rows):
            for file in files:
                file.write(row.to_json(index) + "\n")
            written.append(row)
        if stdout is not None:
            stdout.flush()
    return written


def summary(rows: Sequence[DatasetRow], num_asked: int | None = None) -> str:
    """One line for people: how many requests, how long, and how many there were to be."""
    inputs, outputs = ([len(r.input_ids) for r in rows], [r.output_tokens for r in rows])
    parts = [
        f"{name} tokens {min(counts)} to {max(counts)}, mean {sum(counts) / len(counts):.1f}"
        for name, counts in (("input", inputs), ("output", outputs))
    ]
    count = f"{len(rows)} request{'' if len(rows) == 1 else 's'}"
    if num_asked is not None and num_asked > len(rows):
        count += f" of the {num_asked} asked for, as the file has no more"
    return f"{count}: {'; '.join(parts)}"


def open_tokenizer(name: str) -> Tokenizer:
    """The tokenizer of a model folder or an engine directory, or of a model on the Hugging Face
    hub by its name. Raises TokenizerError."""
    folder = Path(name)
    if folder.is_dir():
        inner = folder / TOKENIZER_FOLDER
        return Tokenizer(inner if inner.is_dir() else folder, "--tokenizer")
    if folder.is_absolute() or name.count("/") != 1:
        raise TokenizerError(
            f"--tokenizer {name} is no folder, and no model's name on the Hugging Face hub",
            fix="name a folder with tokenizer.json, or an engine directory",
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
