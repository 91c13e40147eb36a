"""Options of TensorRT-LLM's commands that llmctl does not have, and why.

They are refused with a reason: accepting and ignoring an option would silently change results.
"""

from __future__ import annotations

from llmctl.errors import Unsupported

_BEAM = "beam search is not available; every request runs with one beam"
_PROMPT_TUNING = "prompt tuning and multimodal embeddings are not available; prompts are tokens"
_LOGITS = "whole logits are not kept; --output-log-probs-npy writes the emitted tokens' log-probs"
_LORA = "LoRA adapters are not available; merge the adapter into the checkpoint before quantizing"
_TYPICAL = "typical acceptance is requested with --typical-acceptance THRESHOLD,ALPHA"
_COMPARE = "run does not load Hugging Face models; --engine-dir holds all it needs"
_KERNEL = "the engine's kernels are chosen at build and every one of them is exact"
_WINDOW = "an attention window that is too large is no error: it sees everything"
_TOKENIZER = "tokenizers are read from tokenizer.json; --tokenizer-dir names its folder"

_RUN_REASONS = {
    "multimodal-input-file": _PROMPT_TUNING,
    "input-token-extra-ids": _PROMPT_TUNING,
    "input-token-extra-ids-file": _PROMPT_TUNING,
    "prompt-table-path": _PROMPT_TUNING,
    "prompt-tasks": _PROMPT_TUNING,
    "num-prepend-vtokens": _PROMPT_TUNING,
    "output-generation-logits": _LOGITS,
    "output-logits-npy": _LOGITS,
    "return-all-generated-tokens": "--streaming always prints the whole text so far",
    "length-penalty": _BEAM,
    "beam-search-diversity-rate": _BEAM,
    "early-stopping": _BEAM,
    "beam-width-array": _BEAM,
    "tokenizer-type": _TOKENIZER,
    "vocab-file": _TOKENIZER,
    "no-prompt-template": "prompts are used as they are unless --chat is given",
    "hf-model-dir": _COMPARE,
    "model-dir": _COMPARE,
    "hf-data-type": _COMPARE,
    "hf-device-map-auto": _COMPARE,
    "use-py-session": "there is one runtime",
    "debug-mode": "there are no debug tensors",
    "cross-kv-cache-fraction": "encoder-decoder models are not available",
    "fail-fast-on-attention-window-too-large": _WINDOW,
    "multi-block-mode": _KERNEL,
    "cuda-graph-mode": _KERNEL,
    "enable-context-fmha-fp32-acc": _KERNEL,
    "gpu-weights-percent": "weight streaming is not available; weights are mapped from the engine",
    "lora-dir": _LORA,
    "lora-ckpt-source": _LORA,
    "lora-task-uids": _LORA,
    "language-task-uids": "language adapters are not available",
    "backend": "the engine's backend was chosen with: llmctl build --backend",
    "eagle-posterior-threshold": _TYPICAL,
}


_ENGINE = "it is part of the engine; choose it with: llmctl build"
_PARALLEL = "pipeline and expert parallelism are not available; ranks divide every layer"

_BENCH_REASONS = {
    "model-path": "the engine holds all it needs; give --engine-dir",
    "max-seq-len": _ENGINE,
    "beam-width": _BEAM,
    "tp": "the number of ranks is the engine's; choose it with: llmctl build --tp-size",
    "pp": _PARALLEL,
    "ep": _PARALLEL,
    "backend": _RUN_REASONS["backend"],
    "extra-llm-api-options": "every option has a name of its own: llmctl bench latency --help-all",
    "max-input-len": "rows are never cut; the first that does not fit the engine is named",
    "modality": "prompts are text or token ids",
    "iteration-log": "--raw writes every step",
    "request-json": "--raw writes every request",
    "output-json": "--raw writes every request with its token ids",
    "log-level": "--json leaves out tables and progress",
    "quantization": "weights are those of the checkpoint: llmctl quantize",
    "no-weights-loading": "random weights are those of: llmctl build --load-format dummy",
    "trust-remote-code": "Python code of a checkpoint or tokenizer is never run",
    "pp-size": _PARALLEL,
    "workspace": "nothing is built here; engines are made with: llmctl build --output-dir",
}

