"""`llmctl.open`: the engines of a directory in three lines of Python."""

from __future__ import annotations

import gc
import re
import subprocess
import sys
import weakref
from itertools import islice

import pytest
from support.e2e import DemoPair, PromptMaker, run_all

import llmctl
from llmctl.errors import BadConfig, EngineNotFound
from llmctl.runtime.drafting.ngram.method import NgramLookup
from llmctl.runtime.open import EngineOptions, OpenEngines, check_engines
from llmctl.runtime.request import Request, SamplingConfig


def test_tokens_come_one_by_one_and_are_those_of_the_executor(
    demo: DemoPair, prompts: PromptMaker
) -> None:
    prompt = prompts(1)[0]
    with llmctl.open(demo.engine("target-float32")) as executor:
        wanted = list(run_all(executor, [Request(prompt, max_tokens=24)])[0][0])
        assert list(executor.generate(prompt, max_tokens=24)) == wanted
    drafts = (demo.engine("draft-float32"), str(demo.engine("draft-float32")), NgramLookup(4, 3))
    for draft in drafts:
        with llmctl.open(demo.engine("target-float32"), draft=draft, max_batch_size=2) as executor:
            assert list(executor.generate(prompt, max_tokens=24)) == wanted
            assert executor.get_speculation_stats().draft_tokens > 0


@pytest.mark.parametrize(("page", "least"), [("README.md", 60), ("docs/executor.md", 300)])
def test_the_lines_of_the_pages_run(
    page: str, least: int, demo: DemoPair, repository, capsys, monkeypatch
) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (repository / page).read_text(), re.DOTALL)
    for name in ("target", "draft"):
        code = code.replace(f'"out/{name}"', repr(str(demo.engine(f"{name}-float32"))))
    monkeypatch.chdir(repository)
    exec(compile(code, page, "exec"), {})
    assert len(capsys.readouterr().out) > least


def test_an_iterator_that_is_closed_cancels_its_request(demo: DemoPair) -> None:
    with llmctl.open(demo.engine("target-float32")) as executor:
        tokens = executor.generate([5, 6, 7], max_tokens=900)
        assert len(list(islice(tokens, 3))) == 3
        tokens.close()
        assert executor.get_num_responses_ready() == 0
        short = list(executor.generate([5, 6, 7], max_tokens=4))
        assert len(short) == 4


def test_engines_run_one_executor_at_a_time(demo: DemoPair) -> None:
    opened = OpenEngines(check_engines(EngineOptions(demo.engine("target-float32"))))
    with opened.executor() as executor:
        wanted = list(executor.generate([5, 6, 7], max_tokens=4))
        with pytest.raises(BadConfig, match="an executor runs on these engines"):
            opened.executor(is_speculative=False)
        assert list(executor.generate([5, 6, 7], max_tokens=4)) == wanted
    with opened.executor() as executor:
        assert list(executor.generate([5, 6, 7], max_tokens=4)) == wanted


def test_engines_are_freed_with_their_executor(demo: DemoPair) -> None:
    """At once, for the next ones may need their memory; not by a later collection of garbage."""
    gc.collect()
    gc.disable()
    try:
        with llmctl.open(demo.engine("target-float32")) as executor:
            list(executor.generate([5, 6, 7], max_tokens=4))
            known = weakref.ref(executor)
        del executor
        assert known() is None
    finally:
        gc.enable()


def test_a_program_that_ends_in_the_middle_of_a_request_ends_as_it_says(demo: DemoPair) -> None:
    """The worker used memory that Python frees at its end, or the iterator waited for a worker that
    had stopped: such programs crashed or hung."""
    program = (
        "import sys, llmctl; executor = llmctl.open(sys.argv[1]); "
        "tokens = executor.generate([5, 6, 7], max_tokens=900); print(next(tokens)); sys.exit(3)"
    )
    words = [sys.executable, "-c", program, str(demo.engine("target-float32"))]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 3 and ended.stdout.strip().isdigit(), ended.stderr


def test_a_forked_process_is_told_that_nobody_answers_it(demo: DemoPair) -> None:
    program = """if True:
        import os, sys, llmctl
        with llmctl.open(sys.argv[1]) as executor:
            wanted = list(executor.generate([5, 6, 7], max_tokens=4))
            if not (child := os.fork()):
                try:
                    next(executor.generate([5, 6, 7], max_tokens=4))
                except llmctl.errors.ExecutorClosed as error:
                    print(error, error.fix)
                executor.shutdown()
                sys.stdout.flush()
                os._exit(5)
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
            assert list(executor.generate([5, 6, 7], max_tokens=4)) == wanted
    """
    words = [sys.executable, "-c", program, str(demo.engine("target-float32"))]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "forked" in ended.stdout and "open the engine after forking" in ended.stdout
    assert ended.stdout.endswith("\n5\n")


def test_what_cannot_be_is_raised_where_it_is_asked_for(demo: DemoPair, tmp_path) -> None:
    with pytest.raises(EngineNotFound):
        llmctl.open(tmp_path / "nothing")
    with llmctl.open(demo.engine("target-float32")) as executor:
        two = SamplingConfig(temperature=1.0, top_k=5, num_return_sequences=2)
        with pytest.raises(BadConfig, match="num_return_sequences is 2"):
            next(executor.generate([1], max_tokens=2, sampling_config=two))
        with pytest.raises(BadConfig, match=r"token id"):
            next(executor.generate([10**6], max_tokens=2))
        with pytest.raises(BadConfig, match="no_such_field"):
            next(executor.generate([1], max_tokens=2, no_such_field=1))
        with pytest.raises(BadConfig, match="a whole Request and max_tokens"):
            next(executor.generate(Request((1,), 2), max_tokens=3))


def test_importing_the_package_imports_no_engine() -> None:
    script = "import sys, llmctl; print(sorted({'torch', 'numpy', 'typer'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr
