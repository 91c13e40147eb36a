"""Plain text tables and sizes; nothing is cut off and nothing needs a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

Rows = Sequence[tuple[str, ...]]


def table(rows: Rows, right: Iterable[int] = ()) -> Iterator[str]:
    """Rows indented by two, columns as wide as their widest cell; `right` ones flush right.

    A cell stays in its row: what files of other people say may hold line ends, and sequences that
    a terminal would obey.
    """
    rows = [tuple(map(printable, row)) for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    is_right = set(right)
    for row in rows:
        cells = (
            cell.rjust(width) if index in is_right else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        yield f"  {'  '.join(cells)}".rstrip()


def printable(text: str) -> str:
    """The text with what would command a terminal as Python escapes it."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def size(count: int) -> str:
    """A size for people, in powers of ten."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return (
                f"{count / size:.3g} {unit}" if count < 1000 * size else f"{count // size} {unit}"
            )
    return f"{count} B"
