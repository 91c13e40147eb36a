"""What scripts/tensorrt/verify.py checks of one engine: logits, exactness, speed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from llmctl.plugins.core.calls import StepInputs
from llmctl.plugins.ops.sampling.spec import Logits
from llmctl.runtime.api.executor import Executor
from llmctl.runtime.drafting.draft_engine.method import DraftEngine
from llmctl.runtime.drafting.ngram.method import NgramLookup
from llmctl.runtime.engines.engine import Engine, open_cpu_engine
from llmctl.runtime.open import EngineOptions, OpenEngines, check_engines
from llmctl.runtime.request import Request, SamplingConfig

FP8_MAX = 448.0
DRAFT_LEN = 4
NUM_REQUESTS = 8  # of the comparison of tokens
Outputs = list[tuple[int, ...]]


@dataclass(frozen=True)
class Engines:
    """Engine directories of one case: the pair, and the target for the reference (cpu)."""

    target: Path
    draft: Path
    reference: Path


@dataclass
class Findings:
    """What one case gave. `errors` is ||difference|| / ||logits|| by step."""

    errors: dict[str, float] = field(default_factory=dict)
    best_agree: tuple[int, int] = (0, 0)  # rows whose best token is the reference's, rows
    differing: dict[str, int] = field(
        default_factory=dict
    )  # requests unlike plain decoding, by way
    num_requests: int = 0
    prefill_tokens_s: float = 0.0
    tokens_s: dict[str, float] = field(default_factory=dict)  # batch 1, by way


# ---- logits ----


@dataclass(frozen=True)
class Share:
    """One request of a step: its slot among the blocks, tokens before, new ones, rows of logits."""

    slot: int
    done: int
    tokens: Sequence[int]
    num_rows: int


def steps_of(ids: Sequence[int]) -> list[tuple[str, list[Share]]]:
    """Prompts, chunks, generation and verification, alone and together, over a text."""
    a, b, c = ids[:60], ids[60:140], ids[140:200]
    return [
        ("prompt", [Share(0, 0, a[:37], 1)]),
        ("prompts", [Share(1, 0, b[:21], 1), Share(2, 0, c[:5], 1)]),
        ("generation", [Share(i, n, s[n : n + 1], 1) for i, (n, s) in _at(a, b, c, 37, 21, 5)]),
        ("verification", [Share(i, n, s[n : n + 5], 5) for i, (n, s) in _at(a, b, c, 38, 22, 6)]),
        ("chunk without logits", [Share(1, 27, b[27:40], 0)]),
        ("chunk and generation", [Share(1, 40, b[40:59], 1), Share(0, 43, a[43:44], 1)]),
        ("fewer drafts", [Share(2, 11, c[11:14], 3)]),
    ]


def _at(
    a: Sequence[int], b: Sequence[int], c: Sequence[int], *done: int
) -> list[tuple[int, tuple[int, Sequence[int]]]]:
    return list(enumerate(zip(done, (a, b, c), strict=True)))


def pack(shares: Sequence[Share], engine: Engine) -> StepInputs:
    """The step of an engine whose blocks 1.. of every slot follow each other."""
    size = engine.tokens_per_block
    width = -(-engine.max_seq_len // size)
    tables = np.array([[s.slot * width + i for i in range(width)] for s in shares], np.int32)
    ends = np.cumsum([0, *(len(s.tokens) for s in shares)])
    positions = [np.arange(s.done, s.done + len(s.tokens)) for s in shares]
    slots = [t[p // size] * size + p % size for t, p in zip(tables, positions, strict=True)]
    rows = [np.arange(e - s.num_rows, e) for s, e in zip(shares, ends[1:], strict=True)]
    return StepInputs(
        token_ids=np.concatenate([np.asarray(s.tokens) for s in shares]).astype(np.int32),
        position_ids=np.concatenate(positions).astype(np.int32),
        cu_q=ends.astype(np.int32),
        kv_len=np.array([s.done + len(s.tokens) for s in shares], np.int32),
        block_tables=tables,
        slot_mapping=np.concatenate(slots).astype(np.int32),
        logit_rows=np.concatenate(rows).astype(np.int32),
    )


def compare_logits(engine: Engine, reference: Path, ids: Sequence[int], out: Findings) -> None:
    """Run every step on the engine and on the cpu backend."""
    wanted = open_cpu_engine(reference)
    for executable in (engine, wanted):
        executable.allocate_kv_cache(_blocks(executable))
    agree = total = 0
    for name, shares in steps_of(ids):
        expected = _numpy(wanted.run(pack(shares, wanted))).copy()
        found = _numpy(engine.run(pack(shares, engine)))
        if not len(expected):
            continue
        out.errors[name] = float(np.linalg.norm(found - expected) / np.linalg.norm(expected))
        agree += int((found.argmax(-1) == expected.argmax(-1)).sum())
        total += len(expected)
    out.best_agree = (agree, total)


def _blocks(engine: Engine) -> int:
    return 3 * -(-engine.max_seq_len // engine.tokens_per_block)


def _numpy(logits: Logits) -> NDArray[np.float32]:
    found = logits if isinstance(logits, np.ndarray) else logits.numpy()
    return np.asarray(found, np.float32)


# ---- exactness and speed ----


def requests_of(ids: Sequence[int], count: int, max_tokens: int) -> list[Request]:
    """Greedy and sampled requests with prompts of 1 to 60 tokens."""
    kinds = (SamplingConfig(), SamplingConfig(temperature=0.8, top_k=40, seed=7))
    lengths = (5, 33, 60, 12, 1, 20)
    found = []
    for index in range(count):
        start, length = 23 * index, lengths[index % len(lengths)]
        prompt = tuple(ids[start : start + length])
        found.append(Request(prompt, max_tokens, kinds[index % 2]))
    return found


def generate(executor: Executor, requests: list[Request], *, together: bool = True) -> Outputs:
    """New tokens of every request."""
    groups = [requests] if together else [[request] for request in requests]
    outputs: Outputs = []
    for group in groups:
        ids = executor.enqueue_requests(group)
        for request_id in ids:
            tokens: tuple[int, ...] = ()
            for response in executor.await_responses(request_id):
                if response.error is not None:
                    raise response.error
                assert response.result is not None
                tokens = response.result.output_token_ids
            outputs.append(tokens)
    return outputs


def check_engine(engines: Engines, ids: Sequence[int], num_tokens: int) -> Findings:
    """Everything about one case. Raises what opening and running raise."""
    found = Findings()
    requests = requests_of(ids, NUM_REQUESTS, num_tokens)
    single = requests_of(ids, 1, 4 * num_tokens)
    pair = OpenEngines(check_engines(EngineOptions(engines.target, _draft(engines.draft))))
    compare_logits(pair.target, engines.reference, ids, found)
    found.prefill_tokens_s = _prefill_speed(pair.target, ids)
    with pair.executor(is_speculative=False) as executor:
        plain = generate(executor, requests)
        alone = generate(executor, requests, together=False)
        found.tokens_s["plain"] = _speed(executor, single)
    found.differing["alone"] = _differing(alone, plain)
    with pair.executor() as executor:
        found.differing["draft"] = _differing(generate(executor, requests), plain)
        found.tokens_s["draft"] = _speed(executor, single)
    options = EngineOptions(engines.target, NgramLookup(DRAFT_LEN, 3))
    with OpenEngines(check_engines(options)).executor() as executor:
        found.differing["n-gram"] = _differing(generate(executor, requests), plain)
    found.num_requests = len(requests)
    return found


def _draft(folder: Path) -> DraftEngine:
    return DraftEngine(folder, DRAFT_LEN)


def _differing(found: Outputs, wanted: Outputs) -> int:
    return sum(a != b for a, b in zip(found, wanted, strict=True))


def _speed(executor: Executor, requests: list[Request]) -> float:
    """Tokens a second of the second of two runs; the first captures graphs."""
    generate(executor, requests)
    began = perf_counter()
    outputs = generate(executor, requests)
    return sum(map(len, outputs)) / (perf_counter() - began)


def _prefill_speed(engine: Engine, ids: Sequence[int]) -> float:
    count = min(engine.max_num_tokens, engine.max_seq_len, len(ids))
    step = pack([Share(0, 0, ids[:count], 1)], engine)
    _numpy(engine.run(step))
    began = perf_counter()
    _numpy(engine.run(step))  # reading the logits waits for them
    return count / (perf_counter() - began)


# ---- checkpoints ----


def write_fp8(source: Path, folder: Path, *, is_static: bool) -> Path:
    """A 16-bit checkpoint of one file as FP8 (see `quantize_linears`)."""
    config = json.loads((source / "config.json").read_text())
    tensors = load_file(source / "model.safetensors")
    quantize_linears(tensors, is_static=is_static)
    config["quantization_config"] = fp8_description(is_static=is_static)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, folder / name)
    return folder


def quantize_linears(
    tensors: dict[str, torch.Tensor], *, is_static: bool, reach: float = 16.0
) -> None:
    """Linears become FP8: with static scales for activations and an FP8 KV cache up to `reach`, or
    with a scale a row and a token. The scales are plausible, not calibrated: the reference rounds
    in the same places."""
    for name in [n for n in tensors if n.endswith("_proj.weight")]:
        module, weight = name.removesuffix(".weight"), tensors[name].float()
        largest = weight.abs().amax() if is_static else weight.abs().amax(1, keepdim=True)
        scale = largest / FP8_MAX
        tensors[name] = (weight / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
        tensors[f"{module}.weight_scale"] = scale
        if is_static:
            tensors[f"{module}.input_scale"] = torch.tensor(reach / FP8_MAX)
            for kind in "kv":
                if module.endswith(f"{kind}_proj"):
                    tensors[f"{module}.{kind}_scale"] = torch.tensor(reach / FP8_MAX)


def fp8_description(*, is_static: bool) -> dict[str, object]:
    """`quantization_config` of what `quantize_linears` makes, in compressed-tensors' words."""
    number = {"num_bits": 8, "type": "float"}
    weights = {**number, "dynamic": False, "strategy": "tensor" if is_static else "channel"}
    inputs = {**number, "dynamic": not is_static, "strategy": "tensor" if is_static else "token"}
    group = {"input_activations": inputs, "weights": weights, "targets": ["Linear"]}
    found: dict[str, object] = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }
    if is_static:
        found["kv_cache_scheme"] = {**number, "dynamic": False, "strategy": "tensor"}
    return found
