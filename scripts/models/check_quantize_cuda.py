"""Check `llmctl quantize --device cuda` on a machine with a GPU, and time a 1B shape.

    python -m scripts.models.check_quantize_cuda [--shape 1b]

The demo target is quantized layer by layer and, as the oracle, whole by ModelOpt on the same GPU
with the same rows: every tensor must have the same bytes. Then a random checkpoint of the given
shape is calibrated on 512 rows of 512 tokens; seconds and peak memory are printed as JSON.
"""

from __future__ import annotations

import argparse
import copy
import json
import resource
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from time import perf_counter

import torch

from llmctl.quantize import calibration
from llmctl.quantize.checkpoint import Checkpoint
from llmctl.quantize.layers import import_modelopt
from llmctl.quantize.plan import QuantizeOptions, plan_quantization
from llmctl.quantize.quantizer import run_quantization

REPOSITORY = Path(__file__).resolve().parents[2]
TARGET = REPOSITORY / "examples/demo-target"
ROWS, ROW_LENGTH, BATCH, SEED, VOCAB = 64, 512, 8, 1234, 4096


def quantize_layerwise(source: Path, output: Path, rows: int, batch_size: int) -> float:
    """Our path on the GPU; seconds."""
    options = QuantizeOptions(
        source,
        output,
        kv_cache_dtype="fp8",
        calib_size=rows,
        calib_max_seq_length=ROW_LENGTH,
        batch_size=batch_size,
        device="cuda",
        seed=SEED,
    )
    began = perf_counter()
    run_quantization(plan_quantization(options))
    return perf_counter() - began


def quantize_whole(source: Path, output: Path) -> float:
    """ModelOpt on the whole model on the GPU; seconds."""
    from transformers import AutoModelForCausalLM

    mtq = import_modelopt()
    from modelopt.torch.export import export_hf_checkpoint

    rows = calibration.read_rows(
        calibration.DEMO_DATASET,
        source / "tokenizer.json",
        num_rows=ROWS,
        row_length=ROW_LENGTH,
        vocab=VOCAB,
        seed=SEED,
    ).cuda()
    config = copy.deepcopy(mtq.FP8_DEFAULT_CFG)
    config["quant_cfg"] += copy.deepcopy(mtq.FP8_KV_CFG["quant_cfg"])

    def calibrate(model: torch.nn.Module) -> None:
        for batch in rows.split(BATCH):
            model(input_ids=batch, use_cache=False)

    began = perf_counter()
    with torch.inference_mode():
        model = AutoModelForCausalLM.from_pretrained(source, dtype="auto").eval().cuda()
        export_hf_checkpoint(mtq.quantize(model, config, calibrate), export_dir=output)
    return perf_counter() - began


def differing(ours: Path, theirs: Path) -> list[str]:
    """Names of tensors that are not byte for byte the same in both checkpoints."""
    a, b = Checkpoint.open(ours), Checkpoint.open(theirs)
    wrong = sorted(a.tensors.keys() ^ b.tensors.keys())
    for name in sorted(a.tensors.keys() & b.tensors.keys()):
        x, y = a.read(name).flatten(), b.read(name).flatten()
        if x.dtype != y.dtype or not torch.equal(x.view(torch.uint8), y.view(torch.uint8)):
            wrong.append(name)
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="1b", help="of scripts/models/make_random_checkpoint.py")
    shape = parser.parse_args().shape
    warnings.filterwarnings("ignore")  # transformers' and ModelOpt's remarks
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        layerwise_s = quantize_layerwise(TARGET, folder / "ours", ROWS, BATCH)
        whole_s = quantize_whole(TARGET, folder / "theirs")
        wrong = differing(folder / "ours", folder / "theirs")
        print(f"demo: {layerwise_s:.1f} s layer by layer, {whole_s:.1f} s whole; differ: {wrong}")
        subprocess.run(
            [
                sys.executable,
                "-m",
                "scripts.models.make_random_checkpoint",
                folder / "source",
                "--shape",
                shape,
            ],
            check=True,
        )
        torch.cuda.reset_peak_memory_stats()
        seconds = quantize_layerwise(folder / "source", folder / "out", 512, BATCH)
    print(
        json.dumps(
            {
                "gpu": torch.cuda.get_device_name(),
                "shape": shape,
                "identical": not wrong,
                "seconds": round(seconds, 1),
                "peak_gpu_gb": round(torch.cuda.max_memory_allocated() / 1e9, 2),
                "peak_host_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6, 2),
                "torch": torch.__version__,
            }
        )
    )
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
