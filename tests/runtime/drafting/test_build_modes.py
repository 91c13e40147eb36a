"""What a method asks of its target engine and what the builder builds are one table's rows."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from llmctl.builder.config import BuildRequest
from llmctl.builder.speculative_modes import SPECULATIVE_MODES
from llmctl.errors import BadConfig, PairMismatch, Unsupported
from llmctl.runtime.drafting.methods import METHODS, choose_method, method_options
from llmctl.runtime.drafting.plain.method import PlainDecoding

ASKED = {  # by a row's `how`: values of options that ask for the method
    "--draft-engine": {"draft_engine": "engine"},
    "--ngram-config": {"ngram_config": "[4,2,[0]]"},
    "--medusa-choices": {"medusa_choices": "auto"},
    "--redrafter-num-beams": {"redrafter_num_beams": "auto"},
    "--eagle-choices": {"eagle_choices": "auto"},
    "--lookahead-config": {"lookahead_config": "[2,2,3]"},
}
NOTHING = {option.name: None for option in method_options()}


def config(mode: str, max_draft_len: int) -> SimpleNamespace:
    number = SPECULATIVE_MODES[mode].number
    facts = {
        "medusa": {"num_heads": 2, "num_layers": 1, "choices": [[0], [0, 0], [1], [2]]},
        "redrafter": {"num_beams": 2, "draft_len_per_beam": 2, "greedy_search": False},
        "eagle": {"taps": [2, 4, 5]},
    }
    build = {"max_draft_len": max_draft_len, "speculative_decoding_mode": number}
    build["kv_cache_type"] = "PAGED"
    build |= {"draft_heads": facts.get(mode, {})}
    return SimpleNamespace(
        backend="cpu",
        build_config={"tokens_per_block": 32, **build},
        tokenizer={"hash": "a", "vocab_size": 10},
        pretrained_config={"vocab_size": 10},
    )


@pytest.mark.parametrize("row", METHODS, ids=lambda row: row.how)
def test_a_method_takes_engines_of_its_build_mode(row):
    (asked,) = [values for how, values in ASKED.items() if row.how.startswith(how)]
    method = choose_method({**NOTHING, **asked})
    BuildRequest(speculative_decoding_mode=method.build_mode, max_draft_len=4)  # can be built
    beside = {role: config("none", 0) for role in method.engines}
    assert method.check(config(method.build_mode, 4), beside) == 4
    for mode in SPECULATIVE_MODES:
        if row.how.startswith("--lookahead-config"):
            assert method.check(config(mode, 4), beside) == 4, "any engine with room will do"
        elif mode != method.build_mode:
            with pytest.raises(PairMismatch, match=f"decoding_mode {method.build_mode}"):
                method.check(config(mode, 4), beside)


def test_lookahead_needs_room_and_an_engine_that_verifies_trees():
    def check(sizes, target, draft_len=None):
        method = choose_method({**NOTHING, "lookahead_config": sizes}, draft_len)
        return method.check(target, {})

    target = config("lookahead_decoding", 15)
    assert check("[4,3,4]", target) == 15 and check("[4,3,4]", target, 9) == 9
    assert check("[3,3,2]", target) == 9
    for sizes, draft_len, words in (
        ("[5,3,4]", None, r"\[5,3,4\] is 17 drafts per round, .* built for max_draft_len 15"),
        ("[4,3,4]", 16, "16 drafts per round are requested; .* has 15"),
        ("auto", None, "built without --lookahead_config"),
    ):
        with pytest.raises(PairMismatch, match=words):
            check(sizes, target, draft_len)
    with pytest.raises(PairMismatch, match="max_draft_len 0"):
        check("[2,2,1]", config("none", 0))
    target.build_config["draft_heads"] = {
        "window_size": 3, "ngram_size": 3, "verification_set_size": 3
    }  # fmt: skip
    assert check("auto", target) == 11
    target.build_config["kv_cache_type"] = "CONTINUOUS"
    with pytest.raises(Unsupported, match="verifies chains"):
        check("auto", target)
    with pytest.raises(BadConfig, match="drafts nothing"):
        choose_method({**NOTHING, "lookahead_config": "[1,1,0]"})


def test_every_mode_that_can_be_built_has_a_method():
    methods = [choose_method({**NOTHING, **asked}) for asked in ASKED.values()]
    used = {method.build_mode for method in (*methods, PlainDecoding())}
    assert used == {name for name, mode in SPECULATIVE_MODES.items() if mode.is_available}


def test_numbers_are_those_of_tensorrt_llm():
    numbers = {name: mode.number for name, mode in SPECULATIVE_MODES.items()}
    assert numbers["draft_tokens_external"] == 2 and numbers["eagle"] == 32
    assert sorted(numbers.values()) == [1 << bit for bit in range(6)]
