"""Many requests of mixed parameters through one engine with UNO: nothing may be left behind.

    python tests/gpu/soak.py                      30,000 requests, in at most 480 s, on a GPU
    python tests/gpu/soak.py --requests 200       fewer; on a CPU as well (a minute)
    python tests/gpu/soak.py --mode tree          trees

A 2-layer random model, in this process, so that the scheduler's KV blocks and the allocator's
memory can be read when the engine is idle: after the first tenth of the requests, and at the end.
Prints one line and exits with 0 if every request ended as its parameters allow, within the time,
some of them preempted, with all KV blocks free and no more GPU memory than after the first tenth.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import re
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

VOCAB = 2048
BLOCK_SIZE = 4  # B
MODES: dict[str, dict[str, Any]] = {
    "linear": {"num_speculative_tokens": BLOCK_SIZE},
    "tree": {"num_speculative_tokens": 8, "uno_tree_top_k": 4, "uno_block_size": BLOCK_SIZE},
}
MAX_MODEL_LEN = 256
LONGEST_PROMPT = 100
SCHEMA = {
    "type": "object",
    "properties": {"left": {"type": "integer", "minimum": 0, "maximum": 999}},
    "required": ["left"],
    "additionalProperties": False,
}
GRAMMARS = (
    {"json": SCHEMA},
    {"regex": r"[A-Z][a-z]{2,5} has [0-9]{1,3} left\."},
    {"choice": ["nuts", "nails"]},
)
# MiB by which memory may differ between two idle moments: the last step's tensors are still held,
# and what the allocator holds beside them is of segments that are not empty.
FLAT = {"allocated": 1.0, "reserved": 64.0}


@dataclass
class Soak:
    """Requests under way and what became of them."""

    llm: Any
    seed: int
    size: int = 0  # of the batch
    asked: dict[str, Any] = field(default_factory=dict)  # SamplingParams of requests under way
    to_abort: dict[str, int] = field(default_factory=dict)  # step at which a request is aborted
    ends: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    steps: int = 0
    wrong: list[str] = field(default_factory=list)

    def run(self, first: int, last: int, deadline: float) -> None:
        """Requests first ... last-1, to the end of all of them."""
        engine = self.llm.llm_engine
        coming = iter(range(first, last))
        more = True
        while more or self.asked:
            while more and len(self.asked) < 2 * self.size:
                number = next(coming, None)
                more = number is not None
                if number is not None:
                    self._add(number)
            for name in [n for n, step in self.to_abort.items() if step <= self.steps]:
                engine.abort_request([name])  # no output tells of its end
                del self.to_abort[name], self.asked[name]
                self.ends["abort"] += 1
            for output in engine.step():
                if output.finished:
                    self._finished(output)
            self.steps += 1
            if time.monotonic() > deadline:
                self.wrong.append(f"out of time with {len(self.asked)} requests under way")
                return
        while engine.has_unfinished_requests():  # steps scheduled ahead of the last end
            engine.step()

    def _add(self, number: int) -> None:
        rng = random.Random(f"{self.seed} {number}")
        prompt = [rng.randrange(1, VOCAB) for _ in range(rng.randrange(1, LONGEST_PROMPT))]
        params = random_params(rng)
        name = str(number)
        self.asked[name] = params
        if rng.random() < 0.05:
            self.to_abort[name] = self.steps + rng.randrange(12)
        self.llm.llm_engine.add_request(
            name, {"prompt_token_ids": prompt}, params, priority=rng.randrange(3)
        )

    def _finished(self, output: Any) -> None:
        params = self.asked.pop(output.request_id)
        limit = params.max_tokens
        self.to_abort.pop(output.request_id, None)
        for completion in output.outputs:
            reason, count = completion.finish_reason, len(completion.token_ids)
            self.ends[str(reason)] += 1
            self.tokens += count
            lawful = {"length": count == limit, "stop": 0 < count <= limit}
            good = lawful.get(reason, False)
            if reason == "stop" and not params.stop:
                good = good and keeps_to(params.structured_outputs, completion.text)
            if not good:
                self.wrong.append(
                    f"request {output.request_id}: {count} tokens, {reason}: {completion.text!r}, "
                    f"{params}"
                )


def keeps_to(grammar: Any, text: str) -> bool:
    """Whether a whole answer is what its grammar, one of `GRAMMARS` or none, allows."""
    if grammar is None:
        return True
    if grammar.regex:
        return re.fullmatch(grammar.regex, text) is not None
    if not grammar.json:  # a choice: vLLM has made a grammar of it
        return text in ("nuts", "nails")
    try:
        found = json.loads(text)
    except ValueError:
        return False
    return isinstance(found, dict) and list(found) == ["left"] and 0 <= found["left"] <= 999


def random_params(rng: random.Random) -> Any:
    """SamplingParams of any kind."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    kind: dict[str, Any] = {"max_tokens": rng.choice([1, 2, 3, 5, 8, 16, 24, 40])}
    if rng.random() < 0.4:
        kind["temperature"] = 0.0
    else:
        kind |= {
            "temperature": rng.choice([0.3, 0.8, 1.0, 1.6]),
            "top_p": rng.choice([1.0, 1.0, 0.9, 0.5]),
            "top_k": rng.choice([0, 0, 1, 5, 50]),
            "min_p": rng.choice([0.0, 0.0, 0.05, 0.3]),
            "seed": rng.choice([None, rng.randrange(1000)]),
        }
    for name, values in (
        ("presence_penalty", (-0.5, 0.7)),
        ("frequency_penalty", (-0.2, 0.9)),
        ("repetition_penalty", (1.1, 1.4)),
        ("logit_bias", ({300: 3.0, 17: -5.0}, {400: -100.0})),
        ("stop_token_ids", (list(range(4, 40)),)),
        ("stop", (["a"], ["the", "\n"])),
        ("bad_words", (["so"], [" now", "Then"])),
        ("allowed_token_ids", (list(range(3, 900, 2)),)),
        ("ignore_eos", (True,)),
        ("min_tokens", (1,)),
        ("logprobs", (0, 1, 5)),
        ("prompt_logprobs", (1,)),
    ):
        if rng.random() < 0.12:
            kind[name] = rng.choice(values)
    # Not where others forbid, or stop at, what a grammar needs: vLLM ends such a request in error.
    others = {"allowed_token_ids", "bad_words", "logit_bias", "stop_token_ids"}
    if rng.random() < 0.05 and not kind.keys() & others:
        kind["structured_outputs"] = StructuredOutputsParams(**rng.choice(GRAMMARS))
        kind.pop("ignore_eos", None)
    return SamplingParams(**kind)


