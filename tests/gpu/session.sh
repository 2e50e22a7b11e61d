#!/usr/bin/env bash
# The GPU acceptance of both modes in one call: engines side by side, then a table.
# Usage: tests/gpu/session.sh WORK [ONLY]   (vLLM, its torch and vllm-uno importable;
# ONLY: an extended regular expression of run names; '^(plain2?|tree.*)$' is tree mode)
set -u
work=$1
only=${2:-.}
tests=$(cd "$(dirname "$0")/.." && pwd)
mkdir -p "$work"
engine() {
  name=$1
  shift
  [[ $name =~ $only ]] || return 0
  timeout 300 python3 "$tests/run_engine.py" --work "$work" --name "$name" "$@" >"$work/$name.log" 2>&1 ||
    echo "$name FAILED: $(grep -E 'Error' "$work/$name.log" | tail -1 | cut -c1-300)"
}
tree="--tree 8/8/16"
(
  engine plain --method plain --cache "$work/c-plain"
  # Right drafts, hence deep paths: trees that hold plain's text, in graphs of every step, and of
  # the default size, whose 64 requests are more rows than graphs cover.
  engine tree-deep $tree --texts plain --cache "$work/c-tree-deep" &
  engine tree-default --tree 16/32/32 --texts plain --cache "$work/c-tree-default" &
  wait
) &
for name in plain2 uno ngram; do
  engine "$name" --method "${name%2}" --cache "$work/c-$name" &
done
engine tree $tree --cache "$work/c-tree" &
engine tree-sampled --sampled $tree --cache "$work/c-tree-sampled" &
# The floor of trees: stock drafts in as many verify rows.
engine tree-ngram --method ngram --block-size 16 --cache "$work/c-tree-ngram" &
engine tree-memory --memory --tree 16/32/32 --vocab 151936 --max-num-seqs 128 --tokens 24 \
  --cache "$work/c-tree-memory" &
(
  # Token for token, with right drafts (VLLM_BATCH_INVARIANT is refused with trees).
  export TRITON_F32_DEFAULT=ieee
  fp32="--seeded --dtype float32 --backend TRITON_ATTN --max-num-seqs 64"
  engine tree-plain-fp32 --method plain $fp32 --cache "$work/c-tree-plain-fp32"
  engine tree-fp32 $tree $fp32 --texts tree-plain-fp32 --cache "$work/c-tree-fp32" &
  engine tree-default-fp32 --tree 16/32/32 $fp32 --texts tree-plain-fp32 \
    --cache "$work/c-tree-default-fp32" &
  wait
) &
# The floor of the parity below.
engine plain2-invariant --method plain --invariant --backend TRITON_ATTN --cache "$work/c-plain2-i" &
for method in plain uno; do
  # Not FlashAttention 3: seen to part from plain by a bf16 step in 52 of 64 requests, where
  # Triton's attention parts in none (docs/decisions.md has the likely cause).
  engine "$method-invariant" --method "$method" --invariant --backend TRITON_ATTN \
    --cache "$work/c-$method-i" &
  engine "$method-eager" --method "$method" --eager --cache "$work/c-$method-e" &
done
# The kernels that add the LoRA take 16 bits only; the fp32 runs below are without them.
engine oracle-kernels --oracle --cache "$work/c-oracle-kernels" &
# FP8 weights and a part of the context.
engine oracle-fp8 --oracle --draft-fp8 --cache "$work/c-oracle-fp8" &
engine oracle-coarse --oracle --draft-fp8 --draft-context 40 --cache "$work/c-oracle-coarse" &
engine uno-coarse --draft-fp8 --draft-context 64 --cache "$work/c-uno-coarse" &
UNO_FUSED_LORA=0 engine uno-off --cache "$work/c-uno-off" &
engine sampled --sampled --cache "$work/c-sampled" &
engine lora --enable-lora --cache "$work/c-lora" &
engine kv32 --kv-block-size 32 --cache "$work/c-kv32" &
(
  # Draft logits of replayed graphs in fp32 proper, one cache folder: cold, then B=4,
  # another adapter and a warm start.
  export TRITON_F32_DEFAULT=ieee
  fp32="--oracle --dtype float32 --backend TRITON_ATTN --cache $work/c-oracle"
  engine oracle $fp32
  engine oracle-b4 $fp32 --block-size 4 &
  engine oracle-other $fp32 --adapter-seed 1 &
  engine oracle-warm $fp32 &
  wait
) &
wait
python3 "$tests/gpu/report.py" "$work"
