#!/usr/bin/env bash
# What the Serving issue must show on one GPU, in one call of some 7 minutes: engines side by side,
# then the soak alone, then a table.
# Usage: tests/gpu/serving.sh WORK [ONLY]   (vLLM, its torch and vllm-uno importable;
# ONLY: an extended regular expression of run names)
set -u
work=$1
only=${2:-.}
tests=$(cd "$(dirname "$0")/.." && pwd)
mkdir -p "$work"
engine() {
  name=$1
  shift
  [[ $name =~ $only ]] || return 0
  timeout 300 python3 "$tests/run_engine.py" --work "$work" --name "$name" --cache "$work/c-$name" \
    "$@" >"$work/$name.log" 2>&1 ||
    echo "$name FAILED: $(grep -E 'Error' "$work/$name.log" | tail -1 | cut -c1-300)"
}
# Users' adapters, as a server runs; a second plain run and stock ngram are the floor.
for name in plain plain2 ngram uno; do
  engine "users-$name" --method "${name%2}" --user-loras &
done
for name in plain plain2 uno; do
  engine "users-invariant-$name" --method "${name%2}" --user-loras --invariant \
    --backend TRITON_ATTN &
done
# What sleeps drafts well, or an adapter lost in its sleep would not be missed.
engine sleep --sleep --bundled &
engine sleep-vocab --sleep --bundled --draft-vocab &
engine sleep-fp8 --sleep --bundled --draft-fp8 &
# Compiled once: vLLM fuses quantisation into what comes before.
for method in plain ngram uno; do
  engine "online-compiled-$method" --method $method --quantised online &
done
wait
# Quantised targets, then KV caches: eager, for they start in a moment. No more than twelve at a
# time: each takes some GB of the host's memory.
for method in plain ngram uno; do
  for kind in online fp8 awq gptq; do
    engine "$kind-$method" --method $method --quantised $kind --eager &
  done
done
wait
for method in plain ngram uno; do
  engine "kv8-$method" --method $method --kv-cache-dtype fp8 --eager &
  engine "kv8-triton-$method" --method $method --kv-cache-dtype fp8 --eager \
    --backend TRITON_ATTN &
done
# Must be refused: the test looks for the reason in its log.
engine kv8-tree --kv-cache-dtype fp8 --tree 8/4/16 --eager >/dev/null &
wait
for mode in linear tree; do
  name=soak-$mode
  [[ $name =~ $only ]] || continue
  VLLM_LOGGING_LEVEL=WARNING VLLM_CACHE_ROOT=$work/c-$name timeout 580 \
    python3 "$tests/gpu/soak.py" --mode "$mode" >"$work/$name.out" 2>"$work/$name.err" ||
    tail -5 "$work/$name.err"
  grep '^soak:' -A5 "$work/$name.out"
done
python3 "$tests/gpu/serving_report.py" "$work"
