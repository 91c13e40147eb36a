"""The CPU backend: a C++ library that runs a whole step in one call."""

from llmctl.plugins.backends.cpu.binding import (
    instruction_sets,
    num_threads,
    set_instruction_set,
    set_num_threads,
)
from llmctl.plugins.backends.cpu.program import CpuProgram
from llmctl.plugins.backends.cpu.sampling import CpuSampling

__all__ = [
    "CpuProgram",
    "CpuSampling",
    "instruction_sets",
    "num_threads",
    "set_instruction_set",
    "set_num_threads",
]
