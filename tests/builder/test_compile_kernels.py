"""The kernels of a build, compiled beside each other."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from llmctl.builder.engine_kernels import compile_kernels
from llmctl.errors import KernelCompileError
from llmctl.plugins.backends.cuda import compiler
from llmctl.plugins.backends.cuda.kernel_spec import KernelSpec

Done = list[tuple[str, bool]]  # which kernels, and whether in the main thread

SPECS = [
    KernelSpec(f"{index:02}", f"{index}.cu" if index % 3 else f"{index}:triton", ())
    for index in range(60)
]


@pytest.fixture
def compiling(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Done]:
    """compiling(refused): what is compiled from now on, by a compiler that refuses one kernel."""

    def install(refused: str = "") -> Done:
        done: Done = []

        def compile_kernel(spec: KernelSpec, _capability: str) -> str:
            done.append((spec.name, threading.current_thread() is threading.main_thread()))
            if spec.name == refused:
                raise KernelCompileError(f"{spec.name} does not compile")
            time.sleep(0.01)
            return f"binary {spec.name}"

        monkeypatch.setattr(compiler, "compile_kernel", compile_kernel)
        return done

    return install


def test_every_kernel_is_compiled_once_and_those_of_triton_in_the_main_thread(compiling) -> None:
    done, told = compiling(), []
    found = compile_kernels(SPECS, "9.0", lambda *step: told.append(step))
    assert found == [f"binary {spec.name}" for spec in SPECS]
    assert sorted(done) == [(spec.name, spec.is_triton) for spec in SPECS]
    assert sorted(name for name, _, _ in told) == [spec.name for spec in SPECS]
    assert [step[1:] for step in told] == [(index, len(SPECS)) for index in range(len(SPECS))]


@pytest.mark.parametrize("refused", ["00", "01"])
def test_a_kernel_that_is_refused_ends_it(compiling, refused) -> None:
    done = compiling(refused)
    with pytest.raises(KernelCompileError, match=f"{refused} does not compile"):
        compile_kernels(SPECS, "9.0")
    count = len(done)
    time.sleep(0.05)
    assert len(done) == count, "somebody still compiles"
    if refused == "00":  # the first of all
        assert count < len(SPECS) / 2