_ENCODER = "encoder-decoder models are not available"
_SPLIT = "pipeline and context parallelism are not available; --tp-size divides every layer"
_HEADS = "draft heads are quantized on their own, and described by their folder: --draft-model-dir"
_MIXED = "every layer has the same scheme: --qformat"
_TIMING = "timings are not kept: kernels are chosen by tables in the source, or by TensorRT"
_FAMILIES = "model families are part of llmctl; docs/adding.md says how to add one"
_HF_ONLY = "checkpoints are read in Hugging Face format"
_PLAN = "weights are mapped from a file of their own, and always whole"

_QUANTIZE_REASONS = {
    "nemo-ckpt-path": _HF_ONLY,
    "decoder-type": _HF_ONLY,
    "device-map": "one layer at a time is on --device",
    "calib-tp-size": "one layer at a time is calibrated, in one process",
    "calib-pp-size": "one layer at a time is calibrated, in one process",
    "tokenizer-max-seq-length": "the length of a row is --calib-max-seq-length",
    "awq-block-size": "AWQ is not available",
    "pp-size": "checkpoints are not divided; `llmctl build --tp-size` does that",
    "cp-size": "checkpoints are not divided; `llmctl build --tp-size` does that",
    "medusa-model-dir": _HEADS,
    "num-medusa-heads": _HEADS,
    "num-medusa-layers": _HEADS,
    "medusa-hidden-act": _HEADS,
    "quant-medusa-head": _HEADS,
    "max-draft-len": _ENGINE,
    "autoq-format": _MIXED,
    "auto-quantize-bits": _MIXED,
}

_BUILD_REASONS = {
    "model-dir": "its name here is --checkpoint-dir",
    "model-config": "the checkpoint's own config.json is read",
    "model-cls-file": _FAMILIES,
    "model-cls-name": _FAMILIES,
    "max-decoder-seq-len": "its name here is --max-seq-len",
    "opt-num-tokens": "kernels are chosen for every number of tokens, not for one",
    "max-encoder-input-len": _ENCODER,
    "bert-context-fmha-fp32-acc": _ENCODER,
    "max-prompt-embedding-table-size": _PROMPT_TUNING,
    "max-multimodal-len": _PROMPT_TUNING,
    "paged-kv-cache": "its name here is --kv-cache-type",
    "input-timing-cache": _TIMING,
    "output-timing-cache": _TIMING,
    "profiling-verbosity": "`llmctl inspect` shows every operator of any engine",
    "strip-plan": _PLAN,
    "weight-streaming": _PLAN,
    "weight-sparsity": "kernels for sparse weights are not available",
    "fast-build": "there is one kind of build",
    "enable-debug-output": "there are no debug tensors",
    "monitor-memory": "--dry-run says before a build what fits",
    "gather-all-token-logits": _LOGITS,
    "lora-dir": _LORA,
    "lora-ckpt-source": _LORA,
    "lora-target-modules": _LORA,
    "max-lora-rank": _LORA,
    "auto-parallel": _SPLIT,
    "gpus-per-node": _SPLIT,
    "cluster-key": _SPLIT,
    "pp-size": _SPLIT,
    "cp-size": _SPLIT,
}

_DATASET_REASONS = {
    "task-id": _LORA,
    "rand-task-id": _LORA,
    "lora-dir": _LORA,
    "dataset-config-name": "nothing is downloaded; --input-file names a file",
    "dataset-split": "nothing is downloaded; --input-file names a file",
    "dataset-image-key": "prompts are text or token ids",
}

# Commands of those tools that have another name here: (command, name there) -> what to type.
OTHER_COMMANDS = {
    ("llmctl bench", "build"): "llmctl build --checkpoint-dir CHECKPOINT --output-dir ENGINE",
    ("llmctl dataset", "dataset"): "llmctl dataset --tokenizer DIR text --input-file FILE ...",
}

REASONS = {
    "quantize": _QUANTIZE_REASONS,
    "build": _BUILD_REASONS,
    "run": _RUN_REASONS,
    "bench": _BENCH_REASONS,
    "dataset": _DATASET_REASONS,
}


def refusal(option: str, command: str) -> str | None:
    """Why `option` (as typed) of a command is not available; None when the tool that the command
    follows has no such option either."""
    reasons = REASONS.get(command, {})
    return reasons.get(option.lstrip("-").replace("_", "-"))


def refuse(where: str, option: str, command: str) -> None:
    """Raise Unsupported for an option of the tool that a command follows, found in a file: the
    nearest name would not say that there is nothing of the kind. where: the file and the option."""
    if (reason := refusal(option, command)) is not None:
        raise Unsupported(f"{where} is not available: {reason}", fix=f"leave {option} out")
