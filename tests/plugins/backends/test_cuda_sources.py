"""What a kernel's binary depends on: found completely, and alike in every process."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import triton
import triton.language as tl

from llmctl.errors import KernelCompileError
from llmctl.plugins.backends.cuda.sources import included_files, load_function, triton_sources

CONTEXT = "llmctl.plugins.ops.paged_attention.triton.context:context"
GENERATION = "llmctl.plugins.ops.paged_attention.triton.generation:generation"
READ = """
import json, sys
from llmctl.plugins.backends.cuda.sources import load_function, triton_sources
print(json.dumps({name: triton_sources(load_function(name)) for name in sys.argv[1:]}))
"""

STEP: tl.constexpr = tl.constexpr(3)


@triton.jit
def add_step(value):
    return value + STEP


@triton.jit
def add_twice(value):
    return add_step(add_step(value))


@triton.jit
def kernel(out):
    tl.store(out, add_twice(1))


def read_elsewhere(*names: str) -> dict[str, list[str]]:
    """The sources of some functions, asked for in this order in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", READ, *names], check=True, capture_output=True, text=True
    )
    found: dict[str, list[str]] = json.loads(done.stdout)
    return found


def test_sources_are_the_same_whatever_a_process_asked_for_before():
    first = read_elsewhere(CONTEXT, GENERATION)
    assert first == read_elsewhere(GENERATION, CONTEXT)
    assert load_function(CONTEXT).cache_key  # asking is what might change the answer
    assert triton_sources(load_function(CONTEXT)) == first[CONTEXT]


def test_functions_and_constants_are_found_through_other_functions(monkeypatch):
    before = triton_sources(kernel)
    assert [text.split("(")[0] for text in before if text.startswith("def ")] == [
        "def kernel",
        "def add_twice",
        "def add_step",
    ]
    assert "STEP = 3" in before
    monkeypatch.setitem(globals(), "STEP", tl.constexpr(4))
    assert set(triton_sources(kernel)) ^ set(before) == {"STEP = 3", "STEP = 4"}


def test_an_include_from_elsewhere_is_refused(tmp_path):
    source = tmp_path / "kernel.cu"
    source.write_text('#include "absent.cuh"\n')
    with pytest.raises(KernelCompileError, match="absent.cuh"):
        included_files(source, tmp_path)
