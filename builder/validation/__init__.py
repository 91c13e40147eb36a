"""Is an engine what `build` writes? Asked of every engine directory before anything else is.

An engine file is data that people download. What passes here reads and writes nothing outside the
file's tensors, the arena and the KV cache, whatever its values are; what does not is refused as
CorruptEngine, which names the operator, tensor or field, what was found and what is wanted.
docs/engine_format.md lists what is checked, and what cannot be. Nothing here imports arrays, but
`kernels`, which asks the operators' kernels.
"""
