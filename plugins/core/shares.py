"""Names of what each of several ranks has of a tensor, in plans."""

from __future__ import annotations

_SHARE = ".share"


def share_of(name: str) -> str:
    """That of a rank's columns of a product, or of what is computed of these alone."""
    return f"{name}{_SHARE}"


def is_share(name: str) -> bool:
    """Whether it is such a name."""
    return name.endswith(_SHARE)
