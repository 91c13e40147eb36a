"""The driver binding on a GPU: arguments, tensor maps, clusters, and programmatic launches."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from llmctl.errors import DeviceFailure
from llmctl.plugins.backends.cuda import compiler
from llmctl.plugins.backends.cuda.compiler import CompiledKernel, compile_kernel
from llmctl.plugins.backends.cuda.driver import CudaDriver, cuda_driver
from llmctl.plugins.backends.cuda.kernel_spec import KernelSpec, TensorMap

WIDTH = 256
ADD_ROWS = ("*fp32", "*fp32", "i32", "i64", "fp32")


@pytest.fixture
def driver() -> CudaDriver:
    return cuda_driver()


@pytest.fixture
def build(repository, monkeypatch) -> Callable[..., CompiledKernel]:
    """Compile a function of tests/support/cuda_samples/sample.cu."""
    monkeypatch.setattr(compiler, "PLUGINS", repository / "tests")

    def make(entry: str, *arguments: str, **settings: int) -> CompiledKernel:
        source = "support/cuda_samples/sample.cu"
        constants = {"WIDTH": WIDTH}
        return compile_kernel(
            KernelSpec(f"sample.{entry}", source, arguments, constants, entry, **settings)
        )

    return make


def stream() -> int:
    return torch.cuda.current_stream().cuda_stream


def test_every_kind_of_argument_arrives(driver, build):
    loaded = driver.load(build("add_rows", *ADD_ROWS, shared_bytes=4 * WIDTH))
    x = torch.randn(7, 2 * WIDTH, device="cuda")
    out = torch.zeros_like(x)
    driver.prepare(loaded, (9, 1, 1), (x, out, 7, 2 * WIDTH, 1.5), True)(stream())
    assert torch.equal(out[:, :WIDTH], 1.5 * x[:, :WIDTH].flip(1))
    assert not out[:, WIDTH:].any()


def test_triton_kernels_get_their_hidden_arguments(driver):
    constants = {"WIDTH": WIDTH, "PDL": True}
    source = "support.cuda_samples.sample_triton:scaled_norm"
    arguments = ("*bf16", "*fp32", "*fp8e4nv", "i32", "fp32")
    loaded = driver.load(compile_kernel(KernelSpec("sample", source, arguments, constants)))
    x = torch.randn(5, WIDTH, device="cuda").bfloat16()
    scale = torch.tensor([0.01], device="cuda")
    out = torch.zeros(5, WIDTH, dtype=torch.float8_e4m3fn, device="cuda")
    driver.prepare(loaded, (5, 1, 1), (x, scale, out, 5, 1e-6), True)(stream())
    wide = x.float()
    wanted = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6) / scale
    torch.testing.assert_close(out.float(), wanted.clamp(-448, 448), rtol=2**-3, atol=2**-9)


@pytest.mark.parametrize("swizzle", [0, 128])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn])
def test_a_tensor_map_reads_a_box_and_zeros_outside(driver, build, swizzle, dtype):
    loaded = driver.load(build("copy_box", "tensor_map", "*u8", "i32", shared_bytes=1024))
    source = torch.randint(1, 100, (29, 128), dtype=torch.uint8, device="cuda")
    out = torch.full((8, 128), 255, dtype=torch.uint8, device="cuda")
    boxes = TensorMap(source.view(dtype), 8, 128, swizzle)
    driver.prepare(loaded, (1, 1, 1), (boxes, out, 24), True)(stream())
    wanted = torch.zeros(8, 128, dtype=torch.uint8, device="cuda")
    wanted[:5] = source[24:]
    if swizzle:  # chunk c of row r lies at c XOR r
        rows, chunks = torch.arange(8)[:, None], torch.arange(8)[None, :]
        wanted = wanted.view(8, 8, 16)[rows, chunks ^ rows].view(8, 128)
    assert torch.equal(out, wanted)


@pytest.mark.parametrize("cluster", [1, 4, 8, 16])
def test_blocks_launch_in_clusters(driver, build, cluster):
    loaded = driver.load(build("cluster_ranks", "*i32", num_warps=1, cluster=cluster))
    out = torch.full((32,), -1, dtype=torch.int32, device="cuda")
    driver.prepare(loaded, (32, 1, 1), (out,), True)(stream())
    assert out.tolist() == [i % cluster for i in range(32)]


def test_a_refused_launch_is_named(driver, build):
    loaded = driver.load(build("cluster_ranks", "*i32", num_warps=1))
    out = torch.zeros(4, dtype=torch.int32, device="cuda")
    with pytest.raises(DeviceFailure, match="launching sample.cluster_ranks: CUDA_ERROR_INVALID"):
        driver.prepare(loaded, (0, 1, 1), (out,), True)(stream())


def chain(driver: CudaDriver, build: Callable[..., CompiledKernel], buffers: list[torch.Tensor]):
    """Launches that each double the buffer before, in mirror image."""
    loaded = driver.load(build("add_rows", *ADD_ROWS, shared_bytes=4 * WIDTH))
    rows = buffers[0].shape[0]
    return [
        driver.prepare(loaded, (rows, 1, 1), (source, target, rows, WIDTH, 2.0), True)
        for source, target in zip(buffers, buffers[1:], strict=False)
    ]


def run_after_copy(launches, target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source, non_blocking=True)
    for launch in launches:
        launch(stream())


@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize("captured", [False, True])
def test_a_programmatic_launch_waits_for_the_copy_before_it(driver, build, pinned, captured):
    """The copy takes milliseconds: a kernel that started beside it would read old rows."""
    rows = 1 << 17
    shape = (rows, WIDTH)
    host = torch.randn(shape, pin_memory=pinned, device="cpu" if pinned else "cuda")
    buffers = [torch.zeros(shape, device="cuda") for _ in range(3)]
    launches = chain(driver, build, buffers)
    with torch.cuda.stream(torch.cuda.Stream()):
        if captured:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                run_after_copy(launches, buffers[0], host)
            for _ in range(3):
                buffers[0].zero_()
                graph.replay()
        else:
            run_after_copy(launches, buffers[0], host)
        torch.cuda.synchronize()
    assert torch.equal(buffers[2], 4 * host.cuda())


def test_a_captured_chain_computes_what_direct_launches_do(driver, build):
    """Heads of graphs, launches after torch's own kernels, and torch's kernels after launches."""
    buffers = [torch.zeros(999, WIDTH, device="cuda") for _ in range(41)]
    launches = chain(driver, build, buffers)
    start = torch.randn(999, WIDTH, device="cuda")
    total = torch.zeros_like(start)
    side = torch.cuda.Stream()
    torch.cuda.synchronize()

    def record() -> None:
        for launch in launches[:20]:
            launch(stream())
        buffers[20].add_(buffers[20])
        for launch in launches[20:]:
            launch(stream())
        total.add_(buffers[40])

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        record()
    for repeat in range(1, 20):
        buffers[0].copy_(start * repeat)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(buffers[40], start * repeat * 2.0**41)
