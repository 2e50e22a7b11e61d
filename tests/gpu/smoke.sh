#!/usr/bin/env bash
# First look on a GPU: several engines at a time, then a table. Usage: smoke.sh WORK
set -u
work=$1
here=$(dirname "$0")
mkdir -p "$work"
run() { name=$1; shift; timeout 400 python3 "$here/run_engine.py" --work "$work" --name "$name" "$@" >"$work/$name.log" 2>&1 || echo "$name FAILED"; }
run plain --method plain --cache "$work/c1" &
run plain2 --method plain --cache "$work/c2" &
run uno --method uno --cache "$work/c3" &
run ngram --method ngram --cache "$work/c4" &
run plain-inv --method plain --invariant --cache "$work/c5" &
run uno-inv --method uno --invariant --cache "$work/c6" &
run uno-eager --method uno --eager --cache "$work/c7" &
run plain-eager --method plain --eager --cache "$work/c8" &
run uno-oracle --method uno --dtype float32 --backend TRITON_ATTN --oracle --cache "$work/c9" &
wait
for f in "$work"/*.log; do echo "== $f"; grep -E "started in|UNO|JIT|jit|Error|error|WARNING.*uno|Graph capturing|FAILED|: \{" "$f" | cut -c1-420 | tail -14; done
python3 - "$work" "$here" <<'PY'
import sys; sys.path.insert(0, sys.argv[2])
from pathlib import Path
from compare import compare
w = Path(sys.argv[1])
for a, b in [("plain","plain2"),("plain","uno"),("plain","ngram"),("plain-inv","uno-inv"),("plain-eager","uno-eager")]:
    try: print(a, "vs", b, compare(w/f"{a}.json", w/f"{b}.json"))
    except Exception as e: print(a, b, "no result:", e)
PY
