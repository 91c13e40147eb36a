"""Options of TensorRT-LLM's run.py that this program does not have, and why.

They are refused by name: an option that is accepted and ignored changes results silently.
"""

from __future__ import annotations

_BEAM = "beam search is not available; every request runs with one beam"
_PROMPT_TUNING = "prompt tuning and multimodal embeddings are not available; prompts are tokens"
_LOGITS = "whole logits are not kept; --output-log-probs-npy writes the emitted tokens' log-probs"
_LORA = "LoRA adapters are not available; merge the adapter into the checkpoint before quantizing"
_TREE = "tree drafting is not available; use --draft-engine or --ngram-config"
_COMPARE = "run does not load Hugging Face models; --engine-dir holds all it needs"
_KERNEL = "the engine's kernels are chosen at build and every one of them is exact"
_WINDOW = "attention windows are read from the checkpoint when the engine is built"
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
    "no-repeat-ngram-size": "use --frequency-penalty or --repetition-penalty against repetition",
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
    "max-attention-window-size": _WINDOW,
    "sink-token-length": _WINDOW,
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
    "medusa-choices": _TREE,
    "eagle-choices": _TREE,
    "eagle-posterior-threshold": _TREE,
    "eagle-use-dynamic-tree": _TREE,
    "eagle-dynamic-tree-max-top-k": _TREE,
    "lookahead-config": "lookahead decoding is not available; use --ngram-config",
}


def refusal(option: str) -> str | None:
    """Why `option` (as typed) is not available; None when it is not an option of run.py."""
    return _REASONS.get(option.lstrip("-").replace("_", "-"))
