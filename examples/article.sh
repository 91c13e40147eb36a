#!/bin/sh
# The commands of NVIDIA's article on draft-target speculative decoding with TensorRT-LLM (Llama 3.3
# 70B, December 2024), in its order and with its options: the programs are llmctl's, the paths those of
# the demo pair. Run it from the root of the repository:
#
#   examples/article.sh OUTPUT_DIR [TARGET_CHECKPOINT DRAFT_CHECKPOINT]
#
# The article's `mpirun -n 8` is left out: these engines have one rank (docs/tensor_parallel.md: several).
# tests/e2e/test_article.py runs these lines with smaller sizes.
set -eu
out=${1:?"usage: examples/article.sh OUTPUT_DIR [TARGET_CHECKPOINT DRAFT_CHECKPOINT]"}
target=${2:-examples/demo-target}
draft=${3:-examples/demo-draft}
mkdir -p "$out"

# quantize.py: the draft, then the target
llmctl quantize --model_dir="$draft" --dtype float16 --qformat fp8 --kv_cache_dtype fp8 \
    --output_dir "$out/ckpt-draft" --calib_size 512 --tp_size 1
llmctl quantize --model_dir="$target" --dtype float16 --qformat fp8 --kv_cache_dtype fp8 \
    --output_dir "$out/ckpt-target" --calib_size 512 --tp_size 1

# trtllm-build: the draft, then the target
llmctl build --checkpoint_dir "$out/ckpt-draft" --output_dir="$out/draft-engine" \
    --gpt_attention_plugin float16 --workers 1 --gemm_plugin=fp8 --reduce_fusion disable \
    --use_paged_context_fmha=enable --use_fused_mlp enable --max_batch_size=32 \
    --max_num_tokens=131072 --max_seq_len=131072
llmctl build --checkpoint_dir="$out/ckpt-target" --output_dir="$out/target-engine" \
    --gpt_attention_plugin float16 --workers 8 --gemm_plugin=fp8 --reduce_fusion enable \
    --use_paged_context_fmha=enable --use_fused_mlp enable --multiple_profiles enable \
    --max_batch_size=32 --max_num_tokens=131072 --max_seq_len=131072 --max_draft_len=10 \
    --speculative_decoding_mode=draft_tokens_external

# run.py: with the draft, and without
llmctl run --tokenizer_dir="$target" --draft_engine_dir "$out/draft-engine" \
    --engine_dir "$out/target-engine" \
    --draft_target_model_config="[10,[0,1,2,3,4,5,6,7],[0,1,2,3,4,5,6,7], False]" \
    --max_output_len=1024 --kv_cache_enable_block_reuse --kv_cache_free_gpu_memory_fraction=0.5 \
    --input_text="Implement a program to find the common elements in two arrays without using any extra data structures."
llmctl run --tokenizer_dir="$target" --engine_dir "$out/target-engine" \
    --max_output_len=1024 --kv_cache_enable_block_reuse --kv_cache_free_gpu_memory_fraction=0.5 \
    --input_text="Implement a program to find the common elements in two arrays without using any extra data structures."

# prepare_dataset.py and trtllm-bench
llmctl dataset --output "$out/token-norm-dist.json" --tokenizer "$target" \
    token-norm-dist --num-requests 1000 --input-mean 500 --input-stdev 0 --output-mean 200 \
    --output-stdev 0 > "$out/synthetic.txt"
llmctl bench --model "$target" latency --engine_dir "$out/target-engine" \
    --dataset "$out/synthetic.txt" --num_requests 10
llmctl bench --model "$target" throughput --engine_dir "$out/target-engine" \
    --dataset "$out/synthetic.txt"
