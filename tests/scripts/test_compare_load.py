"""The script that loads llmctl and vLLM alike; vLLM is played by a fake."""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError
from types import ModuleType, SimpleNamespace

import pytest

from llmctl.cli.bench.records import Arrival, Recording, RequestRecord
from llmctl.cli.main import execute
from scripts.compare import load as compare_load
from scripts.compare import load_systems, loads
from scripts.models.make_planted_checkpoints import Recipe, write_checkpoint

LOADS = "2x20x6x5,1x8x3x2"
ORIGIN = {"command": "python x", "versions": {"device": "GPU"}, "date": "2026-01-01", "commit": "c"}


class FakeEngine:
    """Answers with the numbers from the prompt's last token on, two tokens at first."""

    made: list[FakeEngine] = []

    def __init__(self, arguments, usage_context) -> None:
        self.arguments, self.usage_context = arguments, usage_context
        self.prompts: list[list[int]] = []
        self.running = self.most_running = 0
        self.is_shut = False
        self.missing_tokens = 0
        scheduler = SimpleNamespace(max_num_batched_tokens=8192)
        self.vllm_config = SimpleNamespace(scheduler_config=scheduler)
        self.made.append(self)

    @classmethod
    def from_engine_args(cls, arguments, usage_context):
        return cls(arguments.__dict__, usage_context)

    async def generate(self, prompt, params, request_id):
        assert params.temperature == 0 and params.ignore_eos and not params.detokenize
        assert params.output_kind == "delta" and isinstance(request_id, str)
        self.prompts.append(prompt["prompt_token_ids"])
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        sizes = [2, *[1] * (params.max_tokens - 2 - self.missing_tokens)]
        for size in sizes:
            await asyncio.sleep(0)
            yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=[7] * size)])
        self.running -= 1

    def shutdown(self) -> None:
        self.is_shut = True


@pytest.fixture
def vllm(monkeypatch):
    """A vLLM that is installed; FakeEngine.made has its engines."""
    modules = {
        "vllm": {"AsyncEngineArgs": SimpleNamespace, "SamplingParams": SimpleNamespace},
        "vllm.sampling_params": {"RequestOutputKind": SimpleNamespace(DELTA="delta")},
        "vllm.usage": {},
        "vllm.usage.usage_lib": {"UsageContext": SimpleNamespace(OPENAI_API_SERVER="server")},
        "vllm.v1": {},
        "vllm.v1.engine": {},
        "vllm.v1.engine.async_llm": {"AsyncLLM": FakeEngine},
    }
    for name, contents in modules.items():
        module = ModuleType(name)
        module.__dict__.update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(FakeEngine, "made", [])
    return FakeEngine.made


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """A folder with a tiny checkpoint whose text is known, and an engine of it."""
    folder = tmp_path_factory.mktemp("load")
    recipe = Recipe("tiny", quantization=None)
    write_checkpoint(folder / "hf", recipe, tokenizer_dir=None)
    build = ["build", "--backend", "cpu", "--checkpoint-dir", str(folder / "hf")]
    limits = ["--max-seq-len", "64", "--max-batch-size", "4", "--log-level", "error"]
    assert execute([*build, "--output-dir", str(folder / "engine"), *limits]) == 0
    return folder


@pytest.fixture
def measure(monkeypatch, tmp_path):
    """The script's rows after a call for one system."""
    monkeypatch.setattr(compare_load, "version", lambda name: f"{name}-version")
    monkeypatch.setattr(
        compare_load, "provenance", lambda: ORIGIN | {"versions": dict(ORIGIN["versions"])}
    )

    def run(*argv):
        words = [str(word) for word in argv]
        monkeypatch.setattr(
            sys, "argv", ["compare_load.py", *words, "--output", str(tmp_path / "out")]
        )
        compare_load.main()
        return rows_and_table(tmp_path / "out", "vllm_load_gpu")

    return run


