"""Beam searches of the CPU library: those of the search step by step, to the bit."""

from __future__ import annotations

import os
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
import torch
from support.redrafter import RECURRENCES, save_as
from support.redrafter_engine import HIDDEN, VOCAB, build, tensors_of

from llmctl.builder.engine_format import REDRAFTER_FIRST, REDRAFTER_NEXT, REDRAFTER_STATES
from llmctl.plugins.backends.cpu import (
    CpuSampling,
    instruction_sets,
    num_threads,
    set_instruction_set,
    set_num_threads,
)
from llmctl.plugins.backends.cpu.beam_search import AskedBeams
from llmctl.plugins.core.calls import StepInputs
from llmctl.plugins.ops.beam_search import reference
from llmctl.plugins.ops.sampling.reference import ReferenceSampling
from llmctl.runtime.drafting.redrafter.beams import UNBOUNDED, Bounds
from llmctl.runtime.drafting.redrafter.head import EngineHead
from llmctl.runtime.drafting.redrafter.search import Asked, CompiledSearch, StepSearch, searcher_of
from llmctl.runtime.engines.engine import Engine, open_cpu_engine

BEAMS, LENGTH, REQUESTS = 6, 5, 4


@pytest.fixture(params=instruction_sets())
def isa(request):
    set_instruction_set(request.param)
    yield request.param
    set_instruction_set(instruction_sets()[0])


@pytest.mark.parametrize(("rows", "vocab", "count"), [(1, 1, 1), (3, 16, 16), (5, 131, 7),
                                                      (2, 4096, 5), (9, 4093, 64)])  # fmt: skip
@pytest.mark.parametrize("ties", [False, True])
def test_the_likeliest_tokens_are_those_of_the_reference(isa, rows, vocab, count, ties):
    logits = 6 * torch.randn((rows, vocab), generator=torch.Generator().manual_seed(vocab))
    if ties:
        logits = logits.div(3).round()
    ids, values = CpuSampling().top_log_probs(logits.numpy(), count)
    wanted_ids, wanted = reference.top_log_probs(logits, count)
    assert ReferenceSampling().top_log_probs(logits.numpy(), count)[0].tolist() == ids.tolist()
    assert ids.tolist() == wanted_ids.tolist()
    exact = logits.double().log_softmax(1).gather(1, wanted_ids)
    assert np.abs(values - exact.numpy()).max() < 4e-6, "in units of a log-probability"
    assert np.abs(values - wanted.numpy()).max() < 4e-6


def test_every_instruction_set_gives_the_same_bits():
    logits = 6 * torch.randn((4, 4093), generator=torch.Generator().manual_seed(1))
    found = []
    for name in [name for name in instruction_sets() if name != "generic"]:
        set_instruction_set(name)
        ids, values = CpuSampling().top_log_probs(logits.numpy(), 9)
        found.append((ids.tolist(), values.tobytes()))
    set_instruction_set(instruction_sets()[0])
    assert all(own == found[0] for own in found)


def test_what_is_no_number_is_the_least_likely(isa):
    logits = torch.randn((3, 37), generator=torch.Generator().manual_seed(0))
    logits[0, ::2], logits[1], logits[2, 5] = torch.nan, torch.nan, torch.inf
    ids, _ = CpuSampling().top_log_probs(logits.numpy(), 37)
    assert sorted(ids[0].tolist()) == list(range(37))
    assert all(token % 2 for token in ids[0, :18].tolist())
    assert ids[1].tolist() == list(range(37)) and ids[2, 0] == 5


