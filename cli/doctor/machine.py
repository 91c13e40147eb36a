"""The machine: processor, memory, GPUs, driver, libraries. Nothing here fails; what is absent is
None."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import warnings
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

# What an engine needs to be built or run, and what quantizing and compiling need in addition.
PACKAGES = (
    "llmctl",
    "torch",
    "numpy",
    "safetensors",
    "tokenizers",
    "transformers",
    "triton",
    "nvidia-cuda-nvrtc",
    "nvidia-modelopt",
    "tensorrt",
    "tensorrt-rtx",
)


def describe_machine() -> dict[str, Any]:
    """Processor, memory and disk; sizes in bytes."""
    from llmctl.cli.bench.hardware import processor_name
    from llmctl.plugins.backends.host_memory import free_memory_bytes

    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "cpu": processor_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "memory_free_bytes": free_memory_bytes(),
        "folder": str(Path.cwd()),
        "disk_free_bytes": shutil.disk_usage(Path.cwd()).free,
    }


def libraries() -> dict[str, str | None]:
    """Installed versions, None for what is not installed."""
    return {package: _version(package) for package in PACKAGES}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def describe_driver() -> dict[str, str | None]:
    """The NVIDIA driver's version and the newest CUDA it serves; None without one."""
    path = Path("/proc/driver/nvidia/version")
    found = None
    if path.is_file():
        words = path.read_text().partition("\n")[0].split()
        found = next((word for word in words if word[0].isdigit() and "." in word), None)
    return {"version": found, "cuda": _driver_cuda()}


def _driver_cuda() -> str | None:
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    number = ctypes.c_int()
    if library.cuDriverGetVersion(ctypes.byref(number)) != 0:
        return None
    return f"{number.value // 1000}.{number.value % 1000 // 10}"


def describe_gpus() -> list[dict[str, Any]]:
    """The GPUs that torch can use."""
    import torch

    with warnings.catch_warnings():  # torch warns of an old driver; `describe_driver` tells of it
        warnings.simplefilter("ignore")
        if not torch.cuda.is_available():
            return []
    found = []
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        found.append(
            {
                "name": device.name,
                "compute_capability": f"{device.major}.{device.minor}",
                "multiprocessors": device.multi_processor_count,
                "memory_bytes": total,
                "memory_free_bytes": free,
            }
        )
    return found
