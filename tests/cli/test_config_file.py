"""`--config FILE`: options of any command from a YAML file, checked as on the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llmctl.cli.app import COMMANDS, make_command, make_context


@pytest.fixture
def parsed(tmp_path: Path):
    """The parameters that a command gets from a file's text and from words after it."""

    def parse(command: str, text: str, *words: str) -> dict[str, Any]:
        path = tmp_path / "options.yaml"
        path.write_text(text)
        line = [*command.split(), "--config", str(path), *words]
        group, context = make_context(line)
        with context:
            while getattr(group, "commands", None):
                name, group, rest = group.resolve_command(
                    context, [*context._protected_args, *context.args]
                )
                context = group.make_context(name, rest, parent=context)
        return context.params

    return parse


def test_options_of_the_command_line_win_over_those_of_the_file(parsed):
    text = "engine-dir: here\nmax_output_len: 7\ninput_text: [from, file]\nchat: true\n"
    of_file = parsed("run", text)
    assert (of_file["engine_dir"], of_file["max_output_len"]) == (Path("here"), 7)
    assert of_file["input_text"] == ["from", "file"] and of_file["chat"] is True
    both = parsed("run", text, "--max-output-len", "9", "--input-text", "given")
    assert (both["max_output_len"], both["input_text"]) == (9, ["given"])
    assert both["engine_dir"] == Path("here")


def test_a_flag_can_be_turned_off_and_one_that_is_on_in_the_file_too(parsed):
    text = "engine-dir: x\nmax-output-len: 1\nenable_chunked_context: false\n"
    assert parsed("run", text)["enable_chunked_context"] is False
    assert parsed("run", text, "--enable-chunked-context")["enable_chunked_context"] is True


def test_lists_of_words_are_one_list_for_all_prompts_or_one_for_each(parsed):
    base = "engine-dir: x\nmax-output-len: 1\n"
    assert parsed("run", base + "stop_words: [a, --b]")["stop_words"] == ['["a", "--b"]']
    each = parsed("run", base + "stop_words: [[a], [b, c]]")["stop_words"]
    assert each == ['["a"]', '["b", "c"]']
    assert each == parsed("run", base, "--stop_words", "a", "--stop_words", "b", "c")["stop_words"]


def test_arguments_and_every_name_of_an_option_are_keys(parsed):
    assert parsed("inspect", "path: engine\njson: true\n")["path"] == Path("engine")
    base = "engine-dir: x\nmax-output-len: 1\n"
    assert parsed("run", base + "draft_engine_dir: d")["draft_engine"] == Path("d")


def test_words_that_yaml_takes_for_numbers_reach_options_that_take_text(parsed):
    params = parsed("build", "checkpoint-dir: 2024\ncompute_capability: 9.0\n")
    assert (params["checkpoint_dir"], params["compute_capability"]) == (Path("2024"), "9.0")


