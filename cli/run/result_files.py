"""Files of results, which grow row by row: --output-csv, --output-jsonl and the arrays.

A file has its final name when every prompt has ended. What a run that was cut short had written
is kept beside it as NAME.partial.ENDING, rows of whole prompts alone: those before the first prompt
that had not ended, and in a .jsonl, whose rows have their index, all others that had.
"""

from __future__ import annotations

import io
import json
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from llmctl.cli.output_files import keeping
from llmctl.cli.run.generate import Row, SequenceOutput
from llmctl.cli.run.output import Decoder, row_json
from llmctl.cli.run.results import is_lost


@dataclass(frozen=True, slots=True)
class Files:
    """Where results go besides stdout."""

    csv: Path | None = None
    npy: Path | None = None
    jsonl: Path | None = None
    log_probs_npy: Path | None = None
    cum_log_probs_npy: Path | None = None


class _Output(Protocol):
    """One file. kept: where an incomplete one is, once it is closed. add_ended: of a run that was
    cut, the rows that had ended behind a prompt that had not; only for one that has_indices."""

    path: Path
    num_rows: int  # added, one for each prompt
    has_indices: bool  # its rows say which prompt is theirs, so some may be missing

    @property
    def kept(self) -> Path | None: ...
    def add(self, row: Row) -> None: ...
    def add_ended(self, rows: Sequence[Row]) -> None: ...
    def close(self, is_whole: bool) -> None: ...


class _Lines:
    """A file of lines, each written when its row has ended; nothing of it stays in memory."""

    has_indices = False

    def __init__(self, path: Path, lines: Callable[[Row], Iterable[str]]) -> None:
        self.path = path
        self.num_rows = 0
        self._lines = lines
        self._file = keeping(path)
        self._file.__enter__()

    @property
    def kept(self) -> Path | None:
        return self._file.kept

    def add(self, row: Row) -> None:
        self._file.append("".join(f"{line}\n" for line in self._lines(row)).encode())
        self.num_rows += 1

    def add_ended(self, rows: Sequence[Row]) -> None:
        pass

    def close(self, is_whole: bool) -> None:
        self._file.close(is_whole)


class _IndexedLines(_Lines):
    """Lines that say which prompt is theirs."""

    has_indices = True

    def __init__(self, path: Path, lines: Callable[[Row], Iterable[str]]) -> None:
        super().__init__(path, lines)
        self._next = 0

    def add(self, row: Row) -> None:
        super().add(row)
        self._next = row.index + 1

    def add_ended(self, rows: Sequence[Row]) -> None:
        """The cut may have been in the middle of a row, which is written again."""
        self._file.go_back()
        for row in rows[self._next :]:
            if row.has_ended and not is_lost(row):
                self.add(row)


class _Array:
    """A .npy array [outputs, longest], padded on the right. Its first line can be placed when the
    longest is known, so values are held until the end, 4 bytes each."""

    has_indices = False

    def __init__(
        self,
        path: Path,
        dtype: str,
        pad: float,
        values: Callable[[SequenceOutput], Sequence[float]],
    ) -> None:
        self.path = path
        self.kept: Path | None = None
        self.num_rows = 0
        self._dtype, self._pad, self._values = dtype, pad, values
        self._rows: list[array[Any]] = []

    def add(self, row: Row) -> None:
        code = "i" if self._dtype == "<i4" else "f"
        self._rows += [array(code, self._values(sequence)) for sequence in _sequences(row)]
        self.num_rows += 1

    def add_ended(self, rows: Sequence[Row]) -> None:
        pass

    def close(self, is_whole: bool) -> None:
        if not is_whole and not self._rows:
            return
        file = keeping(self.path)
        file.__enter__()
        try:
            self._write(file)
        except BaseException:  # half of an array is none
            file.drop()
            raise
        file.close(is_whole)
        self.kept = file.kept

    def _write(self, file: keeping) -> None:
        import numpy as np
        from numpy.lib import format as npy

        longest = max(map(len, self._rows), default=0)
        header = io.BytesIO()
        shape = (len(self._rows), longest)
        write: Any = npy.write_array_header_1_0
        write(header, {"descr": self._dtype, "fortran_order": False, "shape": shape})
        file.append(header.getvalue())
        for values in self._rows:
            line = np.full(longest, self._pad, self._dtype)
            line[: len(values)] = values
            file.append(line.tobytes())


