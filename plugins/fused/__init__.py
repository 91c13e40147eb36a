"""Operators that fuse several of `plugins/ops` into one launch."""
