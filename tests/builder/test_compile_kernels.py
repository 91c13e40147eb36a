"""The kernels of a build, compiled beside each other."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from llmctl.builder import engine_kernels
from llmctl.builder.engine_kernels import compile_kernels
from llmctl.errors import KernelCompileError
from llmctl.plugins.backends.cuda import compiler
from llmctl.plugins.backends.cuda.kernel_spec import KernelSpec

Done = list[tuple[str, bool]]  # which kernels, and whether in the main thread
WAIT_S = 60.0

SPECS = [
    KernelSpec(f"{index:02}", f"{index}.cu" if index % 3 else f"{index}:triton", ())
    for index in range(60)
]


class Compiling:
    """A compiler in place of the real one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self._over: Done = []

    @property
    def num_over(self) -> int:
        """Kernels at which nobody works any more."""
        return len(self._over)

    def __call__(self, refused: str = "", after: threading.Event | None = None) -> Done:
        """What is begun from now on; one kernel is refused, and others are ready after an event."""
        begun: Done = []

        def compile_kernel(spec: KernelSpec, _capability: str) -> str:
            item = (spec.name, threading.current_thread() is threading.main_thread())
            begun.append(item)
            try:
                if spec.name == refused:
                    raise KernelCompileError(f"{spec.name} does not compile")
                assert after is None or after.wait(WAIT_S)
                time.sleep(0.01)
                return f"binary {spec.name}"
            finally:
                self._over.append(item)

        self._monkeypatch.setattr(compiler, "compile_kernel", compile_kernel)
        return begun


@pytest.fixture
def compiling(monkeypatch: pytest.MonkeyPatch) -> Compiling:
    return Compiling(monkeypatch)


def test_every_kernel_is_compiled_once_and_those_of_triton_in_the_main_thread(compiling) -> None:
    done, told = compiling(), []
    found = compile_kernels(SPECS, "9.0", lambda *step: told.append(step))
    assert found == [f"binary {spec.name}" for spec in SPECS]
    assert sorted(done) == [(spec.name, spec.is_triton) for spec in SPECS]
    assert sorted(name for name, _, _ in told) == [spec.name for spec in SPECS]
    assert [step[1:] for step in told] == [(index, len(SPECS)) for index in range(len(SPECS))]


def test_a_kernel_that_is_refused_ends_it(compiling) -> None:
    done = compiling("01")
    with pytest.raises(KernelCompileError, match="01 does not compile"):
        compile_kernels(SPECS, "9.0")
    assert len(done) == compiling.num_over, "somebody still compiles"


def test_what_waits_when_the_first_is_refused_is_not_compiled(compiling, monkeypatch) -> None:
    ended = threading.Event()

    class Pool(ThreadPoolExecutor):
        def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
            super().shutdown(False, cancel_futures=cancel_futures)
            ended.set()
            super().shutdown(wait)

    monkeypatch.setattr(engine_kernels, "ThreadPoolExecutor", Pool)
    done = compiling("00", ended)
    with pytest.raises(KernelCompileError, match="00 does not compile"):
        compile_kernels(SPECS, "9.0")
    assert len(done) == compiling.num_over, "somebody still compiles"
    assert len(done) <= 1 + engine_kernels.MOST_COMPILERS  # it, and what had been begun
