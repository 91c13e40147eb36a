#!/bin/sh
# Quantize, build, check and measure a target and its draft, unattended:
#
#   examples/ci/pipeline.sh OUTPUT_DIR [TARGET_CHECKPOINT DRAFT_CHECKPOINT]
#
# Every step stops the pipeline by its exit code; results are JSON files in OUTPUT_DIR/reports. An
# engine is built only if none of its cache key (llmctl build --cache-key: weights, tokenizer,
# options, software) lies in the cache. From the environment:
#
#   LLMCTL                 the program                                    (default: llmctl)
#   PYTHON                 for reading JSON                               (default: python3)
#   BACKEND                cpu, cuda, tensorrt, tensorrt-rtx              (default: cpu)
#   ENGINE_CACHE           folder of engines, one a cache key             (default: OUTPUT_DIR/engines)
#   CALIB_SIZE             rows of calibration text                       (default: 64)
#   MIN_ACCEPTANCE_LENGTH  tokens a round, at least                       (default: 2.0)
#   MIN_SPEEDUP            speed over that without drafts, at least       (default: not checked)
#
# Exit codes: those of llmctl (docs/cli.md), and 1 where a measurement is below its minimum.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
case "$#:${1:-}" in
    0:* | *:-* | 2:*)
        sed -n '2,/^set -eu/{/^set -eu/d;s/^# \{0,1\}//;p;}' "$0" >&2
        exit 2
        ;;
esac
output=$1
target=${2:-$here/../demo-target}
draft=${3:-$here/../demo-draft}
llmctl=${LLMCTL:-llmctl}
python=${PYTHON:-python3}
backend=${BACKEND:-cpu}
cache=${ENGINE_CACHE:-$output/engines}
reports=$output/reports
mkdir -p "$reports" "$cache"

say() { printf '%s\n' "$*" >&2; }

# number FILE KEY...: a number out of a JSON file.
number() {
    "$python" -c '
import json, sys
value = json.load(open(sys.argv[1]))
for key in sys.argv[2:]:
    value = value[key]
print(value)' "$@"
}

# at_least NAME VALUE MINIMUM
at_least() {
    say "$1: $2 (at least $3)"
    "$python" -c 'import sys; sys.exit(not float(sys.argv[1]) >= float(sys.argv[2]))' "$2" "$3" || {
        say "error: $1 is $2, below $3"
        exit 1
    }
}

say "== this machine ($backend)"
"$llmctl" doctor --backend "$backend" --json >"$reports/doctor.json" || {
    code=$?
    "$llmctl" doctor >&2 || true
    exit "$code"
}

# checkpoint ROLE SOURCE: FP8 with an FP8 KV cache.
checkpoint() {
    if [ -d "$output/$1-fp8" ]; then
        say "== quantize $1: there already"
    else
        say "== quantize $1"
        "$llmctl" quantize --model-dir "$2" --qformat fp8 --kv-cache-dtype fp8 \
            --calib-size "${CALIB_SIZE:-64}" --output-dir "$output/$1-fp8" --json \
            >"$reports/quantize-$1.json"
    fi
}

# engine ROLE: sets $engine to an engine of that role, from the cache where it has one.
engine() {
    set -- "$1" --config "$here/$1.yaml" --checkpoint-dir "$output/$1-fp8" --backend "$backend"
    role=$1
    shift
    key=$("$llmctl" build "$@" --cache-key)
    engine=$cache/$key
    if [ -d "$engine" ]; then # it appeared whole or not at all
        say "== build $role: $key is in the cache"
    else
        say "== build $role: $key"
        "$llmctl" build "$@" --dry-run --json >"$reports/memory-$role.json"
        "$llmctl" build "$@" --output-dir "$engine" --json >"$reports/build-$role.json"
    fi
    "$llmctl" inspect "$engine" --json >"$reports/inspect-$role.json"
}

checkpoint target "$target"
checkpoint draft "$draft"
engine target
target_engine=$engine
engine draft
draft_engine=$engine

say "== run: every output again without drafts, token by token"
"$llmctl" run --config "$here/run.yaml" --engine-dir "$target_engine" \
    --draft-engine "$draft_engine" >"$reports/run.json"

say "== bench"
"$llmctl" dataset --tokenizer "$target_engine" --output "$reports/dataset.jsonl" \
    text --config "$here/dataset.yaml" --input-file "$here/../heldout.txt"
"$llmctl" bench latency --config "$here/bench.yaml" --engine-dir "$target_engine" \
    --draft-engine "$draft_engine" --dataset "$reports/dataset.jsonl" --report "$reports/bench.html" >"$reports/bench.json"
at_least "tokens a round" "$(number "$reports/bench.json" decoding_stats acceptance_length)" \
    "${MIN_ACCEPTANCE_LENGTH:-2.0}"
speedup=$(number "$reports/bench.json" baseline speedup request_e2e_ratio median)
at_least "speed over that without drafts" "$speedup" "${MIN_SPEEDUP:-0}"
say "done: $reports"
