"""Integer arrays from .npy files that nobody vouches for.

numpy's own reader allocates what a header promises before it looks at the file, and would unpickle;
here a header is held against the file's size and dtype first, and only integers are read.
"""

from __future__ import annotations

import math
import os
import struct
from pathlib import Path
from typing import IO, Any

from llmctl.errors import BadConfig
from llmctl.quantize.format import clipped, shown

_MAGIC = b"\x93NUMPY"
_VERSIONS = {b"\x01\x00": "<H", b"\x02\x00": "<I"}  # how each writes the length of its header
_MOST_HEADER = 10_000  # bytes; an array of integers has 118


def read_integers(path: Path) -> Any:
    """The integers of a .npy file of one or two dimensions, as an array [rows, tokens].

    Raises BadConfig for anything else: archives, pickled objects, other dtypes, and headers that
    say other than the file holds.
    """
    import numpy as np

    with path.open("rb") as file:
        shape, is_fortran, dtype = _header(file, path)
        if len(shape) not in (1, 2) or dtype.kind not in "iu":
            raise BadConfig(
                f"{path} is not a plain .npy array of integers [rows, tokens]: it has shape "
                f"{shown(shape)} and dtype {dtype}"
            )
        wanted = math.prod(shape) * dtype.itemsize
        found = os.fstat(file.fileno()).st_size - file.tell()
        if found != wanted:
            raise BadConfig(
                f"{path} is not a plain .npy array: its header tells of {shown(wanted)} bytes of "
                f"values, and {found} are there"
            )
        flat = np.frombuffer(file.read(), dtype)
    array = flat.reshape(shape, order="F" if is_fortran else "C")
    return array[None] if array.ndim == 1 else array


def _header(file: IO[bytes], path: Path) -> tuple[tuple[int, ...], bool, Any]:
    """(shape, whether columns come first, dtype); the file is left at its values."""
    from numpy.lib import format as npy

    start = file.read(8)
    if start.startswith(b"PK"):
        raise BadConfig(f"{path} is an archive of arrays; one plain .npy array is wanted")
    form = _VERSIONS.get(start[6:])
    if not start.startswith(_MAGIC) or form is None:
        raise BadConfig(
            f"{path} is not a plain .npy array: it begins with {start!r}, version 1.0 or 2.0 is "
            "read"
        )
    length = file.read(struct.calcsize(form))
    try:
        (size,) = struct.unpack(form, length)
        if size > _MOST_HEADER:
            raise ValueError(f"a header of {size} bytes; at most {_MOST_HEADER} are read")
        file.seek(len(start))
        read: Any = npy.read_array_header_1_0 if form == "<H" else npy.read_array_header_2_0
        shape, is_fortran, dtype = read(file)
    except Exception as error:  # numpy's parser raises what Python's does, MemoryError among it
        reason = clipped(str(error) or type(error).__name__)
        raise BadConfig(f"{path} is not a plain .npy array: {reason}") from error
    if not all(type(number) is int and 0 <= number < 1 << 62 for number in shape):
        raise BadConfig(f"{path} is not a plain .npy array: its shape is {shown(shape)}")
    return shape, is_fortran, dtype