def rows_and_table(folder, stem):
    lines = (folder / f"{stem}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines], (folder / f"{stem}.md").read_text()


def test_both_systems_are_sent_the_same_requests_and_stand_in_one_table(
    vllm, engine, measure, monkeypatch
):
    ours: list[list[int]] = []
    enqueue = load_systems.Driver.run

    def run(self, requests, pace, recording):
        ours.extend(list(request.input_token_ids) for request in requests)
        enqueue(self, requests, pace, recording)

    monkeypatch.setattr(load_systems.Driver, "run", run)
    measure("vllm", "some/checkpoint", "--load-format", "dummy", "--loads", LOADS)
    rows, text = measure("llmctl", engine / "engine", "--loads", LOADS)
    (peer,) = vllm
    assert peer.prompts == ours and len(ours) == 2 + 5 + 1 + 2
    assert peer.most_running == 2 and peer.is_shut and peer.usage_context == "server"
    assert peer.arguments["max_model_len"] == 26 and peer.arguments["load_format"] == "dummy"
    assert not peer.arguments["enable_prefix_caching"] and "enforce_eager" not in peer.arguments
    assert [(row["system"], row["load"]) for row in rows] == [
        (system, load)
        for system in ("vllm", "llmctl")
        for load in ("2 in flight, 20 in / 6 out", "1 in flight, 8 in / 3 out")
    ]
    theirs, ours_row = rows[0], rows[2]
    assert theirs["settings"] == "8,192 tokens a step" and "tokens a step" in ours_row["settings"]
    assert set(ours_row["versions"]) == {"device", "llmctl"}
    lines = [line for line in text.splitlines() if "in flight" in line]
    assert ["vllm" in line for line in lines] == [True, False, True, False]
    ratio = ours_row["tok_s_per_gpu"] / theirs["tok_s_per_gpu"]
    assert f"| {ratio:.2f} |" in lines[1] and f"{ours_row['itl_ms']['p99']:.4g}" in lines[1]


def test_what_is_measured_again_takes_the_place_of_the_older_row(vllm, measure):
    measure("vllm", "x", "--loads", "2x20x6x5")
    rows, _ = measure("vllm", "x", "--loads", "2x20x6x4")
    assert len(rows) == 1 and rows[0]["itl_ms"]["p50"] > 0


def test_cards_have_tables_of_their_own(vllm, measure, monkeypatch, tmp_path):
    stems = {"NVIDIA H200": "vllm_load", "NVIDIA H100 80GB HBM3": "vllm_load_h100"}
    for device in stems:
        monkeypatch.setitem(ORIGIN["versions"], "device", device)
        with suppress(FileNotFoundError):  # of the card that `measure` reads
            measure("vllm", "x", "--loads", "2x20x6x5")
    for device, stem in stems.items():
        rows, text = rows_and_table(tmp_path / "out", stem)
        assert [row["versions"]["device"] for row in rows] == [device]
        assert text.startswith(f"# llmctl and vLLM under load, one {device}\n")


def test_an_output_of_another_length_is_not_measured(vllm, measure, monkeypatch):
    make = FakeEngine.__init__

    def short(self, *arguments):
        make(self, *arguments)
        self.missing_tokens = 1

    monkeypatch.setattr(FakeEngine, "__init__", short)
    with pytest.raises(SystemExit, match="request 0: 5 of 6 tokens"):
        measure("vllm", "x", "--loads", "2x20x6x5")
    assert vllm[0].is_shut


def test_a_missing_vllm_and_options_it_has_not_are_said(monkeypatch, measure):
    with pytest.raises(SystemExit, match="are llmctl's"):
        measure("vllm", "x", "--whole-prompts")

    def version(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(compare_load, "version", version)
    with pytest.raises(SystemExit, match="pip install vllm"):
        measure("vllm", "x")


def test_a_planted_text_is_checked_token_by_token(engine, measure, capsys):
    loads = ("--loads", "2x20x6x5")
    rows, text = measure("llmctl", engine / "engine", *loads)
    assert rows[0]["wrong_texts"] is None and "| not known |" in text
    rows, text = measure("llmctl", engine / "engine", "--checkpoint", engine / "hf", *loads)
    assert rows[0]["wrong_texts"] == 0 and "| 0 |" in text
    other = engine / "other"
    write_checkpoint(other, Recipe("tiny", quantization=None, seed=1), config_only=True)
    with pytest.raises(SystemExit, match="5 texts are wrong"):
        measure("llmctl", engine / "engine", "--checkpoint", other, *loads)
    assert "request 4: token 0 is" in capsys.readouterr().out


def test_a_text_of_vllm_is_checked_where_it_reads_the_checkpoint(vllm, engine, measure):
    with pytest.raises(SystemExit, match="5 texts are wrong"):
        measure("vllm", engine / "hf", "--loads", "2x20x6x5")
    rows, _ = measure("vllm", engine / "hf", "--load-format", "dummy", "--loads", "2x20x6x5")
    assert rows[0]["wrong_texts"] is None


def record(submit_s, times_s):
    arrivals = [Arrival(at_s, 1) for at_s in times_s]
    return RequestRecord(0, 0, 1, len(times_s), submit_s, submit_s, arrivals, [1] * len(times_s))


def test_lengths_of_a_range_are_drawn_alike_for_every_system():
    load = loads.parse_load("2x1000-2000x30-40x50")
    assert load == loads.parse_load("2x1000-2000x30-40x50")
    assert load.name == "2 in flight, 1,000 to 2,000 in / 30 to 40 out"
    inputs, outputs = zip(*load.shapes, strict=True)
    assert 1000 <= min(inputs) < 1100 and 1900 < max(inputs) <= 2000
    assert set(outputs) == set(range(30, 41)) and len(load.shapes) == 50
    assert load.warmup == ((inputs[0], 16), (inputs[1], 16))
    assert loads.parse_load("2x8x3x5").shapes == ((8, 3),) * 5


@pytest.mark.parametrize("text", ["2x9-5x3x2", "2x1-2-3x3x2", "2x8x3", "axbxcxd"])
def test_a_load_that_is_none_is_refused(text):
    with pytest.raises(ValueError):
        loads.parse_load(text)


def test_gaps_count_from_the_first_long_prompt_to_the_last_ones_first_token():
    short = [record(0.0, [0.1, 0.2, 0.5, 0.9, 1.2, 1.3])]
    found = compare_load.watched(short, [record(0.3, [0.6, 0.7]), record(0.4, [1.0])])
    assert sorted(found["itl_ms"]) == sorted(compare_load.metrics.percentiles([1.0]))
    assert found["itl_ms"]["minimum"] == pytest.approx(300)
    assert found["itl_ms"]["maximum"] == pytest.approx(400)
    assert found["tok_s_per_gpu"] == pytest.approx(3 / 0.7)
    assert found["ttft_ms"]["maximum"] == pytest.approx(600)
    with pytest.raises(SystemExit, match="ended 0.10 s before"):
        compare_load.watched(short, [record(1.25, [1.4])])


def test_long_prompts_come_at_their_times(vllm, measure):
    load = loads.arrivals(num_short=3, short=(4, 5), num_long=2, size=30)
    assert [len(r.input_token_ids) for r in load.requests(load.shapes, 0)] == [4, 4, 4, 30, 30]
    assert load.pace.due_times_s(5) == [0, 0, 0, 1.5, 1.75] and load.longest == 38
    runs = Recording()
    quick = loads.Schedule(times_s=(0.0, 0.0, 0.0, 0.02, 0.04))
    with load_systems.vllm_server({"model": "x"}) as server:
        server.run(load.requests(load.shapes, 0), quick, runs)
    times = [item.submit_s for item in runs.requests]
    assert max(times[:3]) < 0.02 <= times[3] < times[4] and times[4] >= 0.04
