"""Two tensor-parallel workers on Ray: UNO drafts on both, the output is plain vLLM's.

    pip install ray
    python examples/ray_tp.py                                 the bundled model, on two GPUs
    python examples/ray_tp.py --model Qwen/Qwen3-8B           another one

Each line shows a prompt, the answer and its length; the last one how many tokens a cycle of one
draft pass and one verify pass gave. Several machines need nothing more than a Ray cluster that
this script finds (`ray start --head`, then `ray start --address=...` on the others) with vllm-uno
installed on each: vLLM's plugins are loaded in every worker.
"""

import argparse
import os
from typing import Any

# Before the engine starts: UNO's counters are read by a function sent to its workers.
os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="folder or hub id (default: the bundled model)")
    parser.add_argument("--adapter", help="UNO adapter (default: the one UNO finds for the model)")
    parser.add_argument("--block-size", type=int, default=8, help="B (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("prompts", nargs="*", help="(default: three word problems)")
    args = parser.parse_args()
    if args.model is None:
        from vllm_uno.bundled import as_chat, bundled_model, problems

        args.model = str(bundled_model())
        args.prompts = args.prompts or [
            as_chat(problem.question) for problem in problems.generate("test", 3)
        ]
    run(args)


def run(args: argparse.Namespace) -> None:
    from vllm import LLM, SamplingParams

    from vllm_uno.inspect_engine import draft_stats

    # {"method": "uno"} alone is enough where the model has a published adapter.
    speculative: dict[str, Any] = {"method": "uno", "num_speculative_tokens": args.block_size}
    if args.adapter:
        speculative["uno_lora_path"] = args.adapter
    llm = LLM(
        args.model,
        tensor_parallel_size=2,
        distributed_executor_backend="ray",
        speculative_config=speculative,
        max_model_len=1024,
        max_num_seqs=16,
    )
    params = SamplingParams(temperature=0.0, max_tokens=args.max_tokens)
    try:
        for output in llm.generate(args.prompts or ["Hello, my name is"], params):
            tokens = output.outputs[0].token_ids
            print(f"{output.prompt!r} -> {output.outputs[0].text!r} ({len(tokens)} tokens)")
        stats = draft_stats(llm)
        accepted = " ".join(f"{share:.2f}" for share in stats.acceptance)
        print(f"{stats.tokens_per_cycle:.2f} tokens per cycle; accepted by position: {accepted}")
    finally:
        llm.llm_engine.engine_core.shutdown()  # see examples/offline.py


if __name__ == "__main__":  # vLLM starts processes that import this file again
    main()
