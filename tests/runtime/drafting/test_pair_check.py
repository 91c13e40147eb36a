"""Which engines may work together, told from their config.json alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from llmctl.builder.engine_format import SCHEMA_VERSION, EngineConfig
from llmctl.errors import PairMismatch, Unsupported
from llmctl.runtime.drafting.draft_engine.method import ROLE, DraftEngine
from llmctl.runtime.drafting.draft_engine.pair_check import check_pair
from llmctl.runtime.drafting.draft_engine.tree import DraftTree
from llmctl.runtime.drafting.target_check import check_target

NONE, DRAFT_TOKENS_EXTERNAL = 1, 2  # values of speculative_decoding_mode


def engine(*, max_draft_len=0, vocab_size=1024, tokens_per_block=32, max_seq_len=512, **changes):
    """A config as `llmctl build` writes it, in the fields that matter here."""
    tokenizer = {"files": ["tokenizer.json"], "hash": "a" * 64, "vocab_size": 1000}
    base = EngineConfig(
        version=SCHEMA_VERSION,
        backend="cpu",
        pretrained_config={"vocab_size": vocab_size},
        build_config={
            "max_draft_len": max_draft_len,
            "speculative_decoding_mode": DRAFT_TOKENS_EXTERNAL if max_draft_len else NONE,
            "tokens_per_block": tokens_per_block,
            "max_seq_len": max_seq_len,
        },
        plugin_config={},
        source={},
        tokenizer=tokenizer,
        versions={},
        command="llmctl build",
    )
    return replace(base, **changes)


def with_tokenizer(content_hash, vocab_size=1000):
    return {"files": [], "hash": content_hash, "vocab_size": vocab_size}


def test_a_matching_pair_uses_the_draft_len_asked_for():
    assert check_pair(engine(max_draft_len=4), engine(), 3) == 3


def test_without_a_draft_len_the_target_is_used_to_its_limit():
    assert check_pair(engine(max_draft_len=4), engine(), None) == 4
    assert check_target(engine(max_draft_len=7), None) == 7


def test_swapped_engines_are_recognised():
    with pytest.raises(PairMismatch, match="swapped") as caught:
        check_pair(engine(), engine(max_draft_len=4), 4)
    assert "--draft-engine" in caught.value.fix


@pytest.mark.parametrize("draft_len, flag", [(5, "--max_draft_len 5"), (None, "--max_draft_len 4")])
def test_a_target_without_room_for_drafts_names_the_flags_to_rebuild_with(draft_len, flag):
    for check in (
        lambda: check_pair(engine(), engine(), draft_len),
        lambda: check_target(engine(), draft_len),
    ):
        with pytest.raises(PairMismatch, match="cannot verify drafts") as caught:
            check()
        assert "--speculative_decoding_mode draft_tokens_external" in caught.value.fix
        assert flag in caught.value.fix


def test_a_draft_len_beyond_the_target_names_both_numbers():
    with pytest.raises(PairMismatch, match="draft_len is 9; .* max_draft_len 4") as caught:
        check_pair(engine(max_draft_len=4), engine(), 9)
    assert "lower the draft length to 4" in caught.value.fix
    assert "--max_draft_len 9" in caught.value.fix


def test_a_tree_beyond_the_target_is_to_have_fewer_nodes():
    with pytest.raises(PairMismatch, match="draft_len is 16") as caught:
        check_pair(engine(max_draft_len=4), engine(), 16, DraftTree(5, 3, 16))
    assert caught.value.fix.startswith("give a --draft-tree whose nodes are at most 4, or rebuild")


def test_tokenizers_are_compared_by_content_and_not_by_file_name():
    target = engine(max_draft_len=4)
    same = {"files": ["other.json"], "hash": "a" * 64, "vocab_size": 1000}
    assert check_pair(target, engine(tokenizer=same), 4) == 4
    with pytest.raises(PairMismatch, match=r"aaaaaaaaaaaa.*bbbbbbbbbbbb"):
        check_pair(target, engine(tokenizer=with_tokenizer("b" * 64)), 4)
    with pytest.raises(PairMismatch, match="built without tokenizer files"):
        check_pair(target, engine(tokenizer=with_tokenizer(None, None)), 4)


def test_a_padded_vocabulary_width_may_differ_under_one_tokenizer():
    target = engine(max_draft_len=4, vocab_size=1088)
    assert check_pair(target, engine(vocab_size=1024), 4) == 4
    assert check_pair(engine(max_draft_len=4), engine(vocab_size=1088), 4) == 4


def test_a_vocabulary_smaller_than_the_tokenizer_is_refused_with_both_widths():
    with pytest.raises(PairMismatch, match="1000 tokens; vocab_size is 1024 .* and 900"):
        check_pair(engine(max_draft_len=4), engine(vocab_size=900), 4)


def test_without_tokenizers_the_widths_must_be_equal():
    bare = with_tokenizer(None, None)
    target = engine(max_draft_len=4, tokenizer=bare)
    assert check_pair(target, engine(tokenizer=bare), 4) == 4
    with pytest.raises(PairMismatch, match="vocab_size is 1024 in the target and 1025"):
        check_pair(target, engine(tokenizer=bare, vocab_size=1025), 4)


@pytest.mark.parametrize(
    "draft, words",
    [
        (engine(tokens_per_block=64), "tokens_per_block is 32 in the target and 64"),
        (engine(backend="cuda"), "backend is 'cpu' in the target and 'cuda'"),
    ],
)
def test_what_must_be_equal_is_named_with_both_values(draft, words):
    with pytest.raises(PairMismatch, match=words):
        check_pair(engine(max_draft_len=4), draft, 4)


def test_a_shorter_draft_is_allowed():
    assert check_pair(engine(max_draft_len=4), engine(max_seq_len=128), 4) == 4


def test_a_draft_that_could_be_a_target_itself_is_allowed():
    assert check_pair(engine(max_draft_len=4), engine(max_draft_len=2), 4) == 4


def test_a_tree_needs_room_in_both_engines_and_a_backend_that_continues_it():
    method = DraftEngine(Path("draft"), tree=DraftTree(4, 3, 12))
    target, draft = engine(max_draft_len=12), engine(max_draft_len=2)
    assert method.check(target, {ROLE: draft}) == 12
    with pytest.raises(PairMismatch, match="draft_len is 12.* max_draft_len 8"):
        method.check(engine(max_draft_len=8), {ROLE: draft})
    with pytest.raises(PairMismatch, match="needs 3 tokens of a sequence .* built for 1") as caught:
        method.check(target, {ROLE: engine()})
    assert "--max_draft_len 2" in caught.value.fix
    star = DraftEngine(Path("draft"), tree=DraftTree(1, 3, 3))
    assert star.check(target, {ROLE: engine()}) == 3, "nothing follows its drafts"
    with pytest.raises(PairMismatch, match="needs 4 tokens of a sequence .* built for 3"):
        method.check(*(replace(target, backend="cuda"), {ROLE: replace(draft, backend="cuda")}))
    one_by_one = DraftEngine(Path("draft"), tree=DraftTree(6, 2, 12, 1))
    for backend in ("cpu", "cuda"):
        pair = [replace(own, backend=backend) for own in (target, engine())]
        assert one_by_one.check(pair[0], {ROLE: pair[1]}) == 12, "by steps of a chain"
    smallest = DraftEngine(Path("draft"), tree=DraftTree(2, 2, 2))
    for length, backend in ((1, "cpu"), (2, "cuda")):
        own = replace(engine(max_draft_len=length), backend=backend)
        assert smallest.check(replace(target, backend=backend), {ROLE: own}) == 2
    with pytest.raises(PairMismatch, match="needs 3 tokens"):
        own = replace(engine(max_draft_len=1), backend="cuda")
        smallest.check(replace(target, backend="cuda"), {ROLE: own})
    pair = [replace(own, backend="tensorrt") for own in (target, draft)]
    with pytest.raises(Unsupported, match="trees from a draft engine are not available"):
        method.check(pair[0], {ROLE: pair[1]})


@pytest.mark.parametrize("role", ["target", "draft"])
def test_engines_whose_attention_computes_chains_draft_no_trees(role):
    fp8 = {"use_fp8_context_fmha": "enable", "use_fp8_generation_fmha": "enable"}
    engines = {name: engine(max_draft_len=12) for name in ("target", "draft")}
    engines[role] = replace(engines[role], plugin_config=fp8)
    target, draft = engines.values()
    assert DraftEngine(Path("draft"), 8).check(target, {ROLE: draft}) == 8
    tree = DraftEngine(Path("draft"), tree=DraftTree(4, 3, 12))
    with pytest.raises(Unsupported, match=f"4,3,12 drafts trees, and the {role} engine") as caught:
        tree.check(target, {ROLE: draft})
    assert caught.value.fix == (
        f"leave --draft-tree out, or rebuild the {role} with --use_fp8_generation_fmha disable"
    )
