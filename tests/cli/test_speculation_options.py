"""run.py's list-in-a-string options, read strictly."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from llmctl.builder.heads.medusa.tree import DEFAULT, MedusaTree
from llmctl.errors import BadConfig, Unsupported
from llmctl.runtime.drafting.draft_engine.method import DraftEngine
from llmctl.runtime.drafting.draft_engine.tree import DraftTree
from llmctl.runtime.drafting.eagle.method import Eagle
from llmctl.runtime.drafting.lookahead.method import LookaheadDecoding
from llmctl.runtime.drafting.medusa.method import Medusa
from llmctl.runtime.drafting.method import DraftMethod
from llmctl.runtime.drafting.methods import choose_method, method_options
from llmctl.runtime.drafting.ngram.method import NgramLookup
from llmctl.runtime.drafting.plain.method import PlainDecoding
from llmctl.runtime.drafting.redrafter.method import RecurrentDrafting

DRAFT = Path("draft")
TREE = DraftTree(5, 3, 16)


def choose(engine, config, draft_len, ngram, medusa=None, tree=None, **others) -> DraftMethod:
    values = {
        **{option.name: None for option in method_options()},
        **others,
        "draft_engine": engine,
        "draft_target_model_config": config,
        "ngram_config": ngram,
        "medusa_choices": medusa,
        "draft_tree": tree,
    }
    return choose_method(values, draft_len)


@pytest.mark.parametrize(
    "arguments, wanted",
    [
        ((None, None, None, None), PlainDecoding()),
        ((DRAFT, None, None, None), DraftEngine(DRAFT)),
        ((DRAFT, None, 3, None), DraftEngine(DRAFT, 3)),
        ((DRAFT, "[4,[0],[0],False]", None, None), DraftEngine(DRAFT, 4)),
        ((DRAFT, " [4, [0], [0], False] ", 4, None), DraftEngine(DRAFT, 4)),
        ((DRAFT, "[4,[0],[0],True]", None, None), DraftEngine(DRAFT, 4, "logits")),
        ((DRAFT, None, None, None, None, "5,3,16"), DraftEngine(DRAFT, tree=TREE)),
        ((DRAFT, None, 16, None, None, "[5, 3, 16]"), DraftEngine(DRAFT, 16, tree=TREE)),
        (
            (DRAFT, "[16,[0],[0],False]", None, None, None, "5,3,16"),
            DraftEngine(DRAFT, 16, tree=TREE),
        ),
        ((None, None, None, "[10,2,[0]]"), NgramLookup(10, 2)),
        ((None, None, None, None, "auto"), Medusa()),
        ((None, None, 5, None, "mc_sim_7b_63"), Medusa(MedusaTree(DEFAULT), 5)),
        ((None, None, None, None, "[[1, 0]]"), Medusa(MedusaTree(((1,), (1, 0))))),
    ],
)
def test_options_become_one_method(arguments, wanted):
    assert choose(*arguments) == wanted


@pytest.mark.parametrize(
    "arguments, words",
    [
        ((DRAFT, "[4,[0],[0]]", None, None), "form"),
        ((DRAFT, "4", None, None), "form"),
        ((DRAFT, "[4,[0],[0],False", None, None), "form"),
        ((DRAFT, "__import__('os')", None, None), "form"),
        ((DRAFT, "[0,[0],[0],False]", None, None), "draft_len"),
        ((DRAFT, "[True,[0],[0],False]", None, None), "draft_len"),
        ((DRAFT, "[4,[0],[0],0]", None, None), "use_logits"),
        ((DRAFT, "[4,0,[0],False]", None, None), "devices"),
        ((DRAFT, "[4,[0],[0],False]", 5, None), "--draft-len says 5"),
        ((DRAFT, "[4,[0],[0],False]", None, None, None, "5,3,16"), "target-model-config says 4"),
        ((DRAFT, "[16,[0],[0],True]", None, None, None, "5,3,16"), "accepted by tokens"),
        ((DRAFT, None, 4, None, None, "5,3,16"), "--draft-tree 5,3,16 says draft_len 16"),
        ((DRAFT, None, None, None, None, "5,3"), "depth,branch,nodes"),
        ((DRAFT, None, None, None, None, "5,3,-1"), "depth,branch,nodes"),
        ((DRAFT, None, None, None, None, "0,3,16"), "from 1 to 1024"),
        ((DRAFT, None, None, None, None, "5,3,16,0"), "from 1 to 1024"),
        ((DRAFT, None, None, None, None, "5,3,16,1"), "has at most 15 drafts"),
        ((DRAFT, None, None, None, None, "9,3,8"), "have no path of 9"),
        ((DRAFT, None, None, None, None, "2,3,13"), "has at most 12 drafts"),
        ((None, None, None, None, None, "5,3,16"), "--draft-tree is given without a draft"),
        ((DRAFT, None, 0, None), "at least 1"),
        ((None, "[4,[0],[0],False]", None, None), "without a draft"),
        ((None, None, 4, None), "without a draft"),
        ((DRAFT, None, None, "[10,2,[0]]"), "one method"),
        ((None, None, 3, "[10,2,[0]]"), "--draft-len says 3"),
        ((None, None, None, "[10,0,[0]]"), "max_ngram"),
        ((None, None, None, "[10,2]"), "form"),
        (
            (None, None, None, None, "built"),
            "--medusa-choices is built; it must be a list",
        ),
        ((None, None, None, None, "[[0, 10]]"), "the path [0, 10]"),
        ((DRAFT, None, None, None, "auto"), "--draft-engine and --medusa-choices are both given"),
        ((None, None, 0, None, "auto"), "at least 1"),
    ],
)
def test_malformed_and_contradicting_options_are_named(arguments, words):
    with pytest.raises(BadConfig, match=words.replace("[", r"\[")):
        choose(*arguments)


@pytest.mark.parametrize(
    ("beams", "length", "draft_len", "wanted"),
    [
        ("auto", None, None, RecurrentDrafting()),
        (None, "auto", None, RecurrentDrafting()),
        ("3", None, 7, RecurrentDrafting(3, None, 7)),
        ("auto", "2", None, RecurrentDrafting(None, 2)),
        ("4", "5", None, RecurrentDrafting(4, 5)),
    ],
)
def test_beams_ask_for_a_recurrent_head(beams, length, draft_len, wanted):
    values = {"redrafter_num_beams": beams, "redrafter_draft_len_per_beam": length}
    assert choose(None, None, draft_len, None, **values) == wanted


@pytest.mark.parametrize(
    ("method", "says"),
    [
        (Eagle(), False),
        (Eagle(num_offers=4), False),
        (Eagle(choices=MedusaTree(DEFAULT)), True),
        (Medusa(), False),
        (Medusa(MedusaTree(DEFAULT)), True),
        (RecurrentDrafting(), False),
        (RecurrentDrafting(num_beams=2), True),
        (RecurrentDrafting(length=2), True),
        (LookaheadDecoding(None), True),
        (NgramLookup(None, 3), True),
        (DraftEngine(Path("draft")), True),
        (PlainDecoding(), True),
    ],
)
def test_heads_leave_lengths_to_their_costs_unless_options_say_them(method, says):
    assert method.has_lengths == says
    assert not method.is_drafting or method.with_draft_len(3).has_lengths


@pytest.mark.parametrize("text", ["0", "-1", "two", "", "1.5", "+3", "[3]"])
@pytest.mark.parametrize("name", ["redrafter_num_beams", "redrafter_draft_len_per_beam"])
def test_what_is_no_number_of_beams_is_refused(name, text):
    with pytest.raises(BadConfig, match=f"--{name.replace('_', '-')} is '{re.escape(text)}'"):
        choose(None, None, None, None, **{name: text})
    with pytest.raises(BadConfig, match="both given; one method"):
        choose(None, None, None, "[4,2,[0]]", redrafter_num_beams="auto")


ALL = "[0,1,2,3,4,5,6,7]"


def test_of_the_devices_listed_the_first_is_taken_and_the_user_told():
    method = choose(DRAFT, f"[10,{ALL},{ALL}, False]", None, None)
    assert method == DraftEngine(DRAFT, 10)
    listed = "[0, 1, 2, 3, 4, 5, 6, 7]"
    assert method.notes == (
        f"of the devices {listed} for the draft engine a GPU's engine takes the first; "
        "a CPU's has none",
        f"of the devices {listed} for the target engine a GPU's engine takes the first; "
        "a CPU's has none",
    )
    assert method.with_draft_len(3).notes == method.notes
    assert len(choose(None, None, None, f"[10,2,{ALL}]").notes) == 1
    assert choose(DRAFT, "[4,[0],[0],False]", None, None).notes == ()


@pytest.mark.parametrize("devices", ["[0,0]", "[0,-1]", "[0,1.0]", "[0,True]", "(0,1)"])
def test_what_is_no_list_of_devices_is_refused(devices):
    with pytest.raises(BadConfig, match="device"):
        choose(DRAFT, f"[4,[0],{devices},False]", None, None)


@pytest.mark.parametrize("devices", ["[1]", "[1,0]", "[]"])
def test_another_device_than_0_is_refused_with_the_form_that_works(devices):
    with pytest.raises(Unsupported) as caught:
        choose(DRAFT, f"[4,[0],{devices},False]", None, None)
    assert "[0]" in caught.value.fix
