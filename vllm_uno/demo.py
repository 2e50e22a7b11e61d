"""Plain vLLM and UNO side by side, on a CPU as on a GPU: `python -m vllm_uno.demo`.

    make demo                                                the bundled model, on the CPU
    make demo MODE=tree                                      drafts as trees; shows one of them
    python -m vllm_uno.demo --model Qwen/Qwen3-8B            a real one, on a GPU

Greedy outputs are compared token by token; the exit status is 1 where they differ. Then the same
prompts are sampled at temperature 1, to show how many drafted tokens are accepted.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import shutil
import sys
import textwrap
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from vllm_uno.vllm_hooks.cpu_interpreter import SWITCH, is_cpu_build

if TYPE_CHECKING:
    from vllm import LLM

    from vllm_uno.inspect_engine import VerifiedTree
    from vllm_uno.metrics import DraftStats

PROMPTS = ("Once upon a time", "The capital of France is", "def fibonacci(n):")
_PROBLEMS = 3  # of the bundled model, where no prompts are given
_MAX_MODEL_LEN = 1024
_SAMPLES = 2  # continuations of each prompt at temperature 1


def prepare_environment(on_cpu: bool, small: bool) -> None:
    """Set what vLLM and torch read when they are imported; what the user has set stays."""
    quiet = {
        "VLLM_LOGGING_LEVEL": "ERROR",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "TRANSFORMERS_VERBOSITY": "error",
        "VLLM_NO_USAGE_STATS": "1",
    }
    if on_cpu:
        # One process: it starts sooner.
        engine = {SWITCH: "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        if small:  # small tensors: a second thread mostly waits for the first
            engine |= {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    else:
        # A process for each engine: its GPU memory is free for the next one. Its counters are
        # read by a function sent there (see inspect_engine).
        engine = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
    for name, value in (quiet | engine).items():
        os.environ.setdefault(name, value)
    # Lanes that are masked out: the interpreter computes them all the same.
    warnings.filterwarnings(
        "ignore", category=RuntimeWarning, module=r"triton\.runtime\.interpreter"
    )


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m vllm_uno.demo", description="Plain vLLM and UNO side by side."
    )
    parser.add_argument("--model", help="folder or hub id (default: the bundled model)")
    parser.add_argument(
        "--adapter",
        metavar="PATH",
        help="UNO adapter, folder or hub id with an optional :subfolder (default: the "
        "one UNO finds for the model)",
    )
    parser.add_argument(
        "--mode",
        choices=("linear", "tree"),
        default="linear",
        help="how drafts are made and verified (default: %(default)s)",
    )
    parser.add_argument(
        "--block-size", type=int, help="B (default: 8; 16 in tree mode, with 32 nodes)"
    )
    parser.add_argument(
        "--prompts",
        nargs="+",
        metavar="TEXT",
        help="to complete; the bundled model answers them (default: some of its problems)",
    )
    parser.add_argument(
        "--max-tokens", type=int, default=128, help="per prompt (default: %(default)s)"
    )
    args = parser.parse_args(argv)
    if args.adapter and not args.model:
        parser.error("--adapter needs --model")
    if args.block_size is None:
        args.block_size = 16 if args.mode == "tree" else 8
    for option in ("block_size", "max_tokens"):
        if getattr(args, option) < 1:
            parser.error(f"--{option.replace('_', '-')} must be at least 1")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    on_cpu = is_cpu_build()
    bundled = args.model is None
    prepare_environment(on_cpu, small=bundled)
    settings: dict[str, Any] = {
        "model": args.model,
        "max_model_len": _MAX_MODEL_LEN,
        "max_num_seqs": 16,
        # Compiling takes a CPU longer than the whole demo.
        "enforce_eager": on_cpu or bundled,
        "use_tqdm_on_load": False,
    }
    tree = args.mode == "tree"
    uno: dict[str, Any] = {"method": "uno", "uno_mode": args.mode}
    uno["uno_block_size"] = args.block_size
    if args.adapter:
        uno["uno_lora_path"] = args.adapter
    prompts = args.prompts or list(PROMPTS)
    shown = prompts
    if bundled:
        from vllm_uno.bundled import as_chat, bundled_model, problems

        # In fp32: outputs are compared token by token.
        settings |= {"model": str(bundled_model()), "dtype": "float32"}
        shown = args.prompts or [p.question for p in problems.generate("test", _PROBLEMS)]
        prompts = [as_chat(text) for text in shown]
        print(
            "The bundled model has 5 million parameters and answers word problems, nothing else. "
            "This\nshows that the output is the same and how many drafts of a trained adapter are "
            "accepted, not\nany speed."
        )
    if on_cpu:
        print("On a CPU the Triton kernels run in an interpreter: it is for trying, and slow.")
    print(
        f"\nmodel {args.model or '(bundled)'}, {args.mode} mode, block size B = {args.block_size}",
        flush=True,
    )

    from vllm import SamplingParams

    greedy = SamplingParams(temperature=0, max_tokens=args.max_tokens, logprobs=2)
    sampled = SamplingParams(temperature=1, max_tokens=args.max_tokens, n=_SAMPLES, seed=0)
    with _engine("plain vLLM", settings) as llm:
        plain = _generate(llm, prompts, greedy)
    with _engine("UNO", settings | {"speculative_config": uno}) as llm:
        from vllm_uno.inspect_engine import draft_stats, verified_trees, watch_trees

        draft_stats(llm, reset=True)
        ours = _generate(llm, prompts, greedy)
        greedy_stats = draft_stats(llm, reset=True)
        _generate(llm, prompts, sampled)
        sampled_stats = draft_stats(llm)
        if tree:
            watch_trees(llm)
            _generate(llm, prompts[:1], greedy)
            trees = verified_trees(llm)
            tokenizer = llm.get_tokenizer()

    same = _show_outputs(shown, plain, ours)
    print(f"\nGreedy: {same} of {len(shown)} outputs are identical, token by token.")
    show = _show_tree_stats if tree else _show_stats
    show("Greedy (temperature 0)", greedy_stats)
    show(f"Sampled (temperature 1, {_SAMPLES} continuations of each prompt)", sampled_stats)
    if tree:
        _show_tree(trees, tokenizer)
    print(
        "\nA cycle is one draft pass and one verify pass. The first drafted token comes from the "
        "base\nmodel's own law, so it is always right; how many more are depends on the adapter."
    )
    if same == len(shown):
        return 0
    print("\nFAILED: UNO's greedy output differs from plain vLLM's.", file=sys.stderr)
    if not bundled:
        print(
            "In 16 bit two launches of plain vLLM can differ as well, where its two best tokens\n"
            "nearly tie (see the gaps above). VLLM_BATCH_INVARIANT=1 takes rounding out of it.",
            file=sys.stderr,
        )
    return 1


@contextmanager
def _engine(name: str, settings: dict[str, Any]) -> Iterator[LLM]:
    from vllm import LLM

    started = time.monotonic()
    print(f"starting {name} ...", flush=True)
    llm = LLM(**settings)
    print(f"{name} is ready after {time.monotonic() - started:.0f} s", flush=True)
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()


def _generate(llm: LLM, prompts: list[str], params: Any) -> list[Any]:
    """The first continuation of each prompt."""
    return [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]


def _show_outputs(prompts: Sequence[str], plain: Sequence[Any], ours: Sequence[Any]) -> int:
    """Print both outputs in two columns; how many are the same."""
    width = max(30, min(shutil.get_terminal_size((100, 24)).columns, 140) // 2 - 2)
    same = 0
    for prompt, one, two in zip(prompts, plain, ours, strict=True):
        left, right = list(one.token_ids), list(two.token_ids)
        print(f"\nprompt {prompt!r}\n{'plain vLLM':<{width}} | UNO\n{'-' * width}-+-{'-' * width}")
        for first, second in (
            (repr(one.text), repr(two.text)),
            (f"tokens {left}", f"tokens {right}"),
        ):
            columns = [textwrap.wrap(text, width) for text in (first, second)]
            for row in range(max(map(len, columns))):
                cells = [column[row] if row < len(column) else "" for column in columns]
                print(f"{cells[0]:<{width}} | {cells[1]}".rstrip())
        if left == right:
            same += 1
            print(f"same: yes, all {len(left)} tokens")
        else:
            print(f"same: NO, {_first_difference(one, left, right)}")
    return same


def _first_difference(plain: Any, left: list[int], right: list[int]) -> str:
    at = next(
        (i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b),
        min(len(left), len(right)),
    )
    if at == len(left):
        return f"UNO goes on after token {at}"
    best = sorted((entry.logprob for entry in plain.logprobs[at].values()), reverse=True)[:2]
    return f"from token {at} on, where plain's best two are {best[0] - best[1]:.4f} nat apart"


def _show_stats(title: str, stats: DraftStats) -> None:
    print(f"\n{title}: {stats.tokens_per_cycle:.2f} tokens per cycle ({stats.cycles} cycles)")
    print("  position  proposed  accepted  acceptance")
    rows = zip(stats.proposed, stats.accepted, stats.acceptance, strict=True)
    for position, (proposed, accepted, share) in enumerate(rows, 1):
        bar = "" if math.isnan(share) else "#" * round(20 * share)  # NaN: nothing proposed
        print(f"  {position:8}  {proposed:8}  {accepted:8}  {share:10.2f}  {bar}".rstrip())


def _show_tree_stats(title: str, stats: DraftStats) -> None:
    print(f"\n{title}: {stats.tokens_per_cycle:.2f} tokens per cycle ({stats.cycles} cycles)")
    print("     depth  nodes a cycle  accepted  share of cycles")
    rows = zip(stats.proposed_per_cycle, stats.accepted, stats.accepted_per_cycle, strict=True)
    for depth, (nodes, accepted, share) in enumerate(rows):
        bar = "" if math.isnan(share) else "#" * round(20 * share)
        print(f"  {depth:8}  {nodes:13.2f}  {accepted:8}  {share:15.2f}  {bar}".rstrip())


def _show_tree(trees: Sequence[VerifiedTree], tokenizer: Any) -> None:
    """Picture of one step's tree: the bushiest of those with the longest paths."""
    from vllm_uno.tree.picture import draw_tree

    if not trees:
        return
    deepest = max(len(tree.accepted) for tree in trees)
    # The more parents, the less of a fan or a chain.
    tree = max(
        (t for t in trees if len(t.accepted) >= deepest / 2),
        key=lambda t: sum(t.parents.count(node) > 1 for node in range(len(t.parents))),
    )
    labels = [repr(tokenizer.decode([token])) for token in tree.tokens]
    print(
        f"\nOne verify step of the first prompt: {len(tree.tokens)} nodes in one pass, "
        f"{len(tree.accepted)} accepted (*),\nthen one more token of the target's own: "
        f"{tokenizer.decode(tree.emitted[-1:])!r}\n"
    )
    for line in draw_tree(labels, tree.parents, set(tree.accepted)):
        print(f"  {line}")


if __name__ == "__main__":
    sys.exit(main())
