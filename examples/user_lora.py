"""Users' LoRA adapters beside UNO: two of them and the base model, in one batch, on a GPU.

    python examples/user_lora.py                              a tiny random model and adapters
    python examples/user_lora.py --model Qwen/Qwen3-8B --user sql=./my-sql --user chat=./my-chat

Every request is answered by its own adapter exactly as by plain `--enable-lora`: that is what the
verify pass runs. Drafts are made by the base model with UNO's adapter and know nothing of the
users': they only approximate, so such requests have fewer tokens per cycle, the more the further
an adapter moves the model. The last line shows how many.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from vllm_uno.vllm_hooks.cpu_interpreter import is_cpu_build

# Before the engine starts: UNO's counters are read by a function sent to its workers.
os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="folder or hub id (default: a tiny random model)")
    parser.add_argument("--adapter", help="UNO adapter (default: the one UNO finds for the model)")
    parser.add_argument("--user", action="append", metavar="NAME=PATH", help="a user's adapter")
    parser.add_argument("--block-size", type=int, default=8, help="B (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("prompt", nargs="?", default="Hello, my name is")
    args = parser.parse_args()
    if is_cpu_build():
        sys.exit("This needs a GPU: on a CPU vLLM's LoRA crashes with any speculative method.")
    with tempfile.TemporaryDirectory() as folder:
        if args.model is None:
            from vllm_uno.tiny_model import write_random_adapter, write_tiny_model

            args.model = str(write_tiny_model(Path(folder, "model"), dtype="bfloat16"))
            args.adapter = str(write_random_adapter(Path(folder, "uno"), args.model))
            args.user = [
                f"{name}={write_random_adapter(Path(folder, name), args.model, seed=seed)}"
                for seed, name in enumerate(("first", "second"), start=1)
            ]
        run(args)


def run(args: argparse.Namespace) -> None:
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    from vllm_uno.inspect_engine import draft_stats

    # {"method": "uno"} alone is enough where the model has a published adapter.
    speculative: dict[str, Any] = {"method": "uno", "num_speculative_tokens": args.block_size}
    if args.adapter:
        speculative["uno_lora_path"] = args.adapter
    users = [user.split("=", 1) for user in args.user or []]
    llm = LLM(
        args.model,
        speculative_config=speculative,
        enable_lora=True,
        max_loras=max(1, len(users)),
        max_lora_rank=64,
        max_model_len=1024,
        max_num_seqs=16,
    )
    loras = [LoRARequest(name, i, path) for i, (name, path) in enumerate(users, start=1)]
    asked: list[LoRARequest | None] = [None, *loras]
    params = SamplingParams(temperature=0.0, max_tokens=args.max_tokens)
    try:
        # One batch: each request with the adapter of its place in the list.
        outputs = llm.generate([args.prompt] * len(asked), params, lora_request=asked)
        for lora, output in zip(asked, outputs, strict=True):
            who = "base model" if lora is None else lora.lora_name
            print(f"{who}: {args.prompt!r} -> {output.outputs[0].text!r}")
        print(f"{draft_stats(llm).tokens_per_cycle:.2f} tokens per cycle")
    finally:
        llm.llm_engine.engine_core.shutdown()  # see examples/offline.py


if __name__ == "__main__":  # vLLM starts processes that import this file again
    main()
