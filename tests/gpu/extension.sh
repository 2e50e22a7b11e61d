#!/usr/bin/env bash
# Build the extension with CUDA and run its GPU tests. Usage: tests/gpu/extension.sh WORK
set -eu
work=$1
root=$(cd "$(dirname "$0")/../.." && pwd)
mkdir -p "$work"
cp -r "$root" "$work/source"
SECONDS=0
VLLM_UNO_BUILD_EXT=1 python3 -m pip install -q --no-deps --no-build-isolation --target "$work/site" "$work/source"
echo "built and installed in $SECONDS s"
cd /
PYTHONPATH=$work/site:${PYTHONPATH:-} python3 -m pytest -q -p no:cacheprovider -m gpu "$work/source/tests/unit/test_lora_kernels.py"
