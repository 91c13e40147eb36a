"""Options of TensorRT-LLM's run.py and trtllm-bench that llmctl does not have, and why.

They are refused with a reason: accepting and ignoring an option would silently change results.
"""

from __future__ import annotations

_BEAM = "beam search is not available; every request runs with one beam"
_PROMPT_TUNING = "prompt tuning and multimodal embeddings are not available; prompts are tokens"
_LOGITS = "whole logits are not kept; --output-log-probs-npy writes the emitted tokens' log-probs"
_LORA = "LoRA adapters are not available; merge the adapter into the checkpoint before quantizing"
_TYPICAL = "typical acceptance is asked for with --typical-acceptance THRESHOLD,ALPHA"
_COMPARE = "run does not load Hugging Face models; --engine-dir holds all it needs"
_KERNEL = "the engine's kernels are chosen at build and every one of them is exact"
_WINDOW = "an attention window that is too large is no error: it sees everything"
_TOKENIZER = "tokenizers are read from tokenizer.json; --tokenizer-dir names its folder"

_REASONS = {
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
    "model": "it is a label before the command: llmctl bench --model NAME latency ...",
    "model-path": "the engine holds all it needs; give --engine-dir",
    "max-seq-len": _ENGINE,
    "beam-width": _BEAM,
    "tp": "the number of ranks is the engine's; choose it with: llmctl build --tp-size",
    "pp": _PARALLEL,
    "ep": _PARALLEL,
    "backend": _REASONS["backend"],
    "extra-llm-api-options": "every option has a name of its own: llmctl bench latency --help-all",
    "max-input-len": "rows are never cut; the first that does not fit the engine is named",
    "modality": "prompts are text or token ids",
    "iteration-log": "--raw writes every step",
    "request-json": "--raw writes every request",
    "output-json": "--raw writes every request with its token ids",
}


def refusal(option: str, command: str) -> str | None:
    """Why `option` (as typed) of a command is not available; None when the tool that the command
    follows has no such option either."""
    reasons = {"run": _REASONS, "bench": _BENCH_REASONS}.get(command, {})
    return reasons.get(option.lstrip("-").replace("_", "-"))
