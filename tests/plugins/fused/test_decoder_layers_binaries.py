"""Contexts of which some have a binary of the one launch of their own."""

from __future__ import annotations

from dataclasses import replace

from support.decoder_layers import ONE, env_of, measured
from support.driver import RecordingDriver

from llmctl.builder.engine_kernels import fused_calls, kernel_specs, meta_cache, meta_calls
from llmctl.plugins.backends.cuda.program import CudaProgram
from llmctl.plugins.fused.decoder_layers.kernel import (
    chain_launches,
    chain_spec,
    exchange_bytes,
    find_chains,
    open_chains,
    serves,
)
from scripts.bench.plan_support import planned

KEY = "h2048.i8192.a32.8x64"
FASTER = {"launches": 2.0, "one_launch": 1.0}
TIMES = {"1024": FASTER, "2048": FASTER, "4096": FASTER}
UNITS = {1024: 16, 2048: 24, 4096: 32}  # attention work items of a context


def table(monkeypatch, own: dict[str, list[int]], times: dict = TIMES) -> None:
    measured(monkeypatch, {KEY: times, f"{KEY}.n2": times}, {}, own)


def test_every_context_has_the_binary_that_is_faster_there(monkeypatch):
    plan, limits = planned("1b")
    calls, env = [call for call, _ in meta_calls(plan)], env_of("1b")
    contexts = (1, 1024, 1025, 2048, 2049, 4096, 4097)
    for own, wanted in (
        ([], [32, 32, 32, 32, 32, 32, None]),
        ([2048], [32, 32, 24, 24, 32, 32, None]),
        ([1024, 2048], [16, 16, 24, 24, 32, 32, None]),
    ):
        table(monkeypatch, {KEY: own})
        records = fused_calls(plan, limits)
        names = {spec.name for spec in kernel_specs(plan, limits)}
        assert {each.kernel for each in records} <= names
        measured(monkeypatch, {}, {})  # an engine has its own
        chains = open_chains(calls, limits, records)
        assert [chain_spec(c, limits).name for c in chains] == [each.kernel for each in records]
        for context, units in zip(contexts, wanted, strict=True):
            shape = replace(ONE, max_kv_len=context)
            found = [chain for chain in chains if serves(chain, env, shape)]
            specs = [chain_spec(chain, limits) for chain in found]
            assert [spec.constants["MAX_UNITS"] for spec in specs] == [units] * len(specs)
            assert [chain.is_whole for chain in found] == [True, False] * (units is not None)


def test_names_tell_which_contexts_a_binary_is_for(monkeypatch):
    plan, limits = planned("1b")
    table(monkeypatch, {KEY: [2048]})
    found = find_chains([call for call, _ in meta_calls(plan)], limits)
    names = [chain_spec(chain, limits).name for chain in found if chain.is_whole]
    for name, units, end in zip(
        names,
        (".u32.n1.", ".u24.n1.", ".u32.n2."),
        ("1024+2048-4096+", "1024-2048+", "1024+2048+4096+"),
        strict=True,
    ):
        assert units in name and name.endswith(f".{end}")


def test_where_one_launch_is_slower_a_binary_of_its_own_is_not_taken(monkeypatch):
    plan, limits = planned("1b")
    slower = {"launches": 1.0, "one_launch": 2.0}
    table(monkeypatch, {KEY: [2048]}, {**TIMES, "2048": slower})
    found = find_chains([call for call, _ in meta_calls(plan)], limits)
    assert [c.tactic.gains for c in found if c.tokens == 1 and c.is_whole] == [
        ((1024, True), (2048, False), (4096, True))
    ]


def test_a_binary_has_memory_of_its_own_for_as_many_work_items_as_it_may_see(monkeypatch):
    """Where the parts of that memory are depends on their number."""
    plan, limits = planned("1b")
    table(monkeypatch, {KEY: [1024, 2048]})
    chains = find_chains([call for call, _ in meta_calls(plan)], limits)
    sizes: dict[str, int] = {}
    env = env_of("1b", sizes)
    for chain in chains:
        chain_launches(chain, chains, env, replace(ONE, max_kv_len=chain.tactic.reach))
    for chain in (chain for chain in chains if chain.tokens == 1):
        name = f"decoder_layers.n1.u{UNITS[chain.tactic.reach]}"
        assert sizes[f"{name}.exchange"] == exchange_bytes(chain, limits)
    assert len({sizes[f"decoder_layers.n1.u{units}.exchange"] for units in UNITS.values()}) == 3


def test_a_program_changes_the_binary_as_the_context_grows(monkeypatch):
    plan, limits = planned("1b")
    table(monkeypatch, {KEY: [2048]})
    calls = [call for call, _ in meta_calls(plan)]
    specs = {s.name: s for s in (chain_spec(c, limits) for c in find_chains(calls, limits))}
    program = CudaProgram(
        *(calls, list(specs.values()), limits, "meta"),
        driver=RecordingDriver(),
        fused=fused_calls(plan, limits),
    )
    program.bind_kv_cache(meta_cache(plan, limits))
    taken = [
        next(part for part in program.parts(replace(ONE, max_kv_len=context)) if part < 0)
        for context in (1024, 2048, 4096)
    ]
    assert taken == [-1, -2, -1]


def test_a_step_of_one_token_or_two_launches_the_binaries_of_its_context(monkeypatch):
    plan, limits = planned("1b")
    table(monkeypatch, {KEY: [2048]})
    chains, env = find_chains([call for call, _ in meta_calls(plan)], limits), env_of("1b")
    for context, units in ((1024, 32), (2048, 24), (4096, 32)):
        shape = replace(ONE, num_tokens=2, max_query_len=2, max_kv_len=context)
        (chain, *_) = (each for each in chains if serves(each, env, shape))
        launches = chain_launches(chain, chains, env, shape)
        assert [launch.spec.constants["MAX_UNITS"] for launch in launches] == [units, 32]
        assert [launch.arguments[-1] for launch in launches] == [1, 1]
