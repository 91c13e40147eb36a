"""Kernels whose warps work together, on a CPU: CUDA C++ as C++, where PTX is a function of
emulated_warps.h and every thread a fiber.

What it shows: addresses, work items and paths, what meets whom, and that the same products are
added in the same order whatever else is in a step. What it does not: the sums of a tensor core and
exponentials to the last bit, and the order in which a GPU's memory shows writes; copies are done as
early as they may be, or as late.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence
from pathlib import Path

import torch

from llmctl.plugins.backends.cuda.compiler import PLUGINS
from llmctl.plugins.backends.cuda.kernel_spec import KernelSpec, Launch, TensorMap
from support.emulated import compile_cpp

_HEADERS, _RUNTIME = (
    [Path(__file__).with_name(f"emulated_{name}") for name in names.split()]
    for names in ("warps.h products.h numbers.h fibers.h", "runtime.cpp sums.h blocks.h")
)
_PRODUCTS = (
    "// ---- warpgroup products ----"  # of hopper.cuh: emulated_products.h has what is used here
)
# Where a statement's PTX begins with the first, the second; {0}, {1}, ... are its operands.
_PTX = {
    "cvt.rn.bf16x2.f32": "{0} = emu::bf16({2}) | emu::u32(emu::bf16({1})) << 16",
    "cvt.rn.f16x2.f32": "{0} = emu::halves({1}, {2})",
    "cvt.rn.satfinite.f16x2.f32": "{0} = emu::halves(emu::within({1}), emu::within({2}))",
    "cvt.f32.f16": "{0} = emu::from_half({1})",
    "cvt.rn.satfinite.e4m3x2.f32": "{0} = emu::e4m3({2}) | emu::e4m3({1}) << 8",
    "{.reg .b16 a, b;mov.b32 {a, b}, %2;cvt.rn.f16x2.e4m3x2": (
        "({0} = emu::wide_pair({2}), {1} = emu::wide_pair({2} >> 16))"
    ),
    "sub.rn.f16x2": 'emu::fail("bytes of INT8")',
    " %0, %1, %2;": "{0} = emu::pair_operation(INSTRUCTION, {1}, {2})",  # of pairs.cuh
    "min.NaN.": "{0} = emu::bounded(true, NAME, {1}, {2})",  # of pairs.cuh, too
    "max.NaN.": "{0} = emu::bounded(false, NAME, {0}, {1})",
    "ex2.approx.ftz.f32": "{0} = std::exp2({1})",
    "rcp.approx.ftz.f32": "{0} = 1.0f / ({1})",
    "rsqrt.approx.ftz.f32": "{0} = 1.0f / std::sqrt({1})",
    "createpolicy": "{0} = 0",
    "mbarrier.init": "emu::barrier_init({0}, {1})",
    "mbarrier.arrive.shared::cta": "emu::barrier_arrive({0})",
    "{.reg .pred done;mbarrier.": "{0} = emu::barrier_is_over({1}, {2})",  # with or without waiting
    "cp.async.mbarrier.arrive": "emu::barrier_wait_for_copies({0})",
    "mbarrier.arrive.expect_tx": "emu::barrier_expect({0}, {1})",
    "{.reg .pred done;again:mbarrier.try_wait": "emu::barrier_wait({0}, {1})",
    "barrier.cluster.arrive": "emu::cluster_arrive()",
    "barrier.cluster.wait": "emu::cluster_wait()",
    "barrier.sync": "emu::sync_block({0}, {1})",
    "barrier.sync 1, 128": "emu::sync_block(1, 128)",
    "mov.b64 %0, {": "{0} = {1} | (unsigned long long){2} << 32",
    "mov.u32 %0, %%nctaid.x": "{0} = emu::grid.x",
    "bar.sync %0, 128": "emu::sync_block({0}, 128)",
    "bar.sync %0, %1": "emu::sync_block({0}, {1})",
    "bar.sync 1": "emu::sync_block(1, {0})",
    "bar.sync 2": "emu::sync_block(2, {0})",
    "barrier.arrive": "emu::arrive_block({0}, {1})",
    "bar.arrive 2": "emu::arrive_block(2, {0})",
    "bar.arrive %0, %1": "emu::arrive_block({0}, {1})",
    "mapa": "{0} = emu::remote({1}, {2})",
    "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4": (
        "emu::store_remote({0}, {{{1}, {2}, {3}, {4}}}, {5})"
    ),
    "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2": (
        "emu::store_remote({0}, {{{1}, {2}}}, {3})"
    ),
    "cp.async.cg.shared.global [%0], [%1], 16, %2;": "emu::copy({0}, {1}, {2})",
    "cp.async.cg.shared.global.L2::256B": "emu::copy({0}, {1}, {2})",
    "cp.async.cg.shared.global [%0], [%1], 16;": "emu::copy({0}, {1})",
    "cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;": "emu::copy({0}, {1}, {2})",
    "cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;": "emu::copy({0}, {1})",
    "st.global.cg.L2::cache_hint.f32": "*{0} = {1}",
    "discard.global.L2": "std::memset((void*){0}, 0xFF, 128)",  # to NaN
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0]": (
        "emu::copy_bulk({0}, {1}, {2}, {3})"
    ),
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint": (
        "emu::copy_bulk({0}, {1}, {2}, {3})"
    ),
    "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0]": (
        "emu::copy_box({0}, {1}, {2}, {3}, {4})"
    ),
    "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint": (
        "emu::copy_box({0}, {1}, {2}, {3}, {4})"
    ),
    "{.reg .pred p;setp.ne.u32 p, %3, 0;@p cp.async.bulk.global.shared::cta.bulk_group": (
        "{3} ? emu::store_block({0}, {1}, {2}) : (void)0"
    ),
    "cp.async.bulk.commit_group": "emu::commit_stores()",
    "cp.async.bulk.wait_group": "emu::wait_for_stores()",  # until they are read, or written
    "stmatrix.sync.aligned.m8n8.x4.trans": "emu::store_matrices({0}, {{{1}, {2}, {3}, {4}}})",
    "stmatrix.sync.aligned.m8n8.x1.trans": "emu::store_matrices({0}, {{{1}}})",
    "cp.async.wait_all": "(emu::commit(), emu::wait_for_groups(0))",
    "cp.async.commit_group": "emu::commit()",
    "cp.async.wait_group": "emu::wait_for_groups({0})",
    "ldmatrix.sync.aligned.m8n8.x4.shared": (
        "emu::u32* all[4] = {{&{0}, &{1}, &{2}, &{3}}}; emu::load_matrices(all, {4}, false)"
    ),
    "ldmatrix.sync.aligned.m8n8.x4.trans": (
        "emu::u32* all[4] = {{&{0}, &{1}, &{2}, &{3}}}; emu::load_matrices(all, {4}, true)"
    ),
    "ldmatrix.sync.aligned.m8n8.x2.trans": (
        "emu::u32* all[2] = {{&{0}, &{1}}}; emu::load_matrices(all, {2}, true)"
    ),
    "movmatrix.sync.aligned.m8n8.trans": "{0} = emu::transposed({1})",
    "mma.sync.aligned.m16n8k16": (
        "emu::multiply(TYPES, {0}, {1}, {2}, {3}, {4}, {5}, {6}, {7}, {8}, {9})"
    ),
    "{.reg .pred p;setp.ne.b32 p, %": "emu::add_product(d, N, a, b, add)",  # of long_batch.cu
    "st.volatile.shared.u16": "emu::store<emu::u16>({0}, {{emu::u16({1})}})",
    "ld.volatile.shared.v4.f32": "emu::load({4}, {0}, {1}, {2}, {3})",
    "{.reg .pred p, q;setp.ne.u32 p, %1, 0;barrier.red.or.pred": (
        "{0} = emu::meet_any(1, {2}, {1})"
    ),
    "st.shared.u32": "emu::store<emu::u32>({0}, {{emu::u32({1})}})",
    "st.shared.f32": "emu::store<float>({0}, {{{1}}})",
    "st.shared.v2.f32": "emu::store<float>({0}, {{{1}, {2}}})",
    "st.shared.v2.u32": "emu::store<emu::u32>({0}, {{{1}, {2}}})",
    "st.shared.v4.u32 [%0], {%1, %1, %1, %1}": "emu::store<emu::u32>({0}, {{{1}, {1}, {1}, {1}}})",
    "st.shared.v4.u32 [%0], {%1, %2, %3, %4}": (
        "emu::store<emu::u32>({0}, {{{1}, {2}, {3}, {4}}})"
    ),
    "st.shared.v4.f32": "emu::store<float>({0}, {{{1}, {2}, {3}, {4}}})",
    "st.global.v4.u32": "*(uint4*){0} = {{{1}, {2}, {3}, {4}}}",
    "ld.shared.f32": "emu::load({1}, {0})",
    "ld.shared.u32": "emu::load({1}, {0})",
    "ld.shared.v4.u32": "emu::load({4}, {0}, {1}, {2}, {3})",
    "st.release.gpu.global.s32 [%0], 1;": "*{0} = 1",
    "ld.shared.v2.f32": "emu::load({2}, {0}, {1})",
    "ld.shared.v2.u32": "emu::load({2}, {0}, {1})",
    "ld.shared.v4.f32": "emu::load({4}, {0}, {1}, {2}, {3})",
    "ld.global.L1::no_allocate.v4.u32": (
        "({0} = ((const emu::u32*){4})[0], {1} = ((const emu::u32*){4})[1],"
        " {2} = ((const emu::u32*){4})[2], {3} = ((const emu::u32*){4})[3])"
    ),
    "ld.global.L1::no_allocate.v2.u32": (
        "({0} = ((const emu::u32*){2})[0], {1} = ((const emu::u32*){2})[1])"
    ),
    "ld.relaxed.gpu.global.f32": "{0} = *{1}",
    "ld.relaxed.gpu.global.s32": "(emu::leave(), {0} = *{1})",  # others come until it is there
    # of exchange.cuh, with or without a state space; others come until values are there
    "ld.relaxed.gpu.u32": "(emu::leave(), {0} = *(const emu::u32*){1})",
    "ld.relaxed.gpu.v4.u32": (
        "(emu::leave(), {0} = ((const emu::u32*){4})[0], {1} = ((const emu::u32*){4})[1],"
        " {2} = ((const emu::u32*){4})[2], {3} = ((const emu::u32*){4})[3])"
    ),
    "{.reg .pred p;setp.ne.u32 p, %3, 0;@p ld.relaxed.gpu": (
        "(emu::leave(), {3} && ({0} = ((const emu::u32*){2})[0],"
        " {1} = ((const emu::u32*){2})[1], true))"
    ),
    "ld.relaxed.gpu.global.u64": "{0} = *{1}",
    "st.relaxed.gpu.global.u64": "*{0} = {1}",
    "st.relaxed.gpu.global.u8": "*{0} = emu::u8({1})",
    "st.relaxed.gpu.global.u16": "*{0} = {1}",
    "st.relaxed.gpu.global.v2.u32": "*{0} = uint2{{{1}, {2}}}",
    "red.relaxed.gpu.global.add.s32": "++*{0}",
    "ld.relaxed.gpu.global.v2.f32": "{0} = {2}->x, {1} = {2}->y",
    "ld.relaxed.gpu.global.v4.f32": ("({0} = {4}->x, {1} = {4}->y, {2} = {4}->z, {3} = {4}->w)"),
    "{.reg .pred p;setp.ne.u32 p, %5, 0;@p ld.relaxed.gpu.global.v4.f32": (
        "({5} ? (void)({0} = {4}->x, {1} = {4}->y, {2} = {4}->z, {3} = {4}->w) : (void)0)"
    ),
    "atom.add.acq_rel.gpu.global.s32": "{0} = (*{1})++",
    "atom.add.relaxed.gpu.global.s32": "{0} = (*{1})++",
    "ld.acquire.gpu.global.s32": "(emu::leave(), {0} = *{1})",  # others come until they are there
}
_NOTHING = (
    "griddepcontrol",
    "setmaxnreg",
    "prefetch.global.L2",
    "prefetch.tensormap",
    "fence.mbarrier_init",
    "fence.proxy.async",
)  # a CPU's order is that of the program
_LEFT_OUT = "schemes/mxfp4/mxfp4.cuh"  # emulated_mxfp4.py
# Of hopper.cuh and used by none of the kernels here.
_UNKNOWN = (
    "cp.async.bulk",
    "cvta.shared.u64",
    "mbarrier.arrive.shared::cluster",
    "mbarrier.expect_tx",
    # of all_reduce/meeting.cuh, which sums for other ranks need
    "mov.u64 %0, %globaltimer",
    "ld.relaxed.sys",
    "ld.relaxed.gpu.global.u32",
    "st.relaxed.sys",
    "red.relaxed",
)


def as_cpp(source: str) -> str:
    """A source of `plugins` and what it includes. AssertionError where it has unknown PTX."""
    text = _included(source, {_LEFT_OUT})
    text = re.sub(r"extern __shared__ __align__\(\d+\) u8 (\w+)\[\];",
                  r"u8* \1 = emu::now->own->memory;", text)  # fmt: skip
    found, at = [], 0
    for match in re.finditer(r"\basm(?: volatile)?\(", text):
        end = _closing(text, match.end())
        found += [text[at : match.start()], _translated(text[match.end() : end])]
        at = end + 1
    return "".join([*found, text[at:]])


def _included(source: str, seen: set[str]) -> str:
    if source in seen:
        return ""
    seen.add(source)
    text = (PLUGINS / source).read_text().replace("#pragma once", "")
    text = text.partition(_PRODUCTS)[0] if source.endswith("hopper.cuh") else text
    return re.sub(r'#include "(.*)"\n', lambda its: _included(its[1], seen), text)


def _closing(text: str, at: int) -> int:
    """Of the parenthesis that is open there; those in strings do not count."""
    depth, in_string = 1, False
    while depth:
        if text[at] == '"' and text[at - 1] != "\\":
            in_string = not in_string
        depth += 0 if in_string else {"(": 1, ")": -1}.get(text[at], 0)
        at += 1
    return at - 1


def _translated(statement: str) -> str:
    first = re.match(r'(?:\s|\\\n|[A-Z]+|"(?:[^"\\]|\\.)*")*', statement)
    assert first is not None
    ptx = "".join(re.findall(r'"((?:[^"\\]|\\.)*)"', first[0])).replace("\\n", "")
    operands, at = [], first.end()
    for match in re.finditer(r'"[=+&]*[a-z]"\(', statement):
        if match.start() >= at:
            at = _closing(statement, match.end())
            operands.append(statement[match.end() : at])
    if not ptx or ptx.startswith(_NOTHING):
        return "(void)0"
    known = [begin for begin in _PTX if ptx.startswith(begin)]
    if ptx.startswith(_UNKNOWN) and not known:
        return 'emu::fail("unknown PTX")'
    assert known, f"PTX without a counterpart: {ptx}"
    return _PTX[max(known, key=len)].format(*(f"({each})" for each in operands))


_libraries: dict[str, ctypes.CDLL] = {}


def compiled(spec: KernelSpec) -> ctypes.CDLL:
    """The kernel of a spec."""
    if spec.name in _libraries:
        return _libraries[spec.name]
    launch = f"""
