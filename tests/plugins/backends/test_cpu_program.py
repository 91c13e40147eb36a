"""Whole programs on the CPU backend: the references' values, the same bits in any schedule."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.cpu_program import (
    TOKENS,
    VOCAB,
    TinyModel,
    chunk_step,
)

from llmctl.plugins.backends import cpu
from llmctl.plugins.core.reference import ReferenceProgram


@pytest.mark.parametrize("quantized", [False, True])
def test_a_model_agrees_with_the_references_on_a_mixed_batch(quantized, prompts):
    results = []
    for program in (ReferenceProgram, cpu.CpuProgram):
        model = TinyModel(quantized)
        run = program(model.calls).run
        run(chunk_step(prompts, [(1, 0, 16), (2, 0, 64)]), model.kv_cache)
        run(chunk_step(prompts, [(3, 0, 33), (0, 0, 1), (1, 16, 17), (2, 64, 70)]), model.kv_cache)
        results.append((model.logits[:4].clone(), model.kv_cache.float()))
    (wanted, wanted_cache), (found, found_cache) = results
    error = (found - wanted).norm() / wanted.norm()
    assert error < (0.05 if quantized else 0.02)  # a rounding step that moved, through two layers
    assert (found_cache != wanted_cache).float().mean() < 0.05


@pytest.mark.parametrize("isa", [name for name in cpu.instruction_sets() if name != "generic"])
@pytest.mark.parametrize("quantized", [False, True])
def test_logits_have_the_same_bits_under_every_schedule(quantized, isa, prompts):
    """Alone and whole; then all requests in random chunks and random company."""
    cpu.set_instruction_set(isa)
    model = TinyModel(quantized)
    program = cpu.CpuProgram(model.calls)
    alone = []
    for request, prompt in enumerate(prompts):
        program.run(chunk_step(prompts, [(request, 0, len(prompt))]), model.kv_cache)
        alone.append(model.logits[0].clone())
    random = np.random.default_rng(7)
    for _ in range(5):
        model.kv_cache.view(torch.uint8).zero_()
        done = [0] * len(prompts)
        while any(n < len(p) for n, p in zip(done, prompts, strict=True)):
            parts, room = [], TOKENS
            for request in random.permutation(len(prompts)):
                left = len(prompts[request]) - done[request]
                count = min(left, room, int(random.integers(1, 40)))
                if left and count and random.random() < 0.7:
                    parts.append((int(request), done[request], done[request] + count))
                    done[request] += count
                    room -= count
            if not parts:
                continue
            cpu.set_num_threads(int(random.integers(1, 4)))
            program.run(chunk_step(prompts, parts), model.kv_cache)
            for row, (request, _, stop) in enumerate(parts):
                if stop == len(prompts[request]):
                    assert torch.equal(model.logits[row], alone[request])


@pytest.mark.parametrize(
    ("field", "index", "value", "message"),
    [
        ("token_ids", 2, VOCAB, "token_ids[2] is 131; it must be from 0 to 130"),
        ("token_ids", 0, -1, "token_ids[0] is -1"),
        ("slot_mapping", 1, 40 * 32, "slot_mapping[1] is 1280"),
        ("position_ids", 16, 600, "position_ids[16] is 600"),
        ("position_ids", 3, 2, "must increase"),
        ("logit_rows", 0, 17, "logit_rows[0] is 17"),
        ("block_tables", (0, 0), 40, "block_tables[0] is 40"),
        ("kv_len", 0, 129, "129 KV entries in 4 blocks"),
        ("cu_q", 1, 16, "cu_q runs from 0 to 16"),
    ],
)
def test_a_step_that_points_outside_its_tensors_is_caught(field, index, value, message, prompts):
    model = TinyModel(False)
    step = chunk_step(prompts, [(1, 0, 17)])
    getattr(step, field)[index] = value
    with pytest.raises(AssertionError) as failure:
        cpu.CpuProgram(model.calls).run(step, model.kv_cache)
    assert message in str(failure.value)


def test_a_step_larger_than_the_engine_is_caught(prompts):
    model = TinyModel(False)
    step = chunk_step([np.zeros(97, np.int32)], [(0, 0, 97)])
    with pytest.raises(AssertionError, match="97 rows in the step; .* at most 96"):
        cpu.CpuProgram(model.calls).run(step, model.kv_cache)


def test_a_cache_of_another_shape_is_caught(prompts):
    model = TinyModel(False)
    with pytest.raises(AssertionError, match="1 layers of 1 heads of 16"):
        cpu.CpuProgram(model.calls).run(chunk_step(prompts, [(0, 0, 1)]), model.kv_cache[:1])
