"""Whole rounds of an engine against a transcription in numpy and a target in transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from support.beam_reference import NumpyHead, choose, expand_with, pack, slow_search
from support.e2e import run_all
from support.redrafter import RECURRENCES, fit_head, make_head, save_as
from support.tiny_pair import MAX_SEQ_LEN, VOCAB, save_target
from transformers import AutoModelForCausalLM

from llmctl.builder.build import plan_build, run_build
from llmctl.builder.config import BuildRequest
from llmctl.plugins.backends.cpu import CpuSampling
from llmctl.runtime.api.executor import Executor, ExecutorConfig, KvCacheConfig
from llmctl.runtime.drafting.drafts import ROOT
from llmctl.runtime.drafting.redrafter.method import RecurrentDrafting
from llmctl.runtime.engines.engine import open_cpu_engine
from llmctl.runtime.request import Request

WIDTH, BEAMS, LENGTH = 32, 4, 3


def build(folder: Path, recurrence: str):
    """(the target in transformers, its texts, the head's tensors, the engine of both)."""
    save_target(folder / "hf", WIDTH)
    model = AutoModelForCausalLM.from_pretrained(folder / "hf", dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    prompts = torch.randint(2, VOCAB, (8, 6), generator=torch.Generator().manual_seed(0))
    texts = model.generate(prompts, max_new_tokens=40, do_sample=False, pad_token_id=0).tolist()
    tensors = make_head(WIDTH, VOCAB, exit_dim=40, is_rnn=recurrence != "sum")
    if recurrence == "silu":
        tensors = fit_head(model, texts, VOCAB)
    request = BuildRequest(
        max_batch_size=4,
        max_num_tokens=128,
        max_seq_len=MAX_SEQ_LEN,
        tokens_per_block=16,
        speculative_decoding_mode="redrafter",
        draft_model_dir=str(save_as(folder / "head", recurrence, tensors)),
        redrafter_num_beams=BEAMS,
        redrafter_draft_len_per_beam=LENGTH,
    )
    run_build(plan_build(folder / "hf", request, backend="cpu"), folder / "engine")
    return model, texts, tensors, open_cpu_engine(folder / "engine")


@pytest.mark.parametrize("recurrence", RECURRENCES)
def test_rounds_are_those_of_the_transcription(tmp_path: Path, recurrence: str) -> None:
    """Each round: the hidden row is that of the last accepted token, the tree that of the slow
    search and the published formulas, and what is accepted that of the published choice."""
    model, texts, tensors, engine = build(tmp_path, recurrence)
    drafter = RecurrentDrafting(BEAMS, LENGTH).make_drafter({"target": engine}, BEAMS * LENGTH)
    rounds: list[tuple[list[int], list[int], list[int]]] = []  # tokens before, drafts, parents
    propose = drafter.propose

    def watched(batch):
        found = propose(batch)
        for item, drafts in zip(batch.generation, found, strict=True):
            if item.draft_len == BEAMS * LENGTH:
                parents = drafts.parents or list(range(ROOT, len(drafts.tokens) - 1))
                rounds.append((list(item.sequence.tokens), drafts.tokens, parents))
        return found

    drafter.propose = watched
    config = ExecutorConfig(KvCacheConfig(num_blocks=80))
    with Executor(engine, drafter, config, CpuSampling()) as executor:
        outputs = run_all(executor, [Request(tuple(text[:6]), 40) for text in texts[:3]])
    assert [[*text[:6], *own[0]] for text, own in zip(texts, outputs, strict=False)] == texts[:3]

    table = model.get_input_embeddings().weight.detach().double().numpy()
    head = NumpyHead(recurrence, {n: t.double().numpy() for n, t in tensors.items()}, table)
    assert len(rounds) > 20
    accepted_drafts = 0
    for tokens, drafts, parents in rounds:
        with torch.no_grad():
            hidden = model.model(torch.tensor([tokens[:-1]])).last_hidden_state[0, -1]
        expand = expand_with(head, hidden.double().numpy())
        beams = np.array([path for path, _, _ in slow_search(expand, tokens[-1], LENGTH, BEAMS)])
        packed = pack(beams)
        assert drafts == packed.tokens[1:]
        assert [parent + 1 for parent in parents] == packed.parents[1:]
        with torch.no_grad():
            rows = [[*tokens[:-1], *beam] for beam in beams.tolist()]
            said = model(torch.tensor(rows)).logits[:, len(tokens) - 1 :].argmax(-1).numpy()
        accepted, beam = choose(beams, said)
        accepted_drafts += accepted
        after = next(own for own in texts if own[: len(tokens)] == tokens)
        run = [*beams[beam, 1 : 1 + accepted].tolist(), int(said[beam, accepted])]
        assert after[len(tokens) : len(tokens) + len(run)] == run[: len(after) - len(tokens)]
    assert accepted_drafts > 20 or recurrence != "silu"
