"""Completion scripts: bash is asked in a bash, the others where they are installed."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from llmctl.cli.completion import command_nodes


@pytest.fixture
def script(llmctl, tmp_path):
    """The path of the script for a shell."""

    def write(shell: str) -> str:
        done = llmctl("completion", shell)
        assert done.code == 0 and done.err == ""
        path = tmp_path / shell
        path.write_text(done.out)
        return str(path)

    return write


ASKED = [
    ("bu", {"build"}),
    ("build --max-b", {"--max-batch-size", "--max-beam-width"}),
    ("run --engine-dir x --draft-l", {"--draft-len"}),
    ("dataset --log-level d", {"debug"}),
    ("dataset token-norm-dist --input-", {"--input-mean", "--input-stdev"}),
]


@pytest.mark.parametrize("line, wanted", ASKED)
def test_bash_offers_commands_options_and_values(script, line, wanted):
    words = " ".join(f"'{word}'" for word in ["llmctl", *line.split(" ")])
    asked = f"""
        . '{script("bash")}'
        COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); _llmctl
        printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    assert set(_output("bash", asked)) == wanted


@pytest.mark.parametrize("line, wanted", ASKED)
def test_fish_offers_commands_options_and_values(script, line, wanted):
    offered = _output("fish", f"source '{script('fish')}'; complete -C 'llmctl {line}'")
    assert {row.partition("\t")[0] for row in offered} == wanted


def test_bash_offers_hyphens_for_underscores_and_files_for_paths(script):
    path = script("bash")
    ask = f". '{path}'; COMP_WORDS=(llmctl {{}}); COMP_CWORD=2; _llmctl; echo ${{{{COMPREPLY[@]}}}}"
    assert _output("bash", ask.format("build --max_seq"))[0] == "--max-seq-len"
    assert _output("bash", ask.format("inspect /")) == []  # none of ours: bash offers files


def test_zsh_loads_the_script(script):
    asked = f"autoload -U compinit; compinit -u -D; source '{script('zsh')}'; echo $_comps[llmctl]"
    assert _output("zsh", asked) == ["_llmctl"]


def test_scripts_name_every_option_of_every_command(script):
    nodes = list(command_nodes())
    assert sum(len(node.options) for node in nodes) > 100
    for shell, prefix in (("bash", "--"), ("zsh", "--"), ("fish", "-l ")):
        with open(script(shell)) as file:
            text = file.read()
        for node in nodes:
            assert all(prefix + word.name.removeprefix("--") in text for word in node.options)


def _output(shell: str, commands: str) -> list[str]:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    quiet = ["--norc", "--noprofile"] if shell == "bash" else ["-f"] if shell == "zsh" else []
    done = subprocess.run(
        [shell, *quiet, "-c", commands], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stderr == ""
    return [line for line in done.stdout.splitlines() if line]
