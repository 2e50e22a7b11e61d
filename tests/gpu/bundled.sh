#!/usr/bin/env bash
# What the bundled model must show on a GPU (vLLM is needed by the last part alone):
#   tests/gpu/bundled.sh train WORK     the adapter again, and both adapters offline: 5 minutes
#   tests/gpu/bundled.sh fixed WORK     base model and adapter on fixed wording: 5 minutes
#   tests/gpu/bundled.sh ablation WORK  four adapters at a time: 3 minutes
#   tests/gpu/bundled.sh engine WORK    quality and math_eval in vLLM, offline figures, the bound of
#                                       the text, draft logits
# Results are left in WORK; the last lines of each are printed, then check_bundled.py's table of all
# that lies in WORK. The exit status is 1 where a command or a line of the table failed.
# Not here: benchmarks/lm_eval_run.py. The GPU machine has no lm-eval; tests/e2e/test_math_eval.py
# runs it on a CPU.
set -u
what=$1
work=$2
root=$(cd "$(dirname "$0")/../.." && pwd)
cd "$root"
export PYTHONPATH=$root:${PYTHONPATH:-} HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
mkdir -p "$work"
model=$root/vllm_uno/bundled/model
recipe=examples/bundled_model/train_adapter.py
failed=0
pids=()
start() { # NAME COMMAND...: beside others
  name=$1
  shift
  (
    VLLM_CACHE_ROOT=$work/cache-$name "$@" >"$work/$name.log" 2>&1
    status=$?
    echo "== $name: exit $status, $SECONDS s"
    tr '\r' '\n' <"$work/$name.log" | grep -v 'step/s\|it/s\|Warning\|INFO' | tail -25
    exit $status
  ) &
  pids+=($!)
}
finish() {
  for pid in "${pids[@]}"; do
    wait "$pid" || failed=1
  done
}
prompts() { # the problems of quality.py
  python3 -c "import pathlib; from vllm_uno.bundled import problems as p; \
p.write_records(pathlib.Path('$work/test.jsonl'), 'test', 500)" || failed=1
}
acceptance() { # NAME ADAPTER FLAGS...: without an engine
  python3 -m vllm_uno.cli eval-adapter --model "$model" --adapter "$2" --data "$work/test.jsonl" \
    --samples 500 --batch_size 256 --output "$work/$1" "${@:3}"
}
retrain() {
  python3 $recipe --model "$model" --output "$work/adapter" --seed 0 &&
    acceptance retrained "$work/adapter" --temperatures 1 --block_sizes 8 16
}
case $what in
train)
  prompts
  start retrain retrain
  start shipped acceptance shipped "$model/adapter" --temperatures 1 --block_sizes 8 16
  finish
  ;;
fixed)
  start fixed python3 benchmarks/fixed_wording.py --out "$work/fixed"
  finish
  ;;
ablation)
  start ablation python3 benchmarks/adapter_ablation.py --out "$work/ablation" --steps 400 --jobs 4 \
    --rows "TV + 0.05 KL, rank 64" "TV alone, rank 64" "KL alone, rank 64" "TV + 0.05 KL, rank 16"
  finish
  ;;
engine)
  # Side by side: none may take the GPU's memory for itself.
  share='{"kv_cache_memory_bytes": 4294967296, "gpu_memory_utilization": 0.05}'
  prompts
  python3 benchmarks/math_eval.py prepare --set bundled --count 1000 --out "$work/problems.jsonl" ||
    failed=1
  start quality python3 benchmarks/quality.py --block-sizes 8,16 --count 500 --concurrency 64 \
    --engine "$share" --out "$work/quality"
  for temperature in 0 1; do
    start "math-$temperature" python3 benchmarks/math_eval.py run --model "$model" \
      --problems "$work/problems.jsonl" --block-size 8 --concurrency 64 --max-tokens 256 \
      --temperature $temperature --engine "$share" --out "$work/math-$temperature"
  done
  start offline acceptance offline "$model/adapter" --block_sizes 2 4 8 16
  start bound python3 benchmarks/drafting_bound.py --source model --model "$model" --problems 40 \
    --blocks 8 --out "$work/bound.json"
  # Without it Triton's attention multiplies in TF32.
  TRITON_F32_DEFAULT=ieee start oracle python3 tests/run_engine.py --bundled --oracle \
    --dtype float32 --backend TRITON_ATTN --work "$work/oracle" --name oracle
  finish
  ;;
*)
  echo "no part $what: train, fixed, ablation or engine" >&2
  exit 2
  ;;
esac
python3 tests/gpu/check_bundled.py "$work" || failed=1
exit $failed
