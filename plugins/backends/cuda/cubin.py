"""Reads what a cubin says about its kernel: registers, stack (spilled) bytes, parameters.

A cubin is an ELF file. `.nv.info` holds one record per attribute and function, `.nv.info.<entry>`
those of one kernel; numbers and layouts are those that `cuobjdump -elf` prints.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass

_MAX_THREADS = 0x05  # __launch_bounds__ as (x, y, z); absent without it
_MIN_STACK_SIZE = 0x12  # (symbol, bytes): a thread's stack, with what it calls and spills
_KPARAM_INFO = 0x17  # (index, ordinal, offset, packed size)
_REGCOUNT = 0x2F  # (symbol, registers a thread)
_SIZED = 0x04  # record format: a 16-bit length, then that many bytes


@dataclass(frozen=True, slots=True)
class CubinInfo:
    """Resources of one kernel; `parameters` are byte sizes in order, max_threads 0 if unstated."""

    registers: int
    local_bytes: int
    parameters: tuple[int, ...]
    max_threads: int


def read_cubin(cubin: bytes, entry: str) -> CubinInfo:
    """Resources of the kernel `entry`; ValueError where the file has no such kernel."""
    sections = dict(elf_sections(cubin))
    if f".nv.info.{entry}" not in sections:
        raise ValueError(f"the cubin has no kernel {entry!r}")
    symbol = _symbols(sections).index(entry)
    registers, local_bytes = 0, 0
    for attribute, payload in _records(sections[".nv.info"]):
        if attribute in (_REGCOUNT, _MIN_STACK_SIZE):
            owner, value = struct.unpack("<II", payload)
            if owner == symbol and attribute == _REGCOUNT:
                registers = value
            elif owner == symbol:
                local_bytes = value
    sizes, max_threads = {}, 0
    for attribute, payload in _records(sections[f".nv.info.{entry}"]):
        if attribute == _KPARAM_INFO:
            _, ordinal, _, packed = struct.unpack("<IHHI", payload)
            sizes[ordinal] = packed >> 18
        elif attribute == _MAX_THREADS:
            max_threads = math.prod(struct.unpack("<III", payload))
    parameters = tuple(sizes[i] for i in range(len(sizes)))
    return CubinInfo(registers, local_bytes, parameters, max_threads)


def elf_sections(elf: bytes) -> Iterator[tuple[str, bytes]]:
    """Name and content of each; code is in `.text.<entry>`."""
    if elf[:5] != b"\x7fELF\x02":
        raise ValueError("not a 64-bit ELF file")
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    entry_size, count, names_index = struct.unpack_from("<HHH", elf, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", elf, table + i * entry_size) for i in range(count)]
    names = headers[names_index][4]
    for name, kind, _, _, offset, size in headers:
        end = elf.index(b"\0", names + name)
        yield elf[names + name : end].decode(), b"" if kind == 8 else elf[offset : offset + size]


def _symbols(sections: dict[str, bytes]) -> list[str]:
    table, strings = sections[".symtab"], sections[".strtab"]
    names = []
    for (start,) in (struct.unpack_from("<I", table, at) for at in range(0, len(table), 24)):
        names.append(strings[start : strings.index(b"\0", start)].decode())
    return names


def _records(info: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at < len(info):
        kind, attribute, size = struct.unpack_from("<BBH", info, at)
        at += 4
        if kind == _SIZED:
            yield attribute, info[at : at + size]
            at += size
