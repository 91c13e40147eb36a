"""The part of the tables of tests/support/attention_compiled.py that takes more cores than CI has;
it needs no GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.attention_compiled import (
    BY_WARP,
    CHUNKS_ON_A_GPU_MACHINE,
    ON_A_GPU_MACHINE,
    PAGES_ON_A_GPU_MACHINE,
    TREES_HERE,
    check_chains,
    check_chunk,
    check_pages,
    check_trees,
    check_verification,
    check_windows,
    of_chains,
    of_pages,
    of_verification,
)
from support.attention_models import OF_SIZE, world_of
from support.trees import WORLDS

from llmctl.plugins.backends.cuda.kernel_spec import KernelSpec


@pytest.mark.parametrize(("heads", "kv"), ON_A_GPU_MACHINE)
def test_kernels_compile_to_tensor_core_groups_without_spills(heads: str, kv: str) -> None:
    check_chains(of_chains(world_of(heads, kv)))


@pytest.mark.parametrize("specs", BY_WARP)
@pytest.mark.parametrize("tokens_per_block", PAGES_ON_A_GPU_MACHINE)
def test_kernels_of_warps_compile_for_every_page_size(
    tokens_per_block: int, specs: Callable[..., list[KernelSpec]]
) -> None:
    check_pages(of_pages(tokens_per_block, specs))


@pytest.mark.parametrize("heads", OF_SIZE.values())
@pytest.mark.parametrize("kv", ["int8", "bfloat16", "fp8"])
def test_verification_sends_through_shared_memory_and_has_room(heads: str, kv: str) -> None:
    check_verification(of_verification(heads, kv))


@pytest.mark.parametrize(("heads", "kv"), CHUNKS_ON_A_GPU_MACHINE)
def test_chunks_keep_sums_in_registers(heads: tuple[int, int], kv: str) -> None:
    check_chunk(heads, kv)


def test_windows_compile_without_spills() -> None:
    check_windows("int8")


@pytest.mark.parametrize("name", [name for name in WORLDS if name not in TREES_HERE])
def test_trees_compile_with_few_spills_and_two_fit_a_multiprocessor(name: str) -> None:
    check_trees(name)
