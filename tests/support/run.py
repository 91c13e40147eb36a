"""What tests of `llmctl run` share."""

from __future__ import annotations

TWO = ["--input_text", "def add(a, b):", "class Bar:"]


def ids(found):
    return [item["token_ids"] for item in found]
