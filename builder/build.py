"""From a checkpoint to an engine directory, in two halves: plan (reads headers) and run (writes).

`plan_build` decides everything and checks everything that headers and scales can tell; `run_build`
streams the weights into the engine file. A dry run is the first half alone.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmctl.builder.backends import (
    choose_backend,
    has_supported_gpu,
    require_cache_type,
    require_gpu_model,
)
from llmctl.builder.binaries import Binaries, choose_target, find_package, make_binaries
from llmctl.builder.config import BuildRequest, choose_dtype, resolve_build_config
from llmctl.builder.engine_format import (
    CONFIG_FILE,
    SCHEMA_VERSION,
    SPECULATIVE_MODES,
    TOKENIZER_FOLDER,
    EngineConfig,
    KvCacheSpec,
    write_engine,
)
from llmctl.builder.engine_kernels import OnKernel
from llmctl.builder.engine_plan import EnginePlan
from llmctl.builder.fp8_context import fp8_context_notices
from llmctl.builder.heads.graphs import join, record_heads
from llmctl.builder.kv_cache import choose_kv_cache
from llmctl.builder.models import stored_model
from llmctl.builder.models.decoder import EMBEDDING, build_network
from llmctl.builder.passes.pipeline import run_passes
from llmctl.builder.planted import (
    LoadFormat,
    declare_tensors,
    mark_generated,
    require_generator,
)
from llmctl.builder.plugin_config import resolve_plugins, sum_notices
from llmctl.builder.provenance import describe_source, pretrained_config, versions
from llmctl.builder.ranks import require_leaves, require_ranks
from llmctl.builder.scales import (
    check_unused,
    checkpoint_shapes,
    find_linear_scales,
    read_scales,
    require_readable,
    require_weights,
)
from llmctl.builder.sharding import Shard, local_model, shards
from llmctl.builder.signature import sign_engine
from llmctl.builder.signing_keys import SigningKey
from llmctl.builder.tokenizer import describe_tokenizer
from llmctl.builder.validation.plan import require_own_plan
from llmctl.errors import OutputExists
from llmctl.plugins.backends.backend import BACKENDS
from llmctl.plugins.core.op_spec import FP8
from llmctl.publish import publish, require_space
from llmctl.quantize.checkpoint import DTYPES as STORED_DTYPES
from llmctl.quantize.checkpoint import Checkpoint

if TYPE_CHECKING:
    import torch

_CONFIG_BYTES = 1 << 20  # more than config.json of an engine takes
STORED = LoadFormat()


def plan_build(
    checkpoint_dir: Path,
    request: BuildRequest,
    *,
    backend: str = "auto",
    compute_capability: str | None = None,
    load_format: LoadFormat = STORED,
    plugins: Mapping[str, str] | None = None,
    command: str = "",
    on_kernel: OnKernel = lambda *_: None,
    with_binaries: bool = True,
) -> EnginePlan:
    """Decide an engine from the checkpoint's headers and scales; writes nothing.

    Compiles kernels and TensorRT's plans, as their size belongs to the plan; `on_kernel` hears of
    each. Without binaries the result cannot be written. Raises the checkpoint errors, BadConfig,
    Unsupported, and MissingPackage or KernelCompileError where a kernel or plan cannot be compiled.
    """
    backend = choose_backend(backend, has_supported_gpu)
    require_cache_type(request.kv_cache_type, backend)
    require_ranks(request.tp_size, BACKENDS[backend], is_invariant=request.tp_invariant)
    package = find_package(backend)
    require_generator(load_format, backend, request.mode)
    checkpoint = load_format.open(checkpoint_dir)
    where = str(checkpoint_dir / "config.json")
    model = stored_model(checkpoint, where)
    local = local_model(model, request.tp_size)
    dtype = choose_dtype(request.dtype, model, _stored_dtype(checkpoint))
    if BACKENDS[backend].on_gpu:
        require_gpu_model(local, dtype, backend, request.tp_size)
    require_leaves(model, is_wanted=request.tp_invariant)
    mode = SPECULATIVE_MODES[request.mode]
    if not load_format.is_read:
        request, facts = mode.invent(request, model)
    else:
        request, checkpoint, facts = mode.prepare(request, model, checkpoint)
    require_readable(checkpoint)
    require_weights(checkpoint, backend)
    heads, outputs = record_heads(request, model, dtype, facts, backend)
    recorded = build_network(model, dtype, outputs)
    whole = join([recorded, *heads])
    if not load_format.is_read:
        declare_tensors(checkpoint, whole, model.num_hidden_layers)
    shapes = checkpoint_shapes(whole, checkpoint)
    # Dtypes before shapes: 4-bit codes have a shape of their own, and the dtype tells why.
    linear_scales = find_linear_scales(checkpoint, whole)
    checkpoint.require(shapes)
    cache_dtype, kv_scales = choose_kv_cache(
        checkpoint, request, model.num_hidden_layers, dtype, backend
    )
    has_fp8 = any(s.scheme.activation_dtype == FP8 for s in linear_scales.values())
    is_fp8 = has_fp8 or cache_dtype == FP8
    target = choose_target(backend, package, compute_capability, is_fp8)
    limits, notices = resolve_build_config(request, model, cache_dtype, facts)
    plugin_config = resolve_plugins(plugins or {}, dtype, has_fp8, backend, request.kv_cache_type)
    cache = KvCacheSpec(
        model.num_hidden_layers,
        local.num_key_value_heads,
        model.head_size,
        limits.tokens_per_block,
        cache_dtype,
        tuple(0 if window >= limits.max_seq_len else window for window in model.windows),
    )
    notices += fp8_context_notices(plugins or {}, plugin_config, backend, limits, cache)
    if limits.tp_size > 1:
        recorded = build_network(local, dtype, outputs)
    graphs, plan, pieces = run_passes(
        recorded, model, limits, plugin_config, linear_scales, kv_scales, cache, backend, heads
    )
    notices += sum_notices(plugin_config, limits.tp_size, graphs)
    sources = join(graphs).sources
    ranks = shards(checkpoint, model, limits.tp_size)
    if load_format.is_generated:
        plan = mark_generated(plan)
    elif load_format.is_read:
        read_scales(sources, ranks)
        checkpoint.release()
    binaries: Binaries = {}
    compilers: dict[str, str] = {}
    if with_binaries:
        plan, binaries, compilers = make_binaries(
            plan, pieces, limits, plugin_config, target, on_kernel
        )
    used = [name for source in sources.values() for name in source.names]
    unused = check_unused(checkpoint, used, model.num_hidden_layers)
    if unused:
        notices.append(f"not part of the model, left out: {', '.join(unused[:4])}")
    tokenizer = describe_tokenizer(checkpoint.tokenizer_files())
    if tokenizer["hash"] is None:
        notices.append(f"{checkpoint_dir} has no tokenizer.json; `run` will need --tokenizer-dir")
    config = EngineConfig(
        version=SCHEMA_VERSION,
        backend=backend,
        pretrained_config=pretrained_config(model, dtype, checkpoint, cache, limits.tp_size),
        build_config=limits.to_dict(),
        plugin_config=plugin_config,
        source=describe_source(checkpoint),
        tokenizer=tokenizer,
        versions=versions() | target.versions | compilers,
        command=command,
        compute_capability=target.compute_capability,
        weights=load_format.to_dict(model, checkpoint.config, facts),
    )
    require_own_plan(config, plan)
    return EnginePlan(
        checkpoint=checkpoint,
        config=config,
        network=graphs[0],
        plan=plan,
        sources=sources,
        limits=limits,
        shards=ranks,
        pieces=pieces,
        binaries=binaries,
        notices=tuple(notices),
    )


def run_build(
    engine: EnginePlan,
    output_dir: Path,
    on_progress: Callable[[int], None] = lambda _: None,
    key: SigningKey | None = None,
) -> EngineConfig:
    """Write the engine directory, signed where there is a key; it appears whole or not at all.

    Raises OutputExists, OutOfDisk, BadTensorValue (weights are checked while they stream).
    """
    import torch

    if output_dir.exists():  # before the space check, because it is the more likely mistake
        raise OutputExists(output_dir)
    tokenizer_files = engine.checkpoint.tokenizer_files()
    side_bytes = sum(path.stat().st_size for path in tokenizer_files) + _CONFIG_BYTES
    require_space(output_dir.absolute().parent, engine.file_bytes * len(engine.shards) + side_bytes)

    def chunks(name: str, shard: Shard) -> Iterator[torch.Tensor]:
        if name in engine.binaries:
            yield torch.frombuffer(bytearray(engine.binaries[name]), dtype=torch.uint8)
            return
        yield from engine.sources[name].chunks(shard)
        engine.checkpoint.release()

    with publish(output_dir) as scratch:
        files: dict[str, Any] = {}
        for shard in engine.shards:
            own = partial(chunks, shard=shard)
            files |= write_engine(scratch, engine.plan, own, on_progress, shard.rank)
        (scratch / TOKENIZER_FOLDER).mkdir()
        for path in tokenizer_files:
            shutil.copyfile(path, scratch / TOKENIZER_FOLDER / path.name)
        config = replace(engine.config, files=files)
        (scratch / CONFIG_FILE).write_text(config.to_json())
        if key is not None:
            sign_engine(scratch, key)
    return config


def _stored_dtype(checkpoint: Checkpoint) -> str:
    info = checkpoint.tensors.get(f"{EMBEDDING}.weight")
    if info is None:  # also where nothing is stored
        return "bfloat16" if not checkpoint.tensors else "float32"
    return STORED_DTYPES[info.dtype][0]
