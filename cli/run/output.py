"""What a run prints on stdout: run.py's lines, streaming or at the end, or one JSON object."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from llmctl.cli.run.generate import Row, SequenceOutput
from llmctl.cli.streams import json_line
from llmctl.errors import LlmctlError


class Decoder(Protocol):
    """What is needed of a tokenizer."""

    def decode(self, token_ids: Sequence[int]) -> str: ...
    def decode_so_far(self, token_ids: Sequence[int]) -> str: ...


class Shown(Protocol):
    """What is needed of stdout."""

    def write(self, text: str, /) -> object: ...
    def flush(self) -> None: ...


def input_line(row: Row) -> str:
    """The line that opens a row."""
    return f'Input [Text {row.index}]: "{row.prompt}"'


def output_line(row: Row, index: int, text: str) -> str:
    """The line of one returned sequence. "Beam" is part of the form; there is one beam."""
    sequence = f" Seq {index}" if len(row.sequences) > 1 else ""
    return f'Output [Text {row.index}{sequence} Beam 0]: "{text}"'


def print_rows(rows: Sequence[Row], decoder: Decoder, file: Shown) -> None:
    """Every row's input and outputs. A row that failed has its input line alone."""
    for row in rows:
        print(input_line(row), file=file)
        if row.error is None:
            for index, sequence in enumerate(row.sequences):
                text = decoder.decode(sequence.token_ids)
                print(output_line(row, index, text), file=file)
    file.flush()


class StreamPrinter:
    """Reprints an output's line with the text so far, every `interval` responses and at the end."""

    def __init__(self, decoder: Decoder, interval: int, file: Shown) -> None:
        self._decoder = decoder
        self._interval = interval
        self._file = file
        self._num_responses: dict[tuple[int, int], int] = {}
        self._opened: set[int] = set()

    def __call__(self, row: Row, index: int) -> None:
        """A response for `row` has arrived."""
        sequence = row.sequences[index]
        is_final = sequence.finish_reason.value != "not_finished"
        key = (row.index, index)
        self._num_responses[key] = self._num_responses.get(key, 0) + 1
        if not is_final and self._num_responses[key] % self._interval:
            return
        if row.index not in self._opened:
            self._opened.add(row.index)
            print(input_line(row), file=self._file)
        decode = self._decoder.decode if is_final else self._decoder.decode_so_far
        print(output_line(row, index, decode(sequence.token_ids)), file=self._file, flush=True)


def row_fix(error: LlmctlError) -> str:
    """The next step after the error of one prompt."""
    return error.fix or "correct this prompt and its settings, or leave it out"


def error_json(error: Exception) -> dict[str, Any]:
    """The error of one prompt as `--json` shows it."""
    if isinstance(error, LlmctlError):
        name, fix, code = error.name, row_fix(error), error.exit_code
    else:
        name, fix, code = type(error).__name__, "", 70
    return {"name": name, "message": str(error), "fix": fix, "exit_code": code}


def row_json(row: Row, decoder: Decoder) -> list[dict[str, Any]]:
    """One object per returned sequence, or one with the error."""
    opening: dict[str, Any] = {"index": row.index, "prompt": row.prompt}
    if row.request is not None:
        opening["num_prompt_tokens"] = len(row.request.input_token_ids)
        if row.request.sampling_config.accepts_typical:
            opening["is_lossy"] = True
    if row.error is not None:
        return [{**opening, "error": error_json(row.error)}]
    return [
        {**opening, "sequence": index, **_sequence_json(sequence, decoder)}
        for index, sequence in enumerate(row.sequences)
    ]


def _sequence_json(sequence: SequenceOutput, decoder: Decoder) -> dict[str, Any]:
    result: dict[str, Any] = {
        "text": decoder.decode(sequence.token_ids),
        "token_ids": sequence.token_ids,
        "finish_reason": sequence.finish_reason.value,
    }
    if sequence.log_probs:
        # A banned token has log-probability -inf, which JSON cannot say.
        result["log_probs"] = [value if value > -1e308 else None for value in sequence.log_probs]
        total = sequence.cum_log_prob
        result["cum_log_prob"] = total if total > -1e308 else None
    return result


def run_json(rows: Sequence[Row], decoder: Decoder, stats: Mapping[str, Any]) -> str:
    """The one object that `run --json` prints."""
    outputs = [item for row in rows for item in row_json(row, decoder)]
    return json_line({"outputs": outputs, "stats": stats})
