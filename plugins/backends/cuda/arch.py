"""Properties of each GPU generation, one row each; the only place that defines them.

Sources: CUDA programming guide, technical specifications by compute capability (shared memory);
NVIDIA's data sheets (multiprocessors).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Arch:
    """One compute capability."""

    capability: str
    family: str
    num_sms: int
    """Multiprocessors that launches are planned for. Thread blocks that wait for each other count
    on them; where `serves_rtx` a smaller GPU says how many it has when an engine is opened."""
    max_shared_bytes: int  # per thread block
    has_fp8: bool  # tensor cores and conversions of E4M3
    cuda_target: str = ""  # NVRTC target of the CUDA C++ sources; empty: there are none
    has_pdl: bool = False  # kernels wait for their predecessor themselves
    serves_rtx: bool = False  # TensorRT-RTX builds engines for it


ARCHS = {
    arch.capability: arch
    for arch in (
        Arch("8.6", "Ampere", 132, 99 << 10, has_fp8=False, serves_rtx=True),
        Arch("8.9", "Ada", 132, 99 << 10, has_fp8=True, serves_rtx=True),
        Arch("9.0", "Hopper", 132, 227 << 10, has_fp8=True, cuda_target="sm_90a", has_pdl=True),
        Arch("12.0", "Blackwell RTX", 132, 99 << 10, has_fp8=True, serves_rtx=True),
    )
}
HOPPER = ARCHS["9.0"]  # H100 (SXM) and H200: what `--backend cuda` builds for
RTX_CAPABILITIES = tuple(arch.capability for arch in ARCHS.values() if arch.serves_rtx)
