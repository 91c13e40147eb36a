"""What cannot have an effect is refused by name, and what cannot be read is no bug."""

from __future__ import annotations

import json
import shutil
import subprocess

import numpy as np
import pytest
from support.refusals import RUN, refused


@pytest.mark.parametrize(
    "text", ["input-text: 2024-99-99\n", "[" * 3000, b"\xff\xff"], ids=["month", "deep", "bytes"]
)
def test_a_config_file_that_yaml_cannot_read_is_named(llmctl, tmp_path, text):
    path = tmp_path / "options.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    done = llmctl("doctor", "--config", path)
    assert done.code == 2 and refused(done, "BadConfig", "is not YAML")


def test_an_error_that_nobody_reads_as_json_ends_like_any_result_nobody_reads(program, tmp_path):
    words = [*program, "inspect", str(tmp_path / "nothing"), "--json"]
    shell = 'trap "" PIPE; "$@" 2>"$0"; echo $? >&2'  # true has ended by then
    errors = tmp_path / "errors"
    with subprocess.Popen(
        ["bash", "-c", f"({shell}) | true", errors, *words], stderr=subprocess.PIPE, text=True
    ) as pipe:
        assert pipe.communicate(timeout=60)[1].split() == ["141"]
    assert errors.read_text() == ""
    with open("/dev/full", "w") as full:
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1 and done.stderr.startswith("error[EngineNotFound]: ")


@pytest.mark.parametrize(
    "option", ["--streaming", "--verify-exact", "--output-csv", "--output-npy", "--output-jsonl"]
)
def test_profiling_writes_and_compares_nothing_and_says_so(llmctl, engines, tmp_path, option):
    value = [tmp_path / "out"] if option.startswith("--output") else []
    text = ("--engine-dir", engines.target, "--input-text", "a b")
    done = llmctl(*RUN, *text, "--run-profiling", option, *value)
    assert done.code == 2 and refused(done, "BadConfig", "--run-profiling", option)


def test_an_engine_with_another_tokenizer_inside_is_refused(llmctl, engines, tmp_path):
    copy = tmp_path / "engine"
    shutil.copytree(engines.target, copy)
    path = copy / "tokenizer" / "tokenizer.json"
    document = json.loads(path.read_text())
    path.write_text(json.dumps(document, indent=3))  # means the same
    assert llmctl(*RUN, "--engine-dir", copy, "--input-text", "a b").code == 0
    vocab = document["model"]["vocab"]
    first, second = list(vocab)[-2:]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    path.write_text(json.dumps(document))
    done = llmctl(*RUN, "--engine-dir", copy, "--input-text", "a b")
    assert refused(done, "CorruptEngine", "tokenizer", "fix: ") and done.code != 0
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a b", "output_tokens": 2}\n')
    done = llmctl("bench", "latency", "--engine-dir", copy, "--dataset", rows)
    assert refused(done, "CorruptEngine", "tokenizer")


def test_files_that_hold_no_prompts_are_named(llmctl, engines, tmp_path):
    files = {
        "ids.csv": " ".join(["1"] * 70_000).encode(),
        "deep.jsonl": b"[" * 100_000,
        "zip.npy": b"PK\x03\x04broken",
    }
    np.savez(tmp_path / "several.npz", a=np.zeros(3, np.int32))
    files["several.npy"] = (tmp_path / "several.npz").read_bytes()
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
        done = llmctl(*RUN, "--engine-dir", engines.target, "--input-file", tmp_path / name)
        assert done.code == 2 and refused(done, "BadConfig", name), done.err


@pytest.mark.parametrize(
    "row", ['{"prompt": "x \\ud800"}', '{"prompt": "a", "stop_words": ["\\udfff"]}']
)
def test_half_a_surrogate_pair_is_no_text(llmctl, engines, tmp_path, row):
    rows = tmp_path / "rows.jsonl"
    rows.write_text(f'{{"prompt": "a b"}}\n{row}\n')
    done = llmctl(*RUN, "--engine-dir", engines.target, "--input-file", rows)
    assert done.code == 2 and refused(done, "BadConfig", "line 2", "surrogate")


def test_rows_of_a_benchmark_may_have_priorities(bench, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a b", "output_tokens": 2, "priority": 0.9}\n')
    report, _ = bench("latency", "--dataset", rows, "--warmup", 0)
    assert report["request_info"]["num_requests"] == 1


def test_a_cache_key_plans_and_draws_nothing(llmctl, engines, tmp_path):
    build = ("build", "--checkpoint-dir", engines.target_checkpoint, "--output-dir", tmp_path / "e")
    for option in (["--dry-run"], ["--visualize-network", tmp_path / "network"]):
        done = llmctl(*build, "--cache-key", *option)
        assert done.code == 2 and refused(done, "BadConfig", "--cache-key", option[0])


def test_a_plan_may_be_for_a_folder_at_the_root_and_not_for_endless_memory(llmctl, engines):
    build = ("build", "--checkpoint-dir", engines.target_checkpoint, "--dry-run", "--output-dir")
    assert llmctl(*build, "/").code in (0, 3)
    for size in ("inf", "nan", 1e300):
        done = llmctl(*build, "/x", "--backend", "cuda", "--gpu", "h200", "--gpu-memory", size)
        assert done.code == 2 and refused(done, "Usage", "--gpu-memory", str(size))
    for rate in ("inf", "nan", 1e300):
        done = llmctl("inspect", engines.target, "--read-bandwidth", rate, "--json")
        assert done.code == 2 and "--read-bandwidth" in done.out


@pytest.mark.parametrize("option", ["--tokens", "--context-len", "--gpu", "--read-bandwidth"])
def test_options_of_engines_are_refused_for_a_checkpoint(llmctl, engines, option):
    done = llmctl("inspect", engines.target_checkpoint, option, 3)
    assert done.code == 2 and refused(done, "BadConfig", f"{option} is for engines")


def test_a_step_that_the_engine_cannot_take_is_not_predicted(llmctl, engines):
    for option, value in (("--tokens", 129), ("--context-len", 513)):
        done = llmctl("inspect", engines.target, option, value)
        assert done.code == 2 and refused(done, "BadConfig", option, str(value - 1))
    assert llmctl("inspect", engines.target, "--tokens", 128, "--context-len", 512).code == 0