@pytest.mark.parametrize(
    "key, nearest",
    [
        ("max_batch", "max-batch-size"),
        ("checkpoint-directory", "checkpoint-dir"),
        ("config", "build-config"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_option(llmctl, tmp_path, key, nearest):
    path = tmp_path / "options.yaml"
    path.write_text(f"checkpoint-dir: x\n{key}: 1\n")
    done = llmctl("build", "--config", path)
    assert done.code == 2 and f"{path}: {key!r} is not an option of `build`" in done.err
    assert f"the nearest option is {nearest}" in done.err


@pytest.mark.parametrize(
    "text, words",
    [
        ("max_batch_size: many", "--max-batch-size"),
        ("max_batch_size: 1.5", "--max-batch-size"),
        ("max_batch_size: [1]", "one value is wanted"),
        ("max_batch_size: {most: [1]}", "is {'most': ['1']}; one value"),
        ("max_batch_size:", "is nothing"),
        ("dry_run: 1", "must be true or false"),
        ("max_batch_size: 1\nmax-batch-size: 2", "a second time"),
        ("[a, b]", "YAML list"),
        ("a: [", "is not YAML"),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused_by_name(llmctl, tmp_path, text, words):
    path = tmp_path / "options.yaml"
    path.write_text(text)
    done = llmctl("build", "--checkpoint-dir", "x", "--config", path)
    assert done.code == 2 and words in done.err and done.out == ""


def test_a_wrong_value_is_told_with_its_file_unless_the_command_line_has_it(llmctl, tmp_path):
    path = tmp_path / "options.yaml"
    path.write_text("checkpoint-dir: x\nmax_batch_size: many\n")
    done = llmctl("build", "--config", path)
    assert "'--max-batch-size'" in done.err and f" (in {path})\n" in done.err
    done = llmctl("build", "--config", path, "--max_batch_size", "few")
    assert "'--max-batch-size'" in done.err and str(path) not in done.err


def test_json_in_the_file_makes_errors_json_too(llmctl, tmp_path):
    path = tmp_path / "options.yaml"
    path.write_text("engine_dir: absent\nmax_output_len: 1\njson: true\n")
    for words in (["--config", path], [f"--config={path}"]):
        done = llmctl("run", *words)
        assert json.loads(done.out)["error"]["name"] == "EngineNotFound" and done.err == ""
    assert llmctl("run", "--config", tmp_path / "none.yaml").out == ""


@pytest.mark.parametrize("key", ["input_text", "max-attention-window-size"])
def test_an_empty_list_is_not_taken_for_an_option_left_out(llmctl, tmp_path, key):
    path = tmp_path / "options.yaml"
    path.write_text(f"engine_dir: absent\nmax_output_len: 1\n{key}: []\n")
    done = llmctl("run", "--config", path)
    assert done.code == 2 and f"{key} is an empty list" in done.err


@pytest.mark.parametrize(
    ("words", "key", "reason"),
    [
        ("run", "lora_dir", "LoRA adapters are not available"),
        ("build", "weight-sparsity", "kernels for sparse weights are not available"),
        ("bench latency", "iteration_log", "--raw writes every step"),
        ("dataset", "rand-task-id", "LoRA adapters are not available"),
    ],
)
def test_an_option_that_is_refused_has_its_reason_in_a_file_too(
    llmctl, tmp_path, words, key, reason
):
    path = tmp_path / "options.yaml"
    path.write_text(f"{key}: x\n")
    done = llmctl(*words.split(), "--config", path)
    assert done.code == 2 and "error[Unsupported]" in done.err
    assert f"{path}: {key!r} is not available: {reason}" in done.err


@pytest.mark.parametrize(
    ("words", "key", "fix"),
    [
        (
            "bench --config FILE throughput",
            "engine_dir",
            "of `bench latency` and `bench throughput`: type --config FILE after the command",
        ),
        ("dataset token-norm-dist --config FILE", "tokenizer", "type it before token-norm-dist"),
        ("run --config FILE", "tokenizer", "the nearest option is tokenizer-dir"),
    ],
)
def test_an_option_of_another_command_is_told_its_place(llmctl, tmp_path, words, key, fix):
    path = tmp_path / "options.yaml"
    path.write_text(f"{key}: x\n")
    done = llmctl(*words.replace("FILE", str(path)).split())
    assert done.code == 2 and f"'{key}' is not an option of" in done.err
    assert fix in done.err.splitlines()[1]


def test_a_file_that_is_absent_is_named(llmctl, tmp_path):
    done = llmctl("build", "--config", tmp_path / "none.yaml")
    assert done.code == 2 and "none.yaml does not exist" in done.err


def test_a_file_builds_what_the_same_options_build(llmctl, engines, tmp_path):
    path = tmp_path / "build.yaml"
    path.write_text(
        f"checkpoint_dir: {engines.draft_checkpoint}\noutput_dir: {tmp_path / 'made'}\n"
        "max_seq_len: 512\nmax_batch_size: 3\nmax_num_tokens: 128\nlog_level: error\n"
    )
    assert llmctl("build", "--config", path, "--max-batch-size", 8).code == 0
    made, known = (
        json.loads((p / "config.json").read_text()) for p in (tmp_path / "made", engines.draft)
    )
    assert made["build_config"] == known["build_config"]
    assert made["files"] == known["files"]


def test_every_command_takes_a_file():
    def leaves(command: Any) -> list[Any]:
        children = getattr(command, "commands", {}).values()
        return [leaf for child in children for leaf in leaves(child)] or [command]

    found = leaves(make_command(COMMANDS))
    assert len(found) >= len(COMMANDS)
    for leaf in found:
        assert any("--config" in param.opts for param in leaf.params), leaf.name


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("engine-dir: &x [*x]", "Circular"),
        ("engine-dir: a\nengine-dir: b", "'engine-dir' is there twice"),
    ],
)
def test_files_that_yaml_takes_and_options_do_not_are_refused(llmctl, tmp_path, text, message):
    path = tmp_path / "odd.yaml"
    path.write_text(text)
    done = llmctl("run", "--config", path)
    assert done.code == 2 and "error[BadConfig]" in done.err and message in done.err


def test_of_two_files_the_last_counts_as_of_any_option(llmctl, tmp_path):
    one, two = tmp_path / "one.yaml", tmp_path / "two.yaml"
    one.write_text("json: true")
    two.write_text("json: false")
    assert llmctl("run", "--config", one, "--config", two).out == ""
    assert "error" in json.loads(llmctl("run", "--config", two, "--config", one).out)
