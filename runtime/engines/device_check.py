"""Checks that the GPU is one that the engine was built for, before anything else, and that its
ranks can run here."""

from __future__ import annotations

import torch

from llmctl.builder.engine_format import EngineConfig
from llmctl.errors import BadConfig, NoDevice, RebuildNeeded, Unsupported
from llmctl.plugins.backends.backend import BACKENDS
from llmctl.plugins.backends.cuda.arch import ARCHS
from llmctl.runtime.engines.tensorrt_check import require_tensorrt
from llmctl.runtime.ranks.launch import world_of


def require_ranks(config: EngineConfig, *, on_one_device: bool) -> None:
    """Raise NoDevice for an engine with more ranks than there are GPUs, and Unsupported where GPUs
    do not reach each other, unless all ranks are to run on one; BadConfig where there is nothing to
    put on one device."""
    ranks, able = config.num_ranks, BACKENDS[config.backend]
    if not on_one_device:
        if ranks > 1 and not able.compiles_plans:  # of TensorRT's, `require_tensorrt` tells
            _require_gpus(ranks)
        return
    if ranks == 1 or able.compiles_plans:
        what = f"{ranks} ranks" if ranks > 1 else "one rank"
        raise BadConfig(
            f"--ranks-on-one-device is for cuda engines of several ranks; this one is "
            f"{config.backend} with {what}",
            fix="leave it out",
        )
    world = world_of(config)
    if world is not None:
        raise BadConfig(
            f"--ranks-on-one-device runs all {ranks} ranks in one process, and {world.launcher} "
            f"started {world.size}",
            fix=f"run it without {world.launcher}",
        )


def _require_gpus(ranks: int) -> None:
    one = "to test what ranks compute, run all of them on one GPU: --ranks-on-one-device"
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if found < ranks:
        raise NoDevice(
            f"the engine has {ranks} ranks, which want a GPU each; "
            f"torch {torch.__version__} finds {found}",
            fix=f"run it where there are {ranks}, or build with --tp-size 1; or, {one}",
        )
    for rank in range(ranks):
        for other in range(ranks):
            if rank != other and not torch.cuda.can_device_access_peer(rank, other):
                raise Unsupported(
                    f"GPU {rank} cannot use the memory of GPU {other}",
                    fix=f"run it on GPUs that are linked (nvidia-smi topo -p2p r); or, {one}",
                )


def require_device(config: EngineConfig, device: int | None = None) -> None:
    """Raises NoDevice without a GPU, RebuildNeeded with a GPU that the kernels are not compiled for
    or that cannot run as many thread blocks at once as they need; for TensorRT engines what
    `require_tensorrt` raises. device: a rank's, by its number; None: the current one."""
    if BACKENDS[config.backend].compiles_plans:
        require_tensorrt(config)
        return
    wanted = config.compute_capability
    if not torch.cuda.is_available():
        if torch.version.cuda is None:
            found = f"this torch ({torch.__version__}) is built without CUDA"
        else:
            found = f"torch {torch.__version__} finds no CUDA device"
        raise NoDevice(
            f"the engine was built for backend 'cuda' (compute capability {wanted}); {found}",
            fix="run it where there is an H100 or H200, or rebuild with: llmctl build "
            "--backend cpu",
        )
    number = torch.cuda.current_device() if device is None else device
    name = torch.cuda.get_device_name(number)
    if device is not None:
        name = f"GPU {device} ({name}), rank {device}'s,"
    found = "{}.{}".format(*torch.cuda.get_device_capability(number))
    if found != wanted:
        raise RebuildNeeded(
            f"the engine's kernels are for compute capability {wanted}; {name} has {found}",
            fix="run it on an H100 or H200, or rebuild with: llmctl build --backend cpu",
        )
    num_sms = torch.cuda.get_device_properties(number).multi_processor_count
    needed = ARCHS[found].num_sms
    if num_sms < needed:
        raise RebuildNeeded(
            f"the engine's kernels need {needed} multiprocessors, whose thread blocks wait for "
            f"each other; {name} has {num_sms}",
            fix="run it on a whole H100 SXM or H200 (not a MIG slice), or rebuild with: "
            "llmctl build --backend cpu",
        )
