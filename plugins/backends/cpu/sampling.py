"""The CPU backend's sampling: rows of logits in, tokens or distributions out, in one C call."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import addressof, c_char
from functools import cached_property
from struct import Struct
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from llmctl.plugins.backends.cpu.binding import check, load_kernels
from llmctl.plugins.ops.sampling.spec import SamplingRow, has_penalties

if TYPE_CHECKING:
    from ctypes import CDLL

_ROW = Struct("=6d Q QQ q II 4i")  # SamplingRow of abi.h
_first_byte: Any = c_char.from_buffer  # of any buffer; numpy's stubs do not say that arrays are
_FLOAT32, _FLOAT64 = np.dtype(np.float32), np.dtype(np.float64)


class CpuSampling:
    """The compiled kernels as a `SamplingBackend`. Logits are C-contiguous float32; a row that
    holds NaN gives the token -1."""

    @cached_property
    def _library(self) -> CDLL:
        return load_kernels()

    def argmax(self, logits: NDArray[np.float32]) -> NDArray[np.int32]:
        """The best id of each row [rows, vocab]; the lowest id on ties."""
        rows, vocab = logits.shape
        found = np.empty(rows, np.int32)
        status = self._library.llmctl_argmax(_logits(logits), rows, vocab, _address(found))
        if status:
            check(status)
        return found

    def sample_rows(
        self, logits: NDArray[np.float32], rows: Sequence[SamplingRow]
    ) -> NDArray[np.int64]:
        """One token per row of `logits` [len(rows), vocab]."""
        tokens = np.empty(len(rows), np.int64)
        self._call(self._library.llmctl_sample, logits, rows, tokens)
        return tokens

    def processed_probs(
        self, logits: NDArray[np.float32], rows: Sequence[SamplingRow]
    ) -> NDArray[np.float64]:
        """The distribution [len(rows), vocab] that each row is drawn from."""
        probs = np.empty(logits.shape, np.float64)
        self._call(self._library.llmctl_probs, logits, rows, probs)
        return probs

    def draw_from_probs(self, probs: NDArray[np.float64], row: SamplingRow) -> int:
        """Sample from a distribution [vocab] with the row's keyed noise."""
        assert probs.dtype == _FLOAT64 and probs.ndim == 1 and probs.flags.c_contiguous
        packed, _keep = _pack([row])
        token: int = self._library.llmctl_draw(_address(probs), len(probs), packed)
        return token

    def uniforms(self, rows: Sequence[SamplingRow]) -> NDArray[np.float64]:
        """One uniform in (0, 1) per row, keyed by its (seed, position, stream)."""
        packed, _keep = _pack(rows)
        found = np.empty(len(rows))
        self._library.llmctl_uniforms(packed, len(rows), _address(found))
        return found

    def top_log_probs(
        self, logits: NDArray[np.float32], count: int
    ) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """(ids, log-probabilities) [rows, count] of the largest of each row, the largest first;
        where logits tie, the smaller id."""
        rows, vocab = logits.shape
        ids, values = np.empty((rows, count), np.int32), np.empty((rows, count), np.float32)
        function = self._library.llmctl_top_log_probs
        check(function(_logits(logits), rows, vocab, count, _address(ids), _address(values)))
        return ids, values

    def log_softmax_at(self, logits: NDArray[np.float32], tokens: Sequence[int]) -> list[float]:
        """log p(tokens[i]) under the raw row i of `logits` [len(tokens), vocab]."""
        ids = np.array(tokens, np.int64)
        rows, vocab = logits.shape
        assert rows == len(ids) and ((ids >= 0) & (ids < vocab)).all()
        found = np.empty(rows)
        check(
            self._library.llmctl_log_softmax_at(
                _logits(logits), vocab, _address(ids), rows, _address(found)
            )
        )
        result: list[float] = found.tolist()
        return result

    def _call(
        self,
        function: Any,
        logits: NDArray[np.float32],
        rows: Sequence[SamplingRow],
        out: NDArray[Any],
    ) -> None:
        count, vocab = logits.shape
        assert count == len(rows)
        packed, _keep = _pack(rows)
        status = function(_logits(logits), vocab, packed, count, _address(out))
        if status:
            check(status)


def _pack(rows: Sequence[SamplingRow]) -> tuple[bytes, list[NDArray[np.int32]]]:
    """The rows as the kernel reads them, and the arrays that they point into."""
    keep: list[NDArray[np.int32]] = []
    packed = []
    for row in rows:
        params = row.params
        counts = banned = num_counts = 0
        if row.counts is not None and has_penalties(params):
            assert row.counts.dtype == np.int32 and row.counts.flags.c_contiguous
            counts, num_counts = _address(row.counts), len(row.counts)
        if row.banned:
            keep.append(np.array(row.banned, np.int32))
            banned = _address(keep[-1])
        packed.append(
            _ROW.pack(
                params.temperature,
                1.0 if params.top_p is None else params.top_p,
                params.min_p,
                params.repetition_penalty,
                params.presence_penalty,
                params.frequency_penalty,
                row.seed,
                counts,
                banned,
                num_counts,
                row.position,
                row.stream,
                min(params.top_k or 0, 0x7FFFFFFF),
                len(row.banned),
                params.is_greedy,
                0,
            )
        )
    return b"".join(packed), keep


def _logits(logits: NDArray[np.float32]) -> int:
    assert logits.dtype == _FLOAT32 and logits.flags.c_contiguous
    return _address(logits)


def _address(array: NDArray[Any]) -> int:
    if array.size and array.flags.writeable:  # five times as fast as the interface dictionary
        return addressof(_first_byte(array))
    address: int = array.__array_interface__["data"][0]
    return address
