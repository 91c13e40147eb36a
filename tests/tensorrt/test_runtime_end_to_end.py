"""The demo pair as TensorRT engines through the whole runtime, on a machine made of the CPU.

Its text is the cpu backend's, with and without drafts, from pages and from slots.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.cuda import FakeGraph
from support.e2e import Outputs, run_all
from support.tensorrt.evaluated import plan_engine
from support.tensorrt.fake_engines import write_fake_engine
from support.tensorrt.fake_machine import pretend
from support.tensorrt.fake_tensorrt import FakeModule

from llmctl.builder.build import run_build
from llmctl.cli.main import execute
from llmctl.errors import DeviceFailure
from llmctl.runtime.drafting.draft_engine.method import DraftEngine
from llmctl.runtime.drafting.method import DraftMethod
from llmctl.runtime.drafting.ngram.method import NgramLookup
from llmctl.runtime.drafting.plain.method import PlainDecoding
from llmctl.runtime.open import EngineOptions, OpenEngines, check_engines
from llmctl.runtime.request import Request, SamplingConfig

DRAFT_LEN = 4
LIMITS = {"max_batch_size": 4, "max_seq_len": 128, "max_num_tokens": 128, "tokens_per_block": 32}
TARGET = {**LIMITS, "max_draft_len": DRAFT_LEN}
DRAFT = {**LIMITS, "max_draft_len": 0}
NUM_LAYERS = 8  # of the demo target


@pytest.fixture(scope="module")
def module() -> FakeModule:
    return FakeModule(pytest.importorskip("tensorrt_rtx", reason="the networks are TensorRT's"))


@pytest.fixture(scope="module")
def engines(
    tmp_path_factory: pytest.TempPathFactory, repository: Path, module: FakeModule
) -> dict[str, Path]:
    """Engine directories by what they are; of the reference under "cpu"."""
    folder, examples = tmp_path_factory.mktemp("engines"), repository / "examples"
    found = {}
    for cache in ("paged", "continuous"):
        for role, limits in (("target", TARGET), ("draft", DRAFT)):
            name = f"{role} {cache}"
            checkpoint = examples / f"demo-{role}"
            options = {**limits, "kv_cache_type": cache}
            found[name] = write_fake_engine(checkpoint, folder / name, module, **options)
    found["cpu"] = folder / "cpu"
    run_build(plan_engine(examples / "demo-target", "cpu", **TARGET), found["cpu"])
    return found


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch, module: FakeModule) -> Iterator[list[FakeGraph]]:
    """Graphs that are captured on the machine, which is there during a test."""
    yield pretend(monkeypatch, module)
    module.runs.clear()
    module.faults.clear()


@pytest.fixture(scope="module")
def requests(repository: Path) -> list[Request]:
    """Prompts of 1 to 40 tokens, greedy and sampled."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(repository / "examples/demo-target/tokenizer.json"))
    text = (repository / "examples/heldout.txt").read_text()
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    lengths = (5, 33, 40, 12, 1, 20)
    kinds = (SamplingConfig(), SamplingConfig(temperature=0.8, top_k=20, seed=3))
    return [
        Request(tuple(ids[i * 50 : i * 50 + length]), 8 + i, kinds[i % 2])
        for i, length in enumerate(lengths)
    ]


@pytest.fixture(scope="module")
def wanted(engines: dict[str, Path], requests: list[Request]) -> Outputs:
    with OpenEngines(check_engines(EngineOptions(engines["cpu"]))).executor() as executor:
        return run_all(executor, requests)


def method_of(kind: str | None, cache: str, engines: dict[str, Path]) -> DraftMethod:
    if kind is None:
        return PlainDecoding()
    if kind == "ngram":
        return NgramLookup(DRAFT_LEN, 3)
    return DraftEngine(engines[f"draft {cache}"], DRAFT_LEN)


@pytest.mark.parametrize("cache", ["paged", "continuous"])
@pytest.mark.parametrize("kind", [None, "draft", "ngram"])
def test_text_is_that_of_the_cpu_backend(
    kind, cache, engines, requests, wanted, graphs, module
) -> None:
    options = EngineOptions(engines[f"target {cache}"], method_of(kind, cache, engines))
    with OpenEngines(check_engines(options)).executor() as executor:
        assert run_all(executor, requests) == wanted
    pieces = [run.piece for run in module.runs]
    paged = {"first", "middle", "last"}
    assert set(pieces) == ({"whole"} if cache == "continuous" else paged)
    if kind != "ngram":
        assert any(graph.num_replays for graph in graphs), "generation is replayed"


def test_layers_run_in_order_with_their_own_weights(engines, requests, graphs, module) -> None:
    options = EngineOptions(engines["target paged"])
    with OpenEngines(check_engines(options)).executor() as executor:
        run_all(executor, requests[:1])
    first = module.runs[: NUM_LAYERS + 1]
    assert [run.piece for run in first] == ["first", *["middle"] * (NUM_LAYERS - 1), "last"]
    weights = [run.addresses["layer0.mlp.down_proj.weight"] for run in first[1:]]
    assert weights == sorted(set(weights)), "the container holds layers in order"
    again = module.runs[NUM_LAYERS + 1 : 2 * (NUM_LAYERS + 1)]
    assert [r.addresses for r in again] == [r.addresses for r in first], "bound once and for all"
    assert {run.stream for run in module.runs} == {0}, "everything is on one stream"


def test_steps_are_enqueued_until_kernels_can_be_captured(
    engines, requests, wanted, graphs, module, monkeypatch
) -> None:
    monkeypatch.setattr(module, "is_capturable", False)
    options = EngineOptions(engines["target paged"])
    with OpenEngines(check_engines(options)).executor() as executor:
        assert run_all(executor, requests) == wanted
    assert not graphs


def test_a_failing_plan_ends_requests_with_its_error(engines, requests, graphs, module) -> None:
    options = EngineOptions(engines["target paged"])
    with OpenEngines(check_engines(options)).executor() as executor:
        run_all(executor, requests[:1])
        module.faults.add("execute")
        (request_id,) = executor.enqueue_requests(requests[1:2])
        (response,) = executor.await_responses(request_id)
        assert isinstance(response.error, DeviceFailure)
        assert "TensorRT refuses to run: no execute today" in str(response.error)


def run_text(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    code = execute(["run", *map(str, arguments)])
    out, err = capsys.readouterr()
    assert code == 0, err
    return out


@pytest.mark.parametrize("cache", ["paged", "continuous"])
def test_the_run_command_prints_the_cpu_backends_text(cache, engines, graphs, capsys) -> None:
    prompt = ["--input-text", "The river", "--max-output-len", 10]
    plain = run_text(capsys, "--engine-dir", engines["cpu"], *prompt)
    target, draft = engines[f"target {cache}"], engines[f"draft {cache}"]
    pair = ["--engine-dir", target, "--draft-engine", draft, "--draft-len", DRAFT_LEN]
    assert run_text(capsys, *pair, "--verify-exact", *prompt) == plain
