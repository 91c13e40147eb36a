"""Contexts and small shapes that tests of decoder_layers share."""

from __future__ import annotations

from scripts.models.planted_shapes import Shape

# Contexts at the borders of tiles of 64 keys and of units, whose sizes grow from 1,024 keys on.
CONTEXTS = (1, 2, 63, 64, 65, 128, 511, 1000, 1023, 1024, 1025, 1090, 2047, 2049, 3001, 4095)
SMALL = {
    # heads of 64 and 128, groups of 1 to 8, K that is no multiple of 2,048, fewer rows than blocks
    "narrow": Shape(512, 2048, 4, 8, 2, 64, 8.0, vocab=4096, bos=0, eos=(1,)),
    "group of 8": Shape(1024, 1536, 3, 16, 2, 64, 8.0, vocab=4096, bos=0, eos=(1,)),
    "heads of 128": Shape(1536, 4096, 3, 12, 4, 128, 8.0, vocab=4096, bos=0, eos=(1,)),
    "groups of 8 rows": Shape(2560, 4096, 3, 20, 5, 128, 8.0, vocab=4096, bos=0, eos=(1,)),
    "each its own": Shape(1024, 3072, 3, 8, 8, 128, 8.0, vocab=4096, bos=0, eos=(1,)),
}