def memory() -> dict[str, float]:
    """MiB of the GPU that this process's allocator holds, idle."""
    import torch

    if not torch.cuda.is_available():
        return dict.fromkeys(FLAT, 0.0)
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    stats = torch.cuda.memory_stats()
    return {name: stats[f"{name}_bytes.all.current"] / 2**20 for name in ("allocated", "reserved")}


def start(folder: Path, size: int, gpu: bool, mode: str) -> Any:
    from vllm import LLM

    from vllm_uno.tiny_model import write_random_adapter, write_tiny_model

    model = write_tiny_model(folder / "model", dtype="bfloat16" if gpu else "float32")
    adapter = write_random_adapter(folder / "adapter", model)
    kv_block = 16 if gpu else 32
    return LLM(
        str(model),
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=size,
        max_num_batched_tokens=8192 if gpu else 512,
        block_size=kv_block,
        # Room for fewer than `size` requests of some 60 tokens, so that some are preempted.
        num_gpu_blocks_override=max(size * 40, 2 * MAX_MODEL_LEN) // kv_block,
        enforce_eager=not gpu,
        **({"kv_cache_memory_bytes": 1 << 30, "gpu_memory_utilization": 0.05} if gpu else {}),
        scheduling_policy="priority",
        structured_outputs_config={"backend": "xgrammar", "disable_any_whitespace": True},
        speculative_config={
            "method": "uno",
            "uno_lora_path": str(adapter),
            **MODES[mode],
        },
        seed=0,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=30_000)
    parser.add_argument("--limit-s", type=float, default=480)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mode", choices=MODES, default="linear")
    args = parser.parse_args()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch

    gpu = torch.cuda.is_available()
    if not gpu:
        os.environ["UNO_CPU_INTERPRETER"] = "1"
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    size = 256 if gpu else 8
    with tempfile.TemporaryDirectory() as folder:
        llm = start(Path(folder), size, gpu, args.mode)
        try:
            line, good = soak(llm, args, size)
        finally:
            llm.llm_engine.engine_core.shutdown()
    print(line, flush=True)
    return 0 if good else 1


def soak(llm: Any, args: argparse.Namespace, size: int) -> tuple[str, bool]:
    core = llm.llm_engine.engine_core.engine_core
    pool = core.scheduler.kv_cache_manager.block_pool
    runner = core.model_executor.driver_worker.worker.model_runner
    preempted = 0
    preempt = core.scheduler._preempt_request

    def counted(*a: Any, **k: Any) -> Any:
        nonlocal preempted
        preempted += 1
        return preempt(*a, **k)

    core.scheduler._preempt_request = counted
    blocks = pool.get_num_free_blocks()
    began = time.monotonic()
    run = Soak(llm, args.seed, size)
    tenth = args.requests // 10
    run.run(0, tenth, began + args.limit_s)
    before = memory()
    if not run.wrong:
        run.run(tenth, args.requests, began + args.limit_s)
    seconds, after = time.monotonic() - began, memory()
    free, stats = pool.get_num_free_blocks(), runner.speculator.counters.snapshot()
    flat = all(after[name] - before[name] <= FLAT[name] for name in FLAT)
    done = sum(run.ends.values())
    good = not run.wrong and done == args.requests and free == blocks and flat
    good = good and stats.cycles > 0 and preempted > 0
    ends = " ".join(f"{reason} {count}" for reason, count in sorted(run.ends.items()))
    shown = ", ".join(f"{name} {before[name]:.1f} -> {after[name]:.1f}" for name in before)
    line = (
        f"soak: {done} of {args.requests} requests ({ends}), {run.tokens} tokens, "
        f"{seconds:.0f} s of {args.limit_s:.0f}, {run.steps} steps, {preempted} preemptions, "
        f"tau {stats.tokens_per_cycle:.2f}, free blocks {free} of {blocks}, MiB {shown}: "
        f"{'good' if good else 'BAD'}"
    )
    return line + "".join(f"\n  {text}" for text in run.wrong[:5]), good


if __name__ == "__main__":
    sys.exit(main())