extern "C" void launch(int x, int y, int z, int together, int seed, int late, void** values) {{
  emu::is_e4m3 = {int(spec.constants.get("FP8_PRODUCTS", 0))};
  emu::run_grid(x, y, z, together, {32 * spec.num_warps}, {spec.shared_bytes}, seed, late,
                [](void** values) {{ emu::call({spec.entry}, values); }}, values);
}}
"""
    macros = {k: int(v) if isinstance(v, bool) else v for k, v in spec.constants.items()}
    library = compile_cpp(as_cpp(spec.source) + launch, _HEADERS, macros, _RUNTIME)
    return _libraries.setdefault(spec.name, library)


def run(
    launches: Sequence[Launch], seed: int = 0, *, is_late: bool = False, together: int = 0
) -> None:
    """One after the other, threads in an order that follows from the seed. is_late: copies are done
    when they are waited for. together: thread blocks along x that wait for each other, where they
    are no cluster."""
    kinds = {"i32": ctypes.c_int32, "i64": ctypes.c_int64, "fp32": ctypes.c_float}
    for launch in launches:
        library, values = compiled(launch.spec), []
        for kind, value in zip(launch.spec.arguments, launch.arguments, strict=True):
            if isinstance(value, TensorMap):
                values.append(_box_words(value))
                continue
            is_tensor = isinstance(value, torch.Tensor)
            values.append(ctypes.c_void_p(value.data_ptr()) if is_tensor else kinds[kind](value))
        pointers = [ctypes.cast(ctypes.pointer(each), ctypes.c_void_p) for each in values]
        at_once = together or launch.spec.cluster
        library.launch(
            *launch.grid, at_once, seed, int(is_late), (ctypes.c_void_p * len(values))(*pointers)
        )


def _box_words(box: TensorMap) -> ctypes.Array[ctypes.c_uint64]:
    """What copy_box of emulated_warps.h reads, at a multiple of 64 bytes."""
    x = box.tensor
    room = (ctypes.c_uint64 * 24)()
    words = (ctypes.c_uint64 * 16).from_buffer(room, -ctypes.addressof(room) % 64)
    size = x.element_size()
    words[:5] = [x.data_ptr(), x.shape[0], x.shape[1] * size, box.box_rows, size]
    return words
