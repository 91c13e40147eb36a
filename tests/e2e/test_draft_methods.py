"""The registry of drafting methods: adding one is a folder with a row, and that row in the table.

The proof is a method that drafts the last token again and again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import MappingProxyType

import pytest
from support.e2e import DemoPair, PromptMaker, run_all
from support.tree_drafter import RandomTrees

from llmctl.errors import BadConfig
from llmctl.runtime.drafting.drafts import Drafts
from llmctl.runtime.drafting.method import EXTERNAL_DRAFTS, MethodOption, MethodRow
from llmctl.runtime.drafting.methods import METHODS, choose_method, how_to_draft, method_options
from llmctl.runtime.drafting.plain.drafter import NoDrafter
from llmctl.runtime.drafting.plain.method import PlainDecoding
from llmctl.runtime.drafting.target_check import check_target
from llmctl.runtime.kv_cache.attention_windows import WindowOptions
from llmctl.runtime.open import EngineOptions, OpenEngines, check_engines
from llmctl.runtime.request import Request, SamplingConfig


class RepeatDrafter(NoDrafter):
    """Proposes the last token of each sequence."""

    def __init__(self, max_draft_len):
        self.max_draft_len = max_draft_len

    def propose(self, batch):
        return [
            Drafts([item.sequence.tokens[-1]] * min(item.draft_len, self.max_draft_len))
            for item in batch.generation
        ]


@dataclass(frozen=True)
class RepeatLast:
    draft_len: int | None
    name = "repeat"
    build_mode = EXTERNAL_DRAFTS
    is_drafting = True
    has_lengths = True
    drafts_trees = False
    is_device_led = False
    notes = ()
    acceptance = "tokens"
    engines = MappingProxyType({})

    def with_draft_len(self, draft_len):
        return replace(self, draft_len=draft_len)

    def check(self, target, configs):
        return check_target(target, self.draft_len)

    def make_drafter(self, engines, draft_len):
        return RepeatDrafter(draft_len)

    def make_device_drafter(self, engines, draft_len, drafter):
        return None


ROW = MethodRow(
    how="--repeat-last",
    options=(MethodOption("repeat_last", ("--repeat-last",), int, "Draft the last token again."),),
    make=lambda values, draft_len: (
        None if values["repeat_last"] is None else RepeatLast(draft_len or values["repeat_last"])
    ),
)
TABLE = (*METHODS, ROW)
NOTHING = {option.name: None for option in method_options(TABLE)}


def test_one_row_adds_options_a_choice_and_a_fix():
    assert method_options(TABLE)[-1].flags == ("--repeat-last",)
    assert choose_method(NOTHING, None, TABLE) == PlainDecoding()
    assert choose_method({**NOTHING, "repeat_last": 3}, None, TABLE) == RepeatLast(3)
    assert how_to_draft(TABLE).endswith("or --repeat-last")
    both = {**NOTHING, "repeat_last": 3, "ngram_config": "[4,2,[0]]"}
    with pytest.raises(BadConfig, match="--ngram-config and --repeat-last are both given"):
        choose_method(both, None, TABLE)


def test_a_method_runs_through_the_whole_runtime_and_changes_no_token(demo: DemoPair):
    requests = [Request(tuple(range(10, 10 + n)), max_tokens=40) for n in (5, 9)]
    folder = demo.engine("target-bfloat16")
    with OpenEngines(check_engines(EngineOptions(folder))).executor() as executor:
        wanted = run_all(executor, requests)
    method = choose_method({**NOTHING, "repeat_last": 3}, None, TABLE)
    opened = OpenEngines(check_engines(EngineOptions(folder, method)))
    with opened.executor() as executor:
        assert run_all(executor, requests) == wanted
        stats = executor.get_speculation_stats()
    assert stats.draft_tokens > 0


@pytest.mark.parametrize("name", ["target-bfloat16", "target-fp8"])
@pytest.mark.parametrize("window", [None, 40])
def test_trees_change_no_token(demo: DemoPair, prompts: PromptMaker, name, window):
    """Greedy and seeded requests with penalties, 18 in flight on 16 places, chunks, reuse."""
    configs = [
        SamplingConfig(),
        SamplingConfig(temperature=0.8, top_k=0, seed=5),
        SamplingConfig(repetition_penalty=1.2, frequency_penalty=0.1),
    ]
    requests = [Request(prompt, 24, configs[index % 3]) for index, prompt in enumerate(prompts(18))]
    options = {} if window is None else {"windows": WindowOptions((window,), 4)}
    with demo.executor(name, enable_block_reuse=False, **options) as executor:
        wanted = [run_all(executor, [request])[0] for request in requests]
    method = RandomTrees(4, wanted)
    opened = OpenEngines(check_engines(EngineOptions(demo.engine(name), method, **options)))
    with opened.executor() as executor:
        assert run_all(executor, requests) == wanted
        stats = executor.get_speculation_stats()
    assert stats.accepted_tokens > 90