class ResultFiles:
    """All of them, from before the first row to after the last; a context manager.

    A file that cannot be written, as on a full disk, ends with what it has: the others and stdout
    get the following rows, too, and `raise_failure` raises its OSError. `say` is told what was kept
    of files that are not whole.
    """

    def __init__(
        self, files: Files, tokenizer: Any, rows: Sequence[Row], say: Callable[[str], None]
    ) -> None:
        self._rows, self._say = rows, say
        self._is_cut = False
        self._failure: OSError | None = None
        self._open: list[_Output] = []
        try:
            self._open_all(files, tokenizer)
        except BaseException:
            self._close(is_whole=False)
            raise

    def _open_all(self, files: Files, decoder: Any) -> None:
        if files.csv is not None:
            self._open.append(_Lines(files.csv, _csv_lines))
        if files.jsonl is not None:
            self._open.append(_IndexedLines(files.jsonl, lambda row: _json_lines(row, decoder)))
        if files.npy is not None:
            pad_id = -1 if decoder.end_id is None else decoder.end_id
            self._open.append(_Array(files.npy, "<i4", pad_id, lambda item: item.token_ids))
        nan = float("nan")
        if files.log_probs_npy is not None:
            path = files.log_probs_npy
            self._open.append(_Array(path, "<f4", nan, lambda item: item.log_probs))
        if files.cum_log_probs_npy is not None:
            self._open.append(_Array(files.cum_log_probs_npy, "<f4", nan, _total))

    def add(self, row: Row) -> None:
        """The outputs of a row that has ended; empty ones where it failed, so that files keep
        their lines aligned. Those without an index end with the first row that had nothing left to
        run on."""
        self._is_cut = self._is_cut or is_lost(row)
        for file in list(self._open):
            if self._is_cut and (is_lost(row) or not file.has_indices):
                continue
            try:
                file.add(row)
            except OSError as error:
                self._open.remove(file)
                self._failure = self._failure or error
                self._end(file, is_whole=False)

    def raise_failure(self) -> None:
        """Raises the OSError of the first file that could not be written, if there is one."""
        if self._failure is not None:
            raise self._failure

    def __enter__(self) -> ResultFiles:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._close(is_whole=kind is None and not self._is_cut)

    def _close(self, *, is_whole: bool) -> None:
        while self._open:
            file = self._open.pop(0)
            if not is_whole:
                try:
                    file.add_ended(self._rows)
                except OSError as error:
                    self._failure = self._failure or error
            self._end(file, is_whole)

    def _end(self, file: _Output, is_whole: bool) -> None:
        """Close it, and say what was kept of it where it is not whole."""
        try:
            file.close(is_whole)
        except OSError as error:
            self._failure = self._failure or error
            is_whole = False
        if not is_whole:
            count = f"{file.num_rows} of {len(self._rows)} prompts"
            where = "nothing is kept" if file.kept is None else f"kept in {file.kept}"
            self._say(f"{file.path} was not completed: it had {count}; {where}")


def _sequences(row: Row) -> list[SequenceOutput]:
    if row.error is None:
        return row.sequences
    count = row.request.sampling_config.num_return_sequences if row.request else 1
    return [SequenceOutput() for _ in range(count)]


def _csv_lines(row: Row) -> list[str]:
    """Token ids, one output a line; an empty line for a request that was refused."""
    return [",".join(map(str, sequence.token_ids)) for sequence in _sequences(row)]


def _json_lines(row: Row, decoder: Decoder) -> list[str]:
    items = row_json(row, decoder)
    return [json.dumps(item, ensure_ascii=False, allow_nan=False) for item in items]


def _total(sequence: SequenceOutput) -> list[float]:
    return [sequence.cum_log_prob] if sequence.token_ids else []
