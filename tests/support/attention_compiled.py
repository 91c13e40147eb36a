"""What attention kernels must compile to, and for which heads, caches and pages that is checked.

CI compiles each kernel at least once for each type of cache and each class of head size, with what
takes most registers. Triton's, a second each, it compiles for each type of cache with heads of 128,
of INT8 with those that are padded to it; those of 64 are in an engine that tests/builder builds.
The rest of the table takes four times as long and is compiled where there are more cores than two,
on the machine with the GPU (tests/gpu/test_attention_compiled.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import torch

from llmctl.plugins.backends.cuda.compiler import compile_kernel
from llmctl.plugins.backends.cuda.kernel_spec import KernelSpec
from llmctl.plugins.ops.paged_attention import kernel
from llmctl.plugins.ops.paged_attention.batch import batch
from llmctl.plugins.ops.paged_attention.chunk import chunk
from llmctl.plugins.ops.paged_attention.triton.specs import split_spec
from llmctl.plugins.ops.paged_attention.verification import verification
from support.attention import FP8, World
from support.attention_models import CACHES, world_of
from support.kernel import compile_all
from support.trees import world_of as tree_world

OF_FLOAT16 = [kv for kv, (dtype, *_) in CACHES.items() if dtype == torch.float16]
OF_BFLOAT16 = [kv for kv in CACHES if kv not in OF_FLOAT16]
# (heads, cache), of which CI compiles the kernels with most to do.
# FP16 takes the registers that BF16 does, but of wide heads in a cache of 16 bits.
HERE = [
    *(("70b", kv) for kv in ("fp8", "bfloat16", "int8", "float16")),
    *(("1b", kv) for kv in ("bfloat16", "int8", "fp8")),
    *(("96 wide", kv) for kv in OF_BFLOAT16),
    *[("0.5b", "fp8 of float16"), ("3b", "fp8")],  # groups of 7 and 3
]
TRITON_HERE = [*(("70b", kv) for kv in ("fp8", "bfloat16", "float16")), ("96 wide", "int8")]
ON_A_GPU_MACHINE = [
    *HERE,
    *(("70b", kv) for kv in OF_FLOAT16 if kv != "float16"),
    *(("0.5b", kv) for kv in OF_FLOAT16 if kv != "fp8 of float16"),
    *(("80 wide", kv) for kv in CACHES),
    *(("96 wide", kv) for kv in OF_FLOAT16),
    ("8b", "fp8"),
]
# Worlds of support/trees.py: one of each class of head size, the wide one with most to do.
TREES_HERE = ("64, FP8", "96, float16, sinks")
# Tokens per block, for kernels with most to do and for all: more pages to a tile, one, and more
# tiles to a page. With 8 a kernel has the registers that it has with 16, or more.
PAGES_HERE, PAGES_ON_A_GPU_MACHINE = (8, 1024), (8, 16, 64, 128, 1024)
# Of chunk.cu, by (query heads, key/value heads) and cache.
_CHUNK_HEADS, _CHUNK_CACHES = ((64, 8), (7, 1), (3, 3)), ("bfloat16", "float16", "fp8 of float16")
CHUNKS_HERE = [
    *(((64, 8), kv) for kv in ("fp8", *_CHUNK_CACHES)),
    *((heads, "fp8") for heads in _CHUNK_HEADS[1:]),
]
CHUNKS_ON_A_GPU_MACHINE = [(heads, kv) for heads in _CHUNK_HEADS[1:] for kv in _CHUNK_CACHES]
BY_WARP = (batch.batch_specs, verification.verification_specs)


def copies_to_shared_places(code: str) -> bool:
    """Whether machine code has a copy with an L2 policy whose target is in part a register of the
    whole warp: NVRTC 13.0 names registers there that nothing has written."""
    return re.search(r"LDGSTS\S* \[R\d+\+UR\d+[^;]*desc\[UR\d*[13579]\]", code) is not None


def of_chains(world: World) -> list[KernelSpec]:
    """All kernels but those for trees (paged_attention/test_trees.py, test_verification.py)."""
    specs = kernel.kernels(world.call([(0, 0, 1)]), world.limits())
    return [spec for spec in specs if not {"trees", "tree"} & set(spec.name.split("."))]


def chains_here(heads: str, kv: str) -> list[KernelSpec]:
    """Those of one of `HERE` that CI compiles."""
    specs = largest(of_chains(world_of(heads, kv)))
    return [s for s in specs if not s.is_triton or (heads, kv) in TRITON_HERE]


def largest(specs: Sequence[KernelSpec]) -> list[KernelSpec]:
    """Of binaries that differ in sizes alone those with most rows and with most work items, which
    take most registers; of those with a window and without, the one with it."""
    found: dict[tuple[object, ...], KernelSpec] = {}
    for names in (("ROWS", "UNITS"), ("UNITS", "ROWS"), ("COLUMNS", "TOGETHER")):
        for spec in sorted(specs, key=lambda spec: _values(spec, *names, "HAS_WINDOW")):
            found[names, spec.source, spec.constants.get("TREE")] = spec
    return list({spec.name: spec for spec in found.values()}.values())


def _values(spec: KernelSpec, *names: str) -> list[int]:
    return [int(spec.constants.get(name, 0)) for name in names]


def check_chains(specs: Sequence[KernelSpec]) -> None:
    """Products by tensor cores, nothing spilled, launches in order."""
    for spec, binary, code in compile_all(specs):
        if spec.constants.get("SEVERAL"):  # of groups of three, not in the loop over tiles
            tiles = code[code.index("HMMA") : code.rindex("HMMA")]
            assert binary.local_bytes <= 24 and not re.search(r"\b(LDL|STL)\b", tiles), spec.name
        elif not spec.constants.get("IMAGES"):  # check_chunk says what their copying warps spill
            assert binary.local_bytes == 0 and not re.search(r"\b(LDL|STL)\b", code), spec.name
        is_group = spec.entry not in ("batch", "verification")  # whose products are of one warp
        has_products = spec.entry != "images"  # what they read is written there
        assert ("HGMMA" in code) == (has_products and is_group), spec.name
        assert bool(re.search(r"\bHMMA", code)) == (has_products and not is_group), spec.name
        assert "ACQBULK" in code and "PREEXIT" in code, f"{spec.name} leaves launches unordered"
        if "generation" in spec.name:  # splits wait for each other: two must fit an SM
            assert 2 * binary.threads * (-(-binary.registers // 8) * 8) <= 1 << 16
            assert 2 * (binary.shared_bytes + 1024) <= 227 * 1024


def check_chunk(heads: tuple[int, int], kv: str) -> None:
    """chunk.cu keeps sums in registers and products in flight, whether it reads images or not. Only
    warps that copy images, which leave their registers to those that compute, may keep a few words
    in local memory: eight by the compiler installed here, ten of groups of three by the oldest that
    is taken. A call of the disassembler serves both."""
    dtype = torch.float16 if "float16" in kv.split() else torch.bfloat16
    kv_dtype = FP8 if kv.startswith("fp8") else dtype
    world = World(*heads, 128, (64,), dtype, kv_dtype, quantize_out=kv_dtype == FP8)
    call, limits = world.call([(0, 0, 1)]), world.limits()
    kinds = (False, True)
    specs = [chunk.chunk_spec(call, limits, by_images=by_images) for by_images in kinds]
    for by_images, (_, binary, code) in zip(kinds, compile_all(specs), strict=True):
        assert binary.local_bytes <= 40 * by_images
        computing = code[: code.rindex("HGMMA")]
        assert not re.search(r"\b(LDL|STL)\b", computing)
        # Logits of an item's first tile and of the next, eight steps each; values of a tile and of
        # the last, four each.
        assert len(re.findall(r"\bHGMMA", code)) == 24
        # A compiler that cannot tell that registers are free waits after every product.
        assert len(re.findall(r"WARPGROUP\.DEPBAR", code)) <= 4
        assert len(re.findall("USETMAXREG", code)) == 2
        assert ("F2FP.F16.E4M3" in code) == (kv_dtype == FP8 and not by_images)
        assert ("LDGSTS" in code) == (kv_dtype != FP8 and not by_images)
        assert ("UBLKCP" in code) == by_images


def check_windows(kv: str) -> None:
    """The same where a window is compiled in."""
    check_chains(of_chains(world_of("70b", kv, window=4096)))


def check_trees(name: str) -> None:
    """Of Triton's kernel for trees, by world: splits wait for each other, as those of chains do,
    and two fit a multiprocessor. Wide heads take all registers: two states of 64 rows, and keys and
    values that are gathered."""
    world = tree_world(name, [-1, -1])
    spec = split_spec(world.call([(0, 0, 3)]), world.limits(), has_trees=True)
    ((_, binary, code),) = compile_all([spec])
    assert binary.local_bytes <= (0 if world.size == 64 else 256), spec.name
    assert "HGMMA" in code, spec.name
    assert 2 * binary.threads * (-(-binary.registers // 8) * 8) <= 1 << 16
    assert 2 * (binary.shared_bytes + 1024) <= 227 * 1024


def of_pages(tokens_per_block: int, specs: Callable[..., list[KernelSpec]]) -> list[KernelSpec]:
    """Kernels of warps, for chains and trees, of pages of so many tokens. specs: of `BY_WARP`."""
    sizes = {"tokens_per_block": tokens_per_block, "max_seq_len": 8192}
    world = World(8, 2, 128, (64,), kv_dtype=FP8, **sizes)
    return specs(world.call([(0, 0, 1)]), world.limits())


def check_pages(specs: Sequence[KernelSpec]) -> None:
    """Nothing spilled but what is known."""
    for spec in specs:
        # Trees have up to twelve warps, 168 registers each; with some values in local memory they
        # are still the fastest (docs/performance/trees.md). Chains spill nothing. Of up to 16 rows
        # these are 32 bytes, 64 by the oldest compiler that is taken with blocks of 16 tokens.
        allowed = 304 if spec.name.endswith("r24.trees") else 64 * spec.name.endswith(".trees")
        assert compile_kernel(spec).local_bytes <= allowed, spec.name


def of_verification(heads: str, kv: str) -> list[KernelSpec]:
    """The kernels of few tokens, of an engine whose contexts reach all of them."""
    world = world_of(heads, kv, max_seq_len=8192)
    return verification.verification_specs(world.call([(0, 0, 1)]), world.limits())


def check_verification(specs: Sequence[KernelSpec]) -> None:
    """Thread blocks send to each other's shared memory, copy ahead and find room."""
    for spec, binary, code in compile_all(specs):
        assert "STAS" in code and "LDGSTS" in code and "LDSM" in code, spec.name
        assert binary.shared_bytes <= 227 * 1024
