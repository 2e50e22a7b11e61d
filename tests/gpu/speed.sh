#!/usr/bin/env bash
# What the speed issue measures, on one idle GPU; vLLM and its torch importable, this tree installed
# with the extension (VLLM_UNO_BUILD_EXT=1 pip install --no-build-isolation .). In this order:
#   tests/gpu/speed.sh ops WORK       the operators' tests; linear layers alone; 3 minutes
#   tests/gpu/speed.sh cycle WORK     C_B at 1 and 64 requests; 6 minutes
#   tests/gpu/speed.sh startup WORK   cold and warm starts; 8 minutes
#   tests/gpu/speed.sh sanitize WORK  compute-sanitizer on the operators' tests
set -u
what=$1
work=$2
root=$(cd "$(dirname "$0")/../.." && pwd)
export HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1 VLLM_CACHE_ROOT=$work/cache
mkdir -p "$work"
cd "$work" || exit 1 # not the source tree: the installed package has the extension
case $what in
ops)
  python3 -m pytest -q -x -p no:cacheprovider -m gpu "$root/tests/unit/test_lora_kernels.py" \
    2>&1 | tail -15
  # Marked for no GPU, and compiled where there is one.
  python3 -m pytest -q -x -p no:cacheprovider "$root/tests/unit/test_draft_law.py" 2>&1 | tail -5
  python3 "$root/benchmarks/linear_kernels.py" --out "$work/linear_kernels.json"
  ;;
cycle)
  python3 "$root/benchmarks/cycle_cost.py" --requests 1 8 64 \
    --context 128 4600 --settings 8 4 --out "$work/cycle_cost.json" 2>&1 | grep -v '^INFO\|it/s'
  ;;
startup)
  python3 "$root/benchmarks/startup.py" --out "$work/startup.json"
  ;;
sanitize)
  for tool in memcheck racecheck; do
    compute-sanitizer --tool $tool --error-exitcode 9 python3 -m pytest -q -x -p no:cacheprovider \
      -m gpu "$root/tests/unit/test_lora_kernels.py" -k oracle 2>&1 | tail -5
  done
  ;;
esac
