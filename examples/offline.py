"""UNO through vLLM's `LLM` class: one setting more than a plain engine.

python examples/offline.py                                  a tiny random model, on a CPU
python examples/offline.py --model Qwen/Qwen3-8B            a real one, on a GPU
python examples/offline.py --model ./my-model --adapter ./my-adapter --block-size 4
"""

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

from vllm_uno.vllm_hooks.cpu_interpreter import is_cpu_build

ON_CPU = is_cpu_build()
if ON_CPU:
    # Before vLLM is imported: run its GPU kernels in Triton's interpreter, for trying only.
    os.environ.setdefault("UNO_CPU_INTERPRETER", "1")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="folder or hub id (default: a tiny random model)")
    parser.add_argument("--adapter", help="UNO adapter (default: the one UNO finds for the model)")
    parser.add_argument("--block-size", type=int, default=8, help="B (default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("prompts", nargs="*", default=["Hello, my name is", "The sky is"])
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if args.model is None:
            args.model, args.adapter = tiny_model(Path(folder))
        run(args)


def tiny_model(folder: Path) -> tuple[str, str]:
    """A random model and a random adapter: what it says makes no sense."""
    from vllm_uno.tiny_model import write_random_adapter, write_tiny_model

    model = write_tiny_model(folder / "model")
    return str(model), str(write_random_adapter(folder / "adapter", model))


def run(args: argparse.Namespace) -> None:
    from vllm import LLM, SamplingParams

    # {"method": "uno"} alone is enough where the model has a published adapter.
    speculative: dict[str, Any] = {"method": "uno", "num_speculative_tokens": args.block_size}
    if args.adapter:
        speculative["uno_lora_path"] = args.adapter
    llm = LLM(
        args.model,
        speculative_config=speculative,
        max_model_len=1024,
        max_num_seqs=16,
        enforce_eager=ON_CPU,  # compiling takes a CPU longer than these few tokens
    )
    params = SamplingParams(temperature=args.temperature, max_tokens=args.max_tokens)
    try:
        for output in llm.generate(args.prompts, params):
            tokens = output.outputs[0].token_ids
            print(f"{output.prompt!r} -> {output.outputs[0].text!r} ({len(tokens)} tokens)")
    finally:
        # vLLM's own clean-up at exit may come too late: a TemporaryDirectory made before vLLM was
        # imported turns the order of Python's exit handlers, and exit waits for the engine.
        llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":  # vLLM starts processes that import this file again
    main()
