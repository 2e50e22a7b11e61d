"""How long an engine takes to start, cold and warm: plain, stock ngram with the same K, UNO.

    python benchmarks/startup.py --out startup.json

A Qwen3-8B shape with dummy weights and a random adapter. Every start is a process of its own.
Cold: empty caches for vLLM, Inductor and Triton, one set a method; warm: the same again (with
--work and --kinds warm, from the caches that an earlier call left there). The parts are vLLM's
own log lines, by compiled model (`backbone`, `uno_draft_...`); `start` is the time of vLLM's
`LLM(...)`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from cycle_cost import SHAPE, write_adapter, write_shape

METHODS = ("plain", "ngram", "uno")
KINDS = ("cold", "warm")
# What to take from vLLM's log, seconds and GiB.
PARTS = {
    "load": r"Model loading took .* and (?P<value>[\d.]+) seconds",
    "dynamo": r"\[(?P<tag>[^\]]+)\] Dynamo bytecode transform time: (?P<value>[\d.]+) s",
    "inductor": r"\[(?P<tag>[^\]]+)\] Compiling a graph for .* takes (?P<value>[\d.]+) s",
    "compile": r"\[(?P<tag>[^\]]+)\] torch\.compile took (?P<value>[\d.]+) s",
    "capture": r"Graph capturing finished in (?P<value>[\d.]+) secs",
    "engine": r"init engine .* took (?P<value>[\d.]+) s",
    "graphs GiB": r"CUDA graph pool memory: (?P<value>[\d.]+) GiB",
    "foreseen GiB": r"CUDA graph pool memory: .* (?P<value>[\d.]+) GiB \(estimated\)",
    "KV cache GiB": r"Available KV cache memory: (?P<value>[\d.]+) GiB",
}


def read_log(log: str) -> dict[str, float]:
    """Parts by name; those of a compiled model other than the backbone carry its kind."""
    found: dict[str, float] = {}
    for name, pattern in PARTS.items():
        for match in re.finditer(pattern, log):
            tag = match.groupdict().get("tag") or "backbone"
            key = name if tag == "backbone" else f"{name} of {tag.rpartition('_')[0] or tag}"
            found[key] = round(found.get(key, 0.0) + float(match["value"]), 2)
    return found


def start(args: argparse.Namespace) -> None:
    """One engine, in this process."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    speculative = {
        "plain": None,
        "ngram": {
            "method": "ngram_gpu",
            "num_speculative_tokens": args.block_size,
            "prompt_lookup_max": 3,
            "prompt_lookup_min": 1,
        },
        "uno": {
            "method": "uno",
            "num_speculative_tokens": args.block_size,
            "uno_lora_path": str(args.work / f"adapter-{args.layers}"),
        },
    }[args.run]
    from vllm import LLM

    settings: dict[str, Any] = {"speculative_config": speculative} if speculative else {}
    began = time.perf_counter()
    llm = LLM(
        str(args.work / f"model-{args.layers}"),
        load_format="dummy",
        skip_tokenizer_init=True,
        # As cycle_cost.py's engines, which may share a cache.
        max_model_len=5624,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=8192,
        seed=0,
        **settings,
    )
    print(f"STARTED {time.perf_counter() - began:.2f}", flush=True)
    llm.llm_engine.engine_core.shutdown()


def measure(args: argparse.Namespace, method: str, caches: Path, kind: str) -> dict[str, float]:
    command = [sys.executable, __file__, "--run", method, "--work", str(args.work)]
    command += ["--block-size", str(args.block_size), "--max-num-seqs", str(args.max_num_seqs)]
    command += ["--layers", str(args.layers)]
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": "INFO",
        "VLLM_CACHE_ROOT": str(caches / "vllm"),
        "TRITON_HOME": str(caches / "triton"),
    }
    began = time.perf_counter()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    log = done.stdout + done.stderr
    args.out.with_name(f"{args.out.stem}-{method}-{kind}.log").write_text(log)
    told = re.search(r"STARTED ([\d.]+)", log)
    if done.returncode or told is None:
        raise SystemExit(f"{method} did not start:\n{log[-6000:]}")
    return {
        "process": round(time.perf_counter() - began, 2),
        "start": float(told[1]),
        **read_log(log),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--layers", type=int, default=SHAPE["num_hidden_layers"])
    parser.add_argument("--block-size", type=int, default=8)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--out", type=Path, default=Path("startup.json"))
    parser.add_argument("--run", choices=METHODS, help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help="keep model, adapter and caches here")
    args = parser.parse_args()
    if args.run:
        start(args)
        return
    table: dict[str, dict[str, dict[str, float]]] = {}
    for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
        os.environ.pop(name, None)  # or caches would not be empty
    # Or the first start alone would read torch and vLLM from the disk.
    subprocess.run([sys.executable, "-c", "from vllm import LLM"], check=True)
    with tempfile.TemporaryDirectory() as folder:
        args.work = args.work or Path(folder)
        write_shape(args.work / f"model-{args.layers}", args.layers)
        write_adapter(args.work / f"adapter-{args.layers}", args.layers)
        for method in args.methods:
            for kind in args.kinds:
                if kind == "cold":
                    shutil.rmtree(args.work / method, ignore_errors=True)
                found = measure(args, method, args.work / method, kind)
                table.setdefault(method, {})[kind] = found
                args.out.write_text(json.dumps(table, indent=1) + "\n")
                parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in found.items())
                print(f"{method:6} {kind}: {parts}", flush=True)
    if {"plain", "uno"} <= set(table) and set(args.kinds) == set(KINDS):
        cold = table["uno"]["cold"]["start"] / table["plain"]["cold"]["start"]
        warm = table["uno"]["warm"]["start"] - table["plain"]["warm"]["start"]
        print(f"UNO over plain: cold x{cold:.2f} (target 1.5), warm {warm:+.1f} s (target +5)")


if __name__ == "__main__":
    main()
