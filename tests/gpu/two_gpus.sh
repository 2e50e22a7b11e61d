#!/usr/bin/env bash
# What the Serving issue must show on two GPUs: tensor parallelism by processes and by Ray against
# plain vLLM on as many, data parallelism, killed workers. Then a table.
# Usage: tests/gpu/two_gpus.sh WORK   (vLLM, its torch, ray and vllm-uno importable)
set -u
work=$1
tests=$(cd "$(dirname "$0")/.." && pwd)
mkdir -p "$work"
engine() {
  name=$1
  shift
  timeout 300 python3 "$tests/run_engine.py" --work "$work" --name "$name" --cache "$work/c-$name" \
    --tensor-parallel 2 "$@" >"$work/$name.log" 2>&1 ||
    echo "$name FAILED: $(grep -E 'Error' "$work/$name.log" | tail -1 | cut -c1-300)"
}
for name in plain plain2 ngram uno; do
  engine "$name" --method "${name%2}" &
done
engine tree --tree 8/8/16 &
engine ray --ray &
# Logits of sliced adapters against PEFT; without the variable Triton's attention uses TF32.
TRITON_F32_DEFAULT=ieee engine oracle --oracle --dtype float32 --backend TRITON_ATTN &
wait
# Noise equal on both ranks, servers, killed workers: processes of their own.
for part in test_parallel.py test_ray.py; do
  timeout 500 python3 -m pytest -q -p no:cacheprovider "$tests/e2e/$part" >"$work/$part.log" 2>&1 &
done
wait
python3 "$tests/gpu/report.py" "$work" | grep -v 'no result'
tail -n 3 "$work"/test_*.log
