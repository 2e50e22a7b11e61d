"""lm-eval against a server, plain and with UNO, on the held-out problems of the bundled model.

    python benchmarks/lm_eval_run.py --out lm-eval                     the bundled model
    python benchmarks/lm_eval_run.py --model M --adapter A --out lm-eval

For each of plain and UNO: starts vLLM's server, runs `lm_eval --model local-completions` on it
(the task is lm_eval_tasks/uno_bundled; chat template and tokenizer come from the model's folder),
stops the server. Prints the figures and writes lm_eval.json. Needs pip install '.[eval]' from the
repository's folder, and no network.

lm-eval's own `vllm` backend, without a server, works with vLLM's CUDA build only: it asks for a
distribution named vllm, which the CPU build is not. There it is

    lm_eval --model vllm --tasks uno_bundled --include_path benchmarks/lm_eval_tasks \\
        --metadata '{"problems": "F.jsonl"}' --apply_chat_template --batch_size auto \\
        --model_args '{"pretrained": "M", "speculative_config": {"method": "uno"}}'

with F.jsonl from: python -m vllm_uno.bundled.problems --split test --count 500 --out F.jsonl
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from runner import UsageError, default_model, uno_config

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from serve_client import ON_CPU, counter, server

TASKS = Path(__file__).resolve().parent / "lm_eval_tasks"
TASK = "uno_bundled"


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="folder (default: the bundled model)")
    parser.add_argument("--adapter", help="UNO adapter (default: the one UNO finds)")
    parser.add_argument("--block-size", type=int, help="B (default: UNO's)")
    parser.add_argument("--count", type=int, default=200, help="problems (default: %(default)s)")
    parser.add_argument("--num-concurrent", type=int, default=8, help="default: %(default)s")
    parser.add_argument("--max-tokens", type=int, default=256, help="default: %(default)s")
    parser.add_argument("--timeout", type=float, default=600, help="seconds for a server's start")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    if args.model is None:
        try:
            args.model = default_model()
        except UsageError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
    args.out.mkdir(parents=True, exist_ok=True)
    problems = args.out / "problems.jsonl"
    subprocess.run(
        [sys.executable, "-m", "vllm_uno.bundled.problems", "--split", "test"]
        + ["--count", str(args.count), "--out", str(problems)],
        check=True,
    )
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    options = ["--max-num-seqs", str(args.num_concurrent)]
    if ON_CPU:
        # As in examples/serve_client.py: Triton's interpreter, and nothing compiled.
        environment.setdefault("UNO_CPU_INTERPRETER", "1")
        environment.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        options.append("--enforce-eager")
    uno = json.dumps(uno_config(args.adapter, args.block_size))
    found = {}
    for name, more in (("plain", []), ("uno", ["--speculative-config", uno])):
        log = args.out / f"{name}-server.log"
        with server(args.model, options + more, environment, log, args.timeout) as url:
            found[name] = lm_eval(args, url, problems, args.out / name, environment)
            if name == "uno":
                drafts = counter(url, "vllm:spec_decode_num_drafts_total")
                accepted = counter(url, "vllm:spec_decode_num_accepted_tokens_total")
    (args.out / "lm_eval.json").write_text(json.dumps(found, indent=1) + "\n")
    for name, value in found.items():
        print(f"{name:6} exact_match {value['exact_match,stated']:.4f}"
              f" +- {value['exact_match_stderr,stated']:.4f}")  # fmt: skip
    # vLLM's own counters, placeholder drafts included: they show that UNO was at work.
    print(f"UNO drafted {drafts} times, {accepted} of those tokens were accepted")
    return 0


def lm_eval(
    args: argparse.Namespace, url: str, problems: Path, out: Path, environment: dict[str, str]
) -> dict[str, Any]:
    """The task's figures, as lm-eval names them ("exact_match,stated")."""
    model_args = {
        "model": args.model,
        "tokenizer": args.model,
        "tokenizer_backend": "huggingface",
        "base_url": f"{url}/v1/completions",
        "num_concurrent": args.num_concurrent,
        "max_retries": 1,
    }
    command = [sys.executable, "-m", "lm_eval", "run", "--model", "local-completions"]
    command += ["--model_args", json.dumps(model_args), "--apply_chat_template"]
    command += ["--tasks", TASK, "--include_path", str(TASKS)]
    command += ["--metadata", json.dumps({"problems": str(problems)})]
    command += ["--gen_kwargs", json.dumps({"max_gen_toks": args.max_tokens})]
    command += ["--output_path", str(out), "--log_samples"]
    # The server is on this machine, whatever proxy the environment names.
    subprocess.run(command, check=True, env={**environment, "NO_PROXY": "127.0.0.1"})
    newest = max(out.rglob("results_*.json"), key=lambda file: file.stat().st_mtime)
    results: dict[str, Any] = json.loads(newest.read_text())["results"][TASK]
    return results


if __name__ == "__main__":
    sys.exit(main())
