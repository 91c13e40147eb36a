"""The scripts that run one load through llmctl and a peer; vLLM is played by a fake."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from types import ModuleType, SimpleNamespace

import pytest

from scripts.compare import peers

SIZE = {"--num-requests": 2, "--rounds": 1, "--draft-len": 3}


@pytest.fixture
def dataset(tmp_path, repository, forked_program, monkeypatch):
    """Two requests of 20 prompt tokens and 12 output tokens. Engines are built by forks."""
    monkeypatch.setattr(peers, "PROGRAM", forked_program.command)
    path = tmp_path / "data.jsonl"
    command = [*forked_program.command, "dataset", "--tokenizer",
               "examples/demo-target", "--output", path, "text", "--input-file",
               "examples/heldout.txt", "--num-requests", 2, "--input-len-dist", "20,0",
               "--output-len-dist", "12,0"]  # fmt: skip
    subprocess.run([str(word) for word in command], check=True, cwd=repository)
    return path


@pytest.fixture
def rows(repository, tmp_path, dataset, monkeypatch, capsys):
    """Rows by name, and what was printed, of a script on the demo pair. It runs in this process,
    which has imported what it needs."""

    def run(script, *argv):
        output = tmp_path / "rows.jsonl"
        size = [word for item in SIZE.items() for word in item]
        command = [script, "examples/demo-target", "--draft", "examples/demo-draft",
                   "--dataset", dataset, "--output", output, *size, *argv]  # fmt: skip
        monkeypatch.chdir(repository)
        monkeypatch.setattr(sys, "argv", [str(word) for word in command])
        runpy.run_module(f"scripts.compare.{script}", run_name="__main__")
        found = [json.loads(line) for line in output.read_text().splitlines()]
        return {item["name"]: item for item in found}, capsys.readouterr().out

    return run


def test_transformers_and_llmctl_write_the_same_text_and_ratios_are_of_their_speeds(rows):
    found, printed = rows("hf", "--dtype", "float32")
    systems = ("transformers", "llmctl", "transformers+assistant", "llmctl+draft")
    assert all(found[name]["unit"] == "tok/s" and found[name]["value"] > 0 for name in systems)
    ratio = found["llmctl / transformers"]
    assert ratio["value"] == pytest.approx(
        found["llmctl"]["value"] / found["transformers"]["value"]
    )
    for name in ("llmctl / transformers", "llmctl+draft / transformers+assistant"):
        assert found[name]["note"] == "100% of tokens alike", found[name]
    assert "llmctl+draft / llmctl" in printed
    assert found["llmctl"]["versions"].keys() == {"llmctl", "torch", "transformers"}


def test_a_missing_vllm_is_said(monkeypatch):
    from scripts.compare import vllm as compare_vllm

    def version(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(compare_vllm, "version", version)
    monkeypatch.setattr(sys, "argv", ["vllm", "x", "--dataset", "data.jsonl"])
    with pytest.raises(SystemExit, match="llmctl is not installed here"):
        compare_vllm.main()


class FakeLlm:
    """Counts up from the prompt's last token."""

    made: list[dict] = []

    def __init__(self, **options) -> None:
        self.made.append(options)
        core = SimpleNamespace(shutdown=lambda: options.update(is_shut=True))
        self.llm_engine = SimpleNamespace(engine_core=core)

    def generate(self, prompts, params, *, use_tqdm):
        assert not use_tqdm
        return [
            SimpleNamespace(outputs=[SimpleNamespace(token_ids=tuple(self._count(one, param)))])
            for one, param in zip(prompts, params, strict=True)
        ]

    def _count(self, prompt, param):
        last = prompt["prompt_token_ids"][-1]
        assert param.temperature == 0 and param.ignore_eos and not param.detokenize
        return range(last, last + param.max_tokens)


@pytest.fixture
def vllm(monkeypatch):
    """A vLLM that is installed."""
    module = ModuleType("vllm")
    vars(module).update(LLM=FakeLlm, SamplingParams=SimpleNamespace)
    monkeypatch.setitem(sys.modules, "vllm", module)
    monkeypatch.setattr(FakeLlm, "made", [])
    return module


def test_vllm_is_given_the_same_load_draft_and_acceptance_draws(
    vllm, monkeypatch, repository, dataset, tmp_path, capsys
):
    from scripts.compare import vllm as compare_vllm

    output = tmp_path / "rows.jsonl"
    monkeypatch.chdir(repository)
    monkeypatch.setattr(compare_vllm, "version", lambda name: "0")
    origin = {"command": "python x", "versions": {"device": "GPU"}, "commit": "c"}
    monkeypatch.setattr(compare_vllm, "provenance", lambda: origin)
    argv = ["examples/demo-target", "--draft", "examples/demo-draft", "--dataset", str(dataset),
            "--draft-len", "3", "--rounds", "1", "--max-batch-size", "4",
            "--synthetic-acceptance", "2.5", "--output", str(output),
            "--engines", str(tmp_path / "engines")]  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["vllm", *argv])
    compare_vllm.main()
    plain, drafted = FakeLlm.made
    assert plain["max_model_len"] == 20 + 12 + 3 + 1 and "speculative_config" not in plain
    assert drafted["speculative_config"] == {
        "method": "draft_model",
        "model": "examples/demo-draft",
        "num_speculative_tokens": 3,
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_length": 2.5,
    }
    found = [json.loads(line) for line in output.read_text().splitlines()]
    assert found[0]["versions"] == {"device": "GPU", "llmctl": "0", "vllm": "0", "torch": "0"}
    assert found[0]["commit"] == "c" and found[0]["synthetic_acceptance_length"] == 2.5
    names = [item["name"] for item in found]
    assert len(names) == 12 and "with draft, all at once: llmctl / vllm" in names
    assert "SYNTHETIC ACCEPTANCE" in capsys.readouterr().out
    assert plain["is_shut"] and drafted["is_shut"]
    built = (tmp_path / "engines/target").stat().st_mtime_ns
    compare_vllm.main()
    assert (tmp_path / "engines/target").stat().st_mtime_ns == built


def test_likeness_counts_tokens_before_the_first_that_differs():
    assert peers.likeness([[1, 2, 3, 4], [5, 6]], [[1, 2, 9, 4], [5, 6]]) == pytest.approx(4 / 6)


def test_an_output_of_another_length_is_not_measured():
    task = peers.Task([1, 2], 3)
    with pytest.raises(SystemExit, match="another length"):
        peers.take_turns({"short": lambda tasks: [[1, 2]]}, [task], 1)