@pytest.fixture(scope="module", params=RECURRENCES)
def engine(request, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """A tiny engine with a random head, whose last step left a row for each of its requests."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    folder: Path = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=96, num_hidden_layers=1,
        num_attention_heads=1, num_key_value_heads=1, head_dim=64, max_position_embeddings=64,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.config.architectures = ["LlamaForCausalLM"]
    model.save_pretrained(folder / "hf")
    head = save_as(folder / "head", request.param, tensors_of(request.param))
    opened = open_cpu_engine(
        build(folder / "hf", folder / "engine", head, max_batch_size=REQUESTS, max_seq_len=64,
              max_num_tokens=64, redrafter_num_beams=BEAMS,
              redrafter_draft_len_per_beam=LENGTH)
    )  # fmt: skip
    opened.allocate_kv_cache(2)
    positions = np.arange(9, dtype=np.int32)
    opened.run(
        StepInputs(
            token_ids=np.array([3, 1, 4, 1, 5, 9, 2, 6, 5], np.int32),
            position_ids=positions,
            cu_q=np.array([0, 9], np.int32),
            kv_len=np.array([9], np.int32),
            block_tables=np.zeros((1, 1), np.int32),
            slot_mapping=positions,
            logit_rows=positions,
        )
    )
    return opened


def ask(seed: int) -> tuple[list[Asked], int, Bounds]:
    """Any number of requests, beams and lengths, with less room than drafts, and with bounds below
    which beams end early or are not begun."""
    generator = np.random.default_rng(seed)
    asked = []
    for _ in range(int(generator.integers(1, REQUESTS + 1))):
        length = int(generator.integers(1, LENGTH + 1))
        room = int(generator.integers(0, BEAMS * LENGTH + 1))
        row, root = generator.integers(0, 9), generator.integers(0, VOCAB)
        asked.append(Asked(int(row), int(root), length, room))
    num_beams = int(generator.integers(1, BEAMS + 1))
    bounds = UNBOUNDED
    if seed % 3:
        least = np.log(generator.uniform(0.001, 0.05))
        bounds = Bounds(least, least + (seed % 3 - 1) * generator.uniform(0, 1))
    return asked, num_beams, bounds


@pytest.mark.parametrize("seed", range(30))
def test_trees_and_scores_are_those_of_the_search_step_by_step(engine, seed):
    asked, num_beams, bounds = ask(seed)
    compiled = searcher_of(engine)
    assert isinstance(compiled, CompiledSearch)
    found = compiled.search(asked, num_beams, bounds)
    wanted = StepSearch(EngineHead(engine)).search(asked, num_beams, bounds)
    for one, other in zip(found, wanted, strict=True):
        assert one.drafts == other.drafts
        assert list(one.scores) == list(other.scores), "to the bit"
        assert all(score >= bounds.least_kept for score in one.scores)
    if bounds is UNBOUNDED:
        assert any(own.drafts.tokens for own in found) or not any(own.room for own in asked)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_search_that_is_begun_finds_the_same(engine, threads):
    """On another thread, if there is one; steps of other engines run meanwhile, and what was begun
    in vain is left."""
    before, wanted = num_threads(), StepSearch(EngineHead(engine))
    set_num_threads(threads)
    compiled = searcher_of(engine)
    other = np.random.default_rng(0).normal(size=(64, 4096)).astype(np.float32)
    try:
        for seed in range(300):
            asked, num_beams, bounds = ask(seed % 30)
            if seed % 7 == 0:
                compiled.begin(ask(seed % 30 + 1)[0], num_beams, bounds)
            if seed % 5 != 0:
                compiled.begin(asked, num_beams, bounds)
            if seed % 4 == 0:
                assert (CpuSampling().argmax(other) == other.argmax(axis=1)).all()
            found = compiled.search(asked, num_beams, bounds)
            assert found == wanted.search(asked, num_beams, bounds)
            assert compiled.num_steps == wanted.num_steps
    finally:
        set_num_threads(before)


def test_threads_that_search_ahead_and_threads_that_run_steps_share_the_pool(engine):
    """One thread begins and ends searches, another multiplies: neither waits for ever, and no item
    of one is computed in the memory of the other."""
    logits = np.random.default_rng(0).normal(size=(64, 4096)).astype(np.float32)
    wanted = CpuSampling().top_log_probs(logits, 3)
    asked, num_beams, bounds = ask(3)
    tree = searcher_of(engine).search(asked, num_beams, bounds)
    wrong = []

    def multiply() -> None:
        for _ in range(300):
            found = CpuSampling().top_log_probs(logits, 3)
            wrong.extend(part for part in (0, 1) if (found[part] != wanted[part]).any())

    before = num_threads()
    set_num_threads(3)
    thread, compiled = Thread(target=multiply), searcher_of(engine)
    thread.start()
    while thread.is_alive():
        compiled.begin(asked, num_beams, bounds)
        assert compiled.search(asked, num_beams, bounds) == tree
    set_num_threads(before)
    assert not wrong


def test_what_is_begun_is_refused_as_what_is_run(engine):
    compiled = searcher_of(engine)
    wrong = [Asked(9_999, 5, 2, 4)]
    compiled.begin(wrong, 2, UNBOUNDED)
    with pytest.raises(AssertionError, match="logit_rows"):
        compiled.search(wrong, 2, UNBOUNDED)
    assert compiled.search([Asked(0, 5, 2, 4)], 2, UNBOUNDED)[0].drafts.tokens


def test_a_search_under_way_outlives_what_asked_for_it(engine):
    """Its memory does not go before it ends; a forked process ends what its parent began."""
    asked, num_beams, bounds = ask(3)
    tree = searcher_of(engine).search(asked, num_beams, bounds)
    for _ in range(50):
        searcher_of(engine).begin(asked, num_beams, bounds)
    compiled = searcher_of(engine)
    compiled.begin(asked, num_beams, bounds)
    child = os.fork()
    if child == 0:
        os._exit(0 if compiled.search(asked, num_beams, bounds) == tree else 1)
    assert compiled.search(asked, num_beams, bounds) == tree
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_beams_that_are_not_worth_going_on_end(engine):
    asked = [Asked(2, 7, LENGTH, 64)]
    everything = searcher_of(engine).search(asked, 3, UNBOUNDED)[0]
    nothing = searcher_of(engine).search(asked, 3, Bounds(least_kept=0.5))[0]
    short = searcher_of(engine).search(asked, 3, Bounds(least_continued=0.5))[0]
    assert everything.drafts.depth == LENGTH
    assert nothing.drafts.tokens == [] and short.drafts.depth == 1
    assert len(short.drafts.tokens) == 3


def test_what_leaves_the_tensors_is_refused(engine):
    compiled = engine.compiled_search(REDRAFTER_FIRST, REDRAFTER_NEXT, REDRAFTER_STATES)
    least = (-np.inf, -np.inf)
    good = ([0], [5], [2], [4], 2)
    assert compiled.run(AskedBeams(*good, *least))[0].tokens
    for changed, message in (
        ({0: [9_999]}, "logit_rows"),
        ({0: [-1]}, "logit_rows"),
        ({1: [VOCAB]}, "token_ids"),
        ({4: BEAMS + 60}, "rows"),
        ({4: VOCAB + 1}, "beams"),
        ({4: 0}, "beams"),
        ({2: [0]}, "room"),
        ({3: [-1]}, "room"),
    ):
        arguments = [changed.get(index, value) for index, value in enumerate(good)]
        with pytest.raises(AssertionError, match=message):
            compiled.run(AskedBeams(*arguments, *least))
    many = [[value[0]] * (REQUESTS + 1) for value in good[:4]]
    with pytest.raises(AssertionError, match="rows"):
        compiled.run(AskedBeams(*many, BEAMS, *least))
