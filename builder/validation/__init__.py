"""Checks that an engine is what `build` writes, before anything else is done with its directory.

An engine file is data that people download. An engine that passes reads and writes nothing outside
the file's tensors, the arena and the KV cache, whatever its values are; any other is refused as
CorruptEngine, which names the operator, tensor or field, what was found and what is wanted.
docs/engine_format.md lists what is checked, and what cannot be. No module here imports an array
library except `kernels`, which asks the operators' kernels.
"""
