"""When one launch of decoder layers is taken, and its binary; bits: tests/gpu."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from support.decoder_layers import ONE, chain_of, env_of, measured
from support.decoder_layers_compiled import HELD_HERE, HERE, require_held, require_no_spills
from support.driver import RecordingDriver
from support.kernel import disassemble

from llmctl.builder.engine_kernels import (
    fused_calls,
    kernel_specs,
    meta_cache,
    meta_calls,
)
from llmctl.errors import CorruptEngine
from llmctl.plugins.backends.cuda.compiler import compile_kernel
from llmctl.plugins.backends.cuda.program import CudaProgram
from llmctl.plugins.core.fused_calls import FusedCalls
from llmctl.plugins.fused.decoder_layers.chain import find_layers
from llmctl.plugins.fused.decoder_layers.kernel import (
    chain_launch,
    chain_launches,
    chain_spec,
    find_chain,
    find_chains,
    open_chains,
    serves,
)
from llmctl.plugins.fused.decoder_layers.tactics import EVERYWHERE
from scripts.bench.plan_support import planned
from scripts.models.planted_shapes import SHAPES, Shape


def test_steps_take_the_way_that_is_faster_at_their_context(monkeypatch):
    plan, limits = planned("1b")
    faster, slower = {"launches": 2.0, "one_launch": 1.0}, {"launches": 1.0, "one_launch": 2.0}
    times = {"4096": faster, "1024": faster, "2048": slower}
    key = "h2048.i8192.a32.8x64"
    measured(monkeypatch, {key: times}, {key: [3, 4, 7, 8, 1]})
    calls = [call for call, _ in meta_calls(plan)]
    _, built = find_chains(calls, limits)
    name = chain_spec(built, limits).name
    assert name.endswith(".p3_4_7_8_1.1024+2048-4096+")
    measured(monkeypatch, {}, {})  # an engine has its own
    last = find_layers(calls, limits)[-1]
    records = [FusedCalls(built.start, stop, name) for stop in (last.stop, built.stop)]
    whole, found = open_chains(calls, limits, records)
    assert found == built and whole.is_whole and chain_spec(whole, limits).name == name
    env = env_of("1b")
    served = {
        context: serves(found, env, replace(ONE, max_kv_len=context))
        for context in (1, 1024, 1025, 1500, 2048, 2049, 4096, 4097)
    }
    assert served == {
        1: True,
        1024: True,
        1025: False,
        1500: False,
        2048: False,
        2049: True,
        4096: True,
        4097: False,
    }


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({}, True),
        ({"num_tokens": 2, "max_query_len": 2}, False),
        ({"num_requests": 2, "num_tokens": 2, "num_rows": 2}, False),
        ({"max_kv_len": 4096}, True),
        ({"max_kv_len": 8192}, False),
        ({"num_tokens": 0, "num_rows": 0}, False),
    ],
)
def test_only_small_steps_of_one_request_are_served(change, wanted):
    found = chain_of("1b")
    assert found is not None
    assert serves(found, env_of("1b"), replace(ONE, **change)) == wanted


def test_shapes_that_gain_nothing_or_were_not_measured_keep_their_launches(monkeypatch):
    plan, limits = planned("1b")
    calls = [call for call, _ in meta_calls(plan)]
    faster, slower = {"launches": 2.0, "one_launch": 1.0}, {"launches": 1.0, "one_launch": 2.0}
    for times, wanted in (
        ({"1024": faster}, True),
        ({"1024": slower}, False),
        ({"1024": faster, "4096": slower}, True),
        ({}, False),
    ):
        measured(monkeypatch, {"h2048.i8192.a32.8x64": times}, {})
        assert bool(find_chains(calls, limits)) == wanted
        names = [spec.name for spec in kernel_specs(plan, limits)]
        assert any(name.startswith("decoder_layers.") for name in names) == wanted


@pytest.mark.parametrize("name", ["1b", "tiny"])
def test_models_of_another_form_keep_their_launches(name):
    if name == "1b":
        assert chain_of("1b", qformat=None) is None  # weights of 16 bits
    else:
        assert chain_of("tiny") is None  # K is no multiple of 512


def test_a_model_whose_heads_share_more_rows_takes_fewer_tokens():
    assert chain_of("70b", most_tokens=2) is None
    assert chain_of("8b", most_tokens=2) is not None


def test_the_kernel_multiplies_with_wgmma_and_spills_nothing():
    plan, limits = planned("1b")
    found = chain_of("1b")
    assert found is not None and plan
    kernel = compile_kernel(chain_spec(found, limits))
    assert kernel.local_bytes == 0 and kernel.threads == 384
    code = disassemble(kernel)
    products = len(re.findall(r"QGMMA\.64x8x32\.F32\.E4M3\.E4M3", code))
    assert products == 4 * 16, "four products, a chain of 16 each"
    waits = len(re.findall(r"WARPGROUP\.DEPBAR", code))
    assert waits == 4, "the compiler put waits into the chains"


@pytest.mark.parametrize(("kv_algo", "held", "tokens"), HELD_HERE)
def test_units_are_held_in_registers(kv_algo, held, tokens):
    require_held(kv_algo, held, tokens)


@pytest.mark.parametrize(("name", "kv_algo"), [("1b", "FP8"), ("8b", None)])
def test_weights_of_four_bits_are_multiplied_from_registers(name, kv_algo):
    """In binaries that `HERE` has."""
    sizes = {"kv_algo": kv_algo, "qformat": "w4a8_mxfp4_fp8"}
    _, limits = planned(name, **sizes)
    found = chain_of(name, most_tokens=2, **sizes)
    assert found is not None
    kernel = compile_kernel(chain_spec(found, limits))
    assert kernel.local_bytes == 0 and kernel.shared_bytes <= 227 << 10
    code = disassemble(kernel)
    products = re.findall(r"QGMMA\.64x8x32\.F32\.E4M3\.E4M3 R\d+, R\d+, gdesc", code)
    assert len(products) == 4 * 16, "four products, a chain of 16 for each unit"
    waits = len(re.findall(r"WARPGROUP\.DEPBAR", code))
    assert waits == 4 * 2, "the compiler put waits into the chains"


@pytest.mark.parametrize("shape", HERE, ids=lambda shape: "-".join(map(str, shape)))
def test_the_kernel_spills_nothing_in_other_shapes_and_caches(shape):
    require_no_spills(*shape)


def test_a_model_of_wide_groups_has_no_launch_for_two_tokens():
    assert chain_of("70b", most_tokens=2, kv_algo=None) is None


def test_a_program_puts_the_launch_in_the_place_of_the_calls(monkeypatch):
    shape = Shape(512, 2048, 3, 8, 2, 64, 8.0, vocab=64, bos=0, eos=(1,))
    monkeypatch.setitem(SHAPES, "narrow", shape)
    plan, limits = planned("narrow")
    calls = [call for call, _ in meta_calls(plan)]
    chains = [
        find_chain(find_layers(calls, limits), limits, tactic=EVERYWHERE, whole=whole)
        for whole in (True, False)
    ]
    assert chains[0] is not None
    spec = chain_spec(chains[0], limits)
    fused = [FusedCalls(c.start, c.stop, spec.name) for c in chains if c is not None]
    for records, wanted in ((fused, True), ([], False)):
        driver = RecordingDriver()
        program = CudaProgram(calls, [spec], limits, "meta", driver=driver, fused=records)
        program.bind_kv_cache(meta_cache(plan, limits))
        for number, (found, num_rows) in enumerate(zip(chains, (1, 0), strict=True)):
            assert found is not None
            outside = [*range(found.start), -1 - number, *range(found.stop, len(calls))]
            parts = program.parts(replace(ONE, num_rows=num_rows))
            assert parts == (outside if wanted else list(range(len(calls))))
        assert program.parts(replace(ONE, num_requests=2, num_tokens=2)) == list(range(len(calls)))


def test_steps_of_two_tokens_have_a_launch_of_their_own_where_that_is_faster(monkeypatch):
    plan, limits = planned("1b")
    calls = [call for call, _ in meta_calls(plan)]
    faster = {"4096": {"launches": 2.0, "one_launch": 1.0}}
    slower = {"4096": {"launches": 1.0, "one_launch": 2.0}}
    one, two = ONE, replace(ONE, num_tokens=2, max_query_len=2)
    both = replace(two, num_rows=2)
    for of_one, of_two, wanted in (
        # with the last layer, without it, for one token and for two
        (faster, faster, {"one": -1, "two": -3, "both": -4}),
        (faster, slower, {"one": -1}),
        (slower, faster, {"two": -1, "both": -2}),
    ):
        table = {"h2048.i8192.a32.8x64": of_one, "h2048.i8192.a32.8x64.n2": of_two}
        measured(monkeypatch, table, {})
        chains = find_chains(calls, limits)
        specs = list({spec.name: spec for spec in (chain_spec(c, limits) for c in chains)}.values())
        assert [spec.name for spec in kernel_specs(plan, limits) if spec in specs] == [
            spec.name for spec in specs
        ]
        sizes: dict[str, int] = {}
        env = env_of("1b", sizes)
        for chain in chains:
            chain_launch(chain, env, replace(ONE, num_tokens=chain.tokens))
        assert len(sizes) == 2 * len(specs), "each has an exchange and counters of its own"
        fused = fused_calls(plan, limits)
        assert [each.kernel for each in fused] == [chain_spec(c, limits).name for c in chains]
        driver = RecordingDriver()
        program = CudaProgram(calls, specs, limits, "meta", driver=driver, fused=fused)
        program.bind_kv_cache(meta_cache(plan, limits))
        found = {
            name: part
            for name, shape in (("one", one), ("two", two), ("both", both))
            for part in program.parts(shape)
            if part < 0
        }
        assert found == wanted


def test_a_step_that_may_have_one_token_and_padding_launches_both(monkeypatch):
    """Only the device knows which of them it has. With logits of both tokens there are two."""
    plan, limits = planned("1b")
    calls = [call for call, _ in meta_calls(plan)]
    faster = {"4096": {"launches": 2.0, "one_launch": 1.0}}
    short = {"1024": faster["4096"], "4096": {"launches": 1.0, "one_launch": 2.0}}
    two = replace(ONE, num_tokens=2, max_query_len=2)
    both, long = replace(two, num_rows=2), replace(two, max_kv_len=2048)
    for of_one, wanted in (
        (faster, {two: [1, 2], long: [1, 2]}),
        (short, {two: [1, 2], long: [2]}),
    ):
        table = {"h2048.i8192.a32.8x64": of_one, "h2048.i8192.a32.8x64.n2": faster}
        measured(monkeypatch, table, {})
        chains, env = find_chains(calls, limits), env_of("1b")
        for shape, tokens in {**wanted, both: [2], ONE: [1]}.items():
            (chain, *_) = (each for each in chains if serves(each, env, shape))
            launches = chain_launches(chain, chains, env, shape)
            given = [(launch.arguments[2], launch.arguments[-1]) for launch in launches]
            assert given == [(count, int(len(tokens) > 1)) for count in tokens]
            for launch, count in zip(launches, tokens, strict=True):
                assert f".n{count}." in launch.spec.name
                assert launch.arguments[3:8] == launches[-1].arguments[3:8], "one place for results"


def test_a_record_of_calls_that_are_no_layers_is_refused(monkeypatch):
    """An engine may come from a stranger: what is not whole layers of that kernel never runs."""
    measured(
        monkeypatch, {"h2048.i8192.a32.8x64": {"4096": {"launches": 2.0, "one_launch": 1.0}}}, {}
    )
    plan, limits = planned("1b")
    calls = [call for call, _ in meta_calls(plan)]
    whole, part = fused_calls(plan, limits)
    assert [c.start for c in open_chains(calls, limits, (whole, part))] == [whole.start, part.start]
    other = whole.kernel.replace(".n1.", ".n3.")
    for start, stop, kernel in (
        (whole.start + 1, whole.stop, whole.kernel),
        (whole.start, whole.stop - 1, whole.kernel),
        (-5, whole.stop, whole.kernel),
        (whole.start, len(calls) + 9, whole.kernel),
        (whole.start, whole.start, whole.kernel),
        (whole.start, whole.stop, other),
        (whole.start, whole.stop, "embedding.bf16"),
    ):
        with pytest.raises(CorruptEngine, match="are not layers"):
            open_chains(calls, limits, [FusedCalls(start, stop, kernel)])
