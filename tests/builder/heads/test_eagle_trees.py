"""A tree that an EAGLE head drafts level by level: the bits of drafting each of its paths alone,
and what plain torch computes of it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from support.eagle import TorchHead, make_head, save_head

from llmctl.builder.build import plan_build, run_build
from llmctl.builder.config import BuildRequest
from llmctl.builder.engine_format import parse_choices, read_engine_config
from llmctl.errors import BadConfig, PairMismatch, Unsupported
from llmctl.plugins.backends.backend import BACKENDS
from llmctl.plugins.backends.cpu import CpuSampling
from llmctl.plugins.core.calls import StepInputs
from llmctl.runtime.drafting.eagle.head import EngineHead
from llmctl.runtime.drafting.eagle.method import Eagle
from llmctl.runtime.drafting.eagle.pairs import Pairs
from llmctl.runtime.drafting.growth.growth import Chain, DynamicShape, DynamicTree, StaticTree
from llmctl.runtime.drafting.static_nodes import Nodes
from llmctl.runtime.engines.engine import open_cpu_engine
from llmctl.runtime.request import Request, Sequence

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 35, 89, 79]
OWN = 77  # the target's own token behind them
OPTIONS = {
    "speculative_decoding_mode": "eagle",
    "max_batch_size": 2,
    "max_num_tokens": 64,
    "max_seq_len": 64,
    "max_draft_len": 14,
    "tokens_per_block": 8,
    "eagle_layers": "0,1,1",
}
TABLE = [3, 1, 4, 2]  # blocks: a tree of more than four drafts reaches the third
CHOICES = parse_choices("[[0],[1],[2],[0,0],[1,0],[2,0]]")
TABLES = np.array([TABLE], np.int32)


def sequence():
    request = Request(tuple(TOKENS), max_tokens=32)
    tokens = [*TOKENS, OWN]
    return Sequence(1, 1, request, 0, tokens, len(TOKENS), max_len=64, block_table=TABLE)


def prompt():
    positions = np.arange(len(TOKENS), dtype=np.int32)
    table = np.array([TABLE], np.int32)
    return StepInputs(
        token_ids=np.array(TOKENS, np.int32),
        position_ids=positions,
        cu_q=np.array([0, len(TOKENS)], np.int32),
        kv_len=np.array([len(TOKENS)], np.int32),
        block_tables=table,
        slot_mapping=table[0, positions // 8] * 8 + positions % 8,
        logit_rows=np.array([len(TOKENS) - 1], np.int32),
    )


class Recording:
    """A head, and what it put out for each path."""

    def __init__(self, engine):
        self.head, self.found = EngineHead(engine), {}

    def begin(self, own):
        """Anew from the prompt: entries of earlier drafts are written over or not seen."""
        rows = np.arange(len(TOKENS))
        self.head.extend([Pairs(own, 0, len(TOKENS), rows, True)])

    def grow(self, tree):
        self.begin(tree.sequence)
        self._offer(tree, [0])
        while tree.frontier:
            self.head.next([node.parent.row if node.parent else 0 for node in tree.frontier],
                           [tree], TABLES)  # fmt: skip
            for row, node in enumerate(tree.frontier):
                node.row = row
                path = tuple(node.token for node in node.line())
                state = self.head._outputs["hidden"][row].clone()
                self.found[path] = (state, self.head._outputs["logits"][row].clone())
            self._offer(tree, list(range(len(tree.frontier))))
        return self.found

    def _offer(self, tree, rows):
        ids, scores = CpuSampling().top_log_probs(self.head.logits(rows), tree.num_offers)
        tree.take(ids.tolist(), scores.tolist())


def alone(recording, path):
    """What the head puts out for the last of a path that is drafted as a chain."""
    own = sequence()
    recording.begin(own)
    chain = Chain(own, 0, len(path) + 1, is_plain=True)
    for token in path:
        chain.append(token)
        recording.head.next([0], [chain], TABLES)
    outputs = recording.head._outputs
    return outputs["hidden"][0].clone(), outputs["logits"][0].clone()


NODES = Nodes([-1, -1, -1, 0, 0, 1, 2, 3, 3, 5, 6], [0] * 3 + [1] * 4 + [2] * 4,
              [0, 1, 2, 0, 1, 0, 1, 0, 1, 0, 2])  # fmt: skip


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize(
    ("dtype", "windows"), [("float32", (0,)), ("bfloat16", (0,)), ("float32", (0, 6))]
)
def test_every_draft_is_computed_along_its_own_path(
    new_model, save, tmp_path, kind, dtype, windows
):
    model = new_model("llama", dtype=dtype)
    tensors = make_head(layers=len(windows))
    kinds = ["sliding_attention" if window else "full_attention" for window in windows]
    folder = save_head(tmp_path / "head", tensors, sliding_window=6, layer_types=kinds)
    request = BuildRequest(**OPTIONS, draft_model_dir=str(folder), max_non_leaves_per_layer=4)
    run_build(plan_build(save(model), request, backend="cpu"), tmp_path / "engine")
    engine = open_cpu_engine(tmp_path / "engine")
    engine.allocate_kv_cache(5)
    engine.run(prompt())
    recording = Recording(engine)
    tree = (
        DynamicTree(sequence(), 0, 14, DynamicShape(5, 4))
        if kind == "dynamic"
        else StaticTree(sequence(), 0, NODES)
    )
    found = dict(recording.grow(tree))
    assert len(found) >= 6 and len({len(path) for path in found}) > 1
    assert any(len(path) > 1 and (path[0],) in found for path in found)
    for path, (state, logits) in found.items():
        wanted, wanted_logits = alone(recording, path)
        assert torch.equal(state, wanted) and torch.equal(logits, wanted_logits)
    if dtype == "float32":
        with torch.no_grad():
            states = model(torch.tensor([TOKENS]), output_hidden_states=True).hidden_states
        table = model.get_input_embeddings().weight.detach()
        head = TorchHead(tensors, table, windows=windows)
        g = head.fc(torch.cat([states[layer][0] for layer in (0, 1, 1)], dim=-1))
        read = [*TOKENS[1:], OWN]
        for path, (state, _) in found.items():
            own_g, own_read = g, read
            for token in path:
                own_g = torch.cat((own_g, head.out(own_g, own_read)[-1:]))
                own_read = [*own_read, token]
            wanted = head.out(own_g, own_read)[-1]
            torch.testing.assert_close(state, wanted, rtol=5e-5, atol=5e-5)


def test_more_drafts_of_a_level_than_of_a_round_are_refused(new_model, save, tmp_path):
    folder = save_head(tmp_path / "head", make_head())
    request = BuildRequest(**OPTIONS, draft_model_dir=str(folder), max_non_leaves_per_layer=15)
    with pytest.raises(BadConfig, match="is 15, of --max-draft-len 14"):
        plan_build(save(new_model("llama")), request, backend="cpu")


def test_trees_are_refused_where_no_kernel_goes_on_with_them(
    new_model, save, tmp_path, monkeypatch
):
    """At build: an engine that can draft no tree is not built for one."""
    folder = save_head(tmp_path / "head", make_head(head_dim=64), head_dim=64)
    request = BuildRequest(**OPTIONS, draft_model_dir=str(folder), max_non_leaves_per_layer=4)
    checkpoint = save(new_model("llama", head_dim=64, dtype="bfloat16"))
    monkeypatch.setitem(BACKENDS, "cuda", replace(BACKENDS["cuda"], continues_trees=False))
    with pytest.raises(Unsupported, match="--max-non-leaves-per-layer is 4.*they are on cpu"):
        plan_build(checkpoint, request, backend="cuda")


def test_on_cuda_a_level_has_a_row_for_each_draft_that_is_followed(new_model, save, tmp_path):
    """However many drafts the tree has; a static one that follows more is refused by name."""
    folder = save_head(tmp_path / "head", make_head(head_dim=64), head_dim=64)
    request = BuildRequest(**OPTIONS, draft_model_dir=str(folder), max_non_leaves_per_layer=2)
    checkpoint = save(new_model("llama", head_dim=64, dtype="bfloat16"))
    planned = plan_build(checkpoint, request, backend="cuda", with_binaries=False)
    assert planned.plan.max_num_beams == 2 * 2
    run_build(plan_build(checkpoint, request, backend="cpu"), tmp_path / "engine")
    config = replace(read_engine_config(tmp_path / "engine"), backend="cuda")
    assert Eagle(9, num_offers=3).check(config, {}) == 9
    assert Eagle(num_offers=3).check(config, {}) == 14
    with pytest.raises(PairMismatch, match="expands 3 drafts of one level.* built for 2"):
        Eagle(choices=CHOICES).check(config, {})
