"""Is a file what `torch.save` writes of tensors by name? Asked before torch reads it.

torch's own reader with `weights_only` calls nothing that a file names but what torch holds safe,
and does not ask what that takes: a record that is compressed to a thousandth is unpacked into
memory, a `bytearray` of any size is made, and a dictionary may have a key that takes for ever to
hash (a tuple that has the same tuple twice, which has the same tuple twice, ...) or more stack than
there is (a tuple within another, a hundred thousand times). `torch.save` writes none of it.
"""

from __future__ import annotations

import pickletools
import zipfile
from pathlib import Path

_MOST_BYTES = 1 << 20  # of the pickle, which has names and shapes; a head's takes some thousand
_MOST_TUPLES = 10_000  # a tensor has four; one within another is hashed by recursion
_OPERATIONS = {
    *("PROTO", "STOP", "MARK", "GLOBAL", "REDUCE", "BUILD", "BINPERSID"),
    *("BINPUT", "LONG_BINPUT", "BINGET", "LONG_BINGET"),
    *("EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"),
    *("EMPTY_DICT", "SETITEM", "SETITEMS", "EMPTY_LIST", "APPEND", "APPENDS"),
    *("NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "BINUNICODE"),
}
_STORAGES = ("Double", "Float", "Half", "BFloat16", "Long", "Int", "Short", "Char", "Byte", "Bool")
_GLOBALS = {
    "collections OrderedDict",
    "torch._utils _rebuild_parameter",
    "torch._utils _rebuild_tensor_v2",
    "torch._utils _rebuild_tensor_v3",  # of dtypes that no typed storage is for
    "torch.storage UntypedStorage",
    "torch float8_e4m3fn",
    "torch float8_e5m2",
    *(f"torch {kind}Storage" for kind in _STORAGES),
}


def check_form(path: Path) -> None:
    """Raises ValueError, or whatever else reading such a file comes to."""
    import torch

    with zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            if info.compress_type != zipfile.ZIP_STORED:
                raise ValueError("its records are compressed")
            if info.filename.lower().endswith("/data.pkl") and info.file_size > _MOST_BYTES:
                raise ValueError(f"its pickle has {info.file_size} bytes, at most {_MOST_BYTES}")
    # As torch finds it: an archive may have two of that name.
    _check_pickle(torch._C.PyTorchFileReader(str(path)).get_record("data.pkl"))


def _check_pickle(data: bytes) -> None:
    """Raises ValueError. No operation that is taken moves a tuple up the stack, so what is kept
    after one that makes a tuple is that tuple."""
    if len(data) > _MOST_BYTES:
        raise ValueError(f"its pickle has {len(data)} bytes, at most {_MOST_BYTES}")
    kept: set[object] = set()  # places of tuples in the memo
    num_tuples, made_tuple = 0, False
    for operation, argument, place in pickletools.genops(data):
        name = operation.name
        if name not in _OPERATIONS or (name == "PROTO" and place):
            raise ValueError(f"its pickle has the operation {name}")
        if name == "GLOBAL" and argument not in _GLOBALS:
            raise ValueError(f"it names {argument!r:.100}")
        if name.endswith("PUT"):
            if made_tuple:
                kept.add(argument)
            else:
                kept.discard(argument)
        elif name.endswith("GET") and argument in kept:
            raise ValueError("it has one tuple in two places")
        else:
            made_tuple = "TUPLE" in name
            num_tuples += made_tuple
    if num_tuples > _MOST_TUPLES:
        raise ValueError(f"it has {num_tuples} tuples, at most {_MOST_TUPLES}")
