"""The CPU backend: a C++ library that runs a whole step in one call."""

from llmctl.plugins.cpu.library import (
    argmax_rows,
    instruction_sets,
    num_threads,
    set_instruction_set,
    set_num_threads,
)
from llmctl.plugins.cpu.program import CpuProgram

__all__ = [
    "CpuProgram",
    "argmax_rows",
    "instruction_sets",
    "num_threads",
    "set_instruction_set",
    "set_num_threads",
]
