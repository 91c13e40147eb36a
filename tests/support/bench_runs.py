"""What tests of `llmctl bench` share."""

from __future__ import annotations

SHORT = ["--target-input-len", 12, "--target-output-len", 9]
