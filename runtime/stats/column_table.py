"""Rows of numbers stored as columns, for histories that grow by a row per token.

A list of a hundred thousand small objects is visited by every full garbage collection, which stops
all threads for that time; columns are two or three objects regardless of length.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Generic, TypeVar, overload

Row = TypeVar("Row", bound=tuple[float, ...])


class ColumnTable(Sequence[Row], Generic[Row]):
    """Behaves like a list of rows; each row is created when it is accessed.

    `kinds` has a type code for each field of `make`, as in `array.array`: "q" for integers, "i" for
    small ones, "d" for reals.
    """

    __slots__ = ("_columns", "_make")

    def __init__(
        self, make: Callable[..., Row], kinds: str, rows: Iterable[tuple[float, ...]] = ()
    ) -> None:
        self._make = make
        fields = list(zip(*rows, strict=True)) or [()] * len(kinds)
        self._columns = tuple(array(k, field) for k, field in zip(kinds, fields, strict=True))

    def append(self, row: tuple[float, ...]) -> None:
        """One more row at the end."""
        for column, value in zip(self._columns, row, strict=True):
            column.append(value)

    def __len__(self) -> int:
        return len(self._columns[0])

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            return list(map(self._make, *(column[index] for column in self._columns)))
        return self._make(*(column[index] for column in self._columns))

    def __iter__(self) -> Iterator[Row]:
        return map(self._make, *self._columns)

    def __eq__(self, other: object) -> bool:  # and so no hash: what is in it changes
        return isinstance(other, Sequence) and list(self) == list(other)
