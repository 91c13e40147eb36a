"""Tests that need a GPU of a compute capability that llmctl has kernels for."""

from __future__ import annotations

import pytest
import torch

CAPABILITY = (9, 0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip everything here, with the reason, where there is no such GPU."""
    if not torch.cuda.is_available():
        reason = "needs a GPU"
    elif torch.cuda.get_device_capability() != CAPABILITY:
        reason = f"needs compute capability 9.0, not {torch.cuda.get_device_capability()}"
    else:
        return
    for item in items:
        if "gpu" in item.path.parts:
            item.add_marker(pytest.mark.skip(reason=reason))
