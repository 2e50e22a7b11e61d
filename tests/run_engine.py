"""One engine in a process of its own: plain, UNO or ngram; results as JSON.

    python tests/run_engine.py --work /tmp/h200 --name uno --method uno
    python tests/run_engine.py --work /tmp/h200 --name tree --tree 8/8/16

A process each because vLLM reads VLLM_BATCH_INVARIANT and its cache folder once.
Several may run at a time on one GPU: the KV cache has a fixed size, and nothing
is timed here.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parent))

from probes import draft_block_size, layers_without_kernels, start_recording, take_records
from quantised_models import quantise

VOCAB = 2048
# Seeded requests by set, each cycled over the prompts. Tree mode has plain's tokens. Top-p stands
# beside top-k: alone, vLLM filters it with another kernel for up to 64 rows than for more.
SEEDED: dict[str, list[dict[str, Any]]] = {
    "temperature": [
        {"temperature": 1.0},
        {"temperature": 0.6},
        {"temperature": 1.4, "top_k": 12},
        {"temperature": 1.0, "min_p": 0.2},
        {"temperature": 0.8, "logit_bias": {7: 2.0, 11: -3.0}},
        {"temperature": 1.0, "min_tokens": 30, "stop_token_ids": list(range(1, VOCAB, 97))},
    ],
    "top_k-top_p": [
        {"temperature": 1.0, "top_k": 50, "top_p": 0.9},
        {"temperature": 0.8, "top_k": 20, "top_p": 0.7},
    ],
    # Served as chains, beside trees.
    "chains": [
        {"temperature": 1.0, "repetition_penalty": 1.2},
        {"temperature": 1.0},
        {"temperature": 0.7, "frequency_penalty": 0.4, "presence_penalty": 0.3},
    ],
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="folder for models and results")
    parser.add_argument("--name", required=True, help="of the result file")
    parser.add_argument("--method", choices=("plain", "uno", "ngram"), default="uno")
    parser.add_argument("--block-size", type=int, default=8, help="B; K of ngram")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--backend", default=None, help="attention backend")
    parser.add_argument("--kv-block-size", type=int, default=16)
    parser.add_argument("--max-num-seqs", type=int, default=None)
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--invariant", action="store_true", help="VLLM_BATCH_INVARIANT=1")
    parser.add_argument("--adapter-seed", type=int, default=0)
    parser.add_argument("--bundled", action="store_true", help="the bundled model and adapter")
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--enable-lora", action="store_true")
    parser.add_argument(
        "--user-loras", action="store_true", help="two users' adapters in the batch"
    )
    parser.add_argument("--quantised", choices=("online", "fp8", "awq", "gptq"), default=None)
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--sleep", action="store_true", help="sleep and wake, levels 1 and 2")
    parser.add_argument("--draft-vocab", action="store_true", help="draft with every third token")
    parser.add_argument("--draft-fp8", action="store_true", help="uno_draft_quantization")
    parser.add_argument("--draft-context", type=int, help="uno_draft_context")
    parser.add_argument("--cache", default=None, help="VLLM_CACHE_ROOT")
    parser.add_argument("--oracle", action="store_true", help="draft logits against PEFT")
    parser.add_argument("--sampled", action="store_true", help="row-0 acceptance by parameter")
    parser.add_argument("--tree", type=sizes, help="B/K/V: tree mode")
    parser.add_argument("--seeded", action="store_true", help="seeded requests, too")
    parser.add_argument("--texts", help="name of a plain result: trees hold its tokens")
    parser.add_argument("--memory", action="store_true", help="the most that sampling holds")
    parser.add_argument("--vocab", type=int, help="another vocabulary size: dummy weights")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128)
    return parser.parse_args()


def sizes(text: str) -> tuple[int, int, int]:
    block_size, top_k, nodes = (int(x) for x in text.split("/"))
    return block_size, top_k, nodes


def start(args: argparse.Namespace) -> tuple[Any, Path, Path]:
    from vllm_uno.tiny_model import write_random_adapter, write_tiny_model

    if args.bundled:
        from vllm_uno.bundled import bundled_model

        model = bundled_model()
        adapter = model / "adapter"
    else:
        folder = args.work / f"model-{args.name}"
        # Sharper than the CPU tests' model, or bf16 would tie the best two tokens.
        model = write_tiny_model(folder, vocab_size=VOCAB, std=0.04, dtype=args.dtype)
        adapter = write_random_adapter(args.work / f"a-{args.name}", model, seed=args.adapter_seed)
    settings: dict[str, Any] = {}
    if args.vocab:
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(config | {"vocab_size": args.vocab}))
        settings |= {"load_format": "dummy", "skip_tokenizer_init": True}
    if args.method == "uno":
        settings["speculative_config"] = {
            "method": "uno",
            "num_speculative_tokens": args.block_size,
            "uno_lora_path": str(adapter),
        }
        if args.tree is not None:
            block_size, top_k, nodes = args.tree
            settings["speculative_config"] |= {
                "uno_mode": "tree",
                "uno_block_size": block_size,
                "uno_tree_top_k": top_k,
                "num_speculative_tokens": nodes,
            }
        if args.draft_fp8:
            settings["speculative_config"]["uno_draft_quantization"] = "fp8"
        settings["speculative_config"]["uno_draft_context"] = args.draft_context
        if args.draft_vocab:
            file = args.work / f"{args.name}-vocab.json"
            size = json.loads((model / "config.json").read_text())["vocab_size"]
            file.write_text(json.dumps(list(range(0, size, 3))))
            settings["speculative_config"]["uno_draft_vocab"] = str(file)
    elif args.method == "ngram":
        settings["speculative_config"] = {
            "method": "ngram_gpu",
            "num_speculative_tokens": args.block_size,
            "prompt_lookup_max": 3,
            "prompt_lookup_min": 1,
        }
    if args.tensor_parallel > 1:
        settings["tensor_parallel_size"] = args.tensor_parallel
    if args.enable_lora or args.user_loras:
        settings |= {"enable_lora": True, "max_loras": 2}
    if args.sleep:
        settings["enable_sleep_mode"] = True
    if args.kv_cache_dtype != "auto":
        settings["kv_cache_dtype"] = args.kv_cache_dtype
    served = model
    if args.quantised == "online":
        settings["quantization"] = "fp8"
    elif args.quantised is not None:
        served = quantise(model, args.work / f"q-{args.name}", args.quantised)
    if args.max_num_seqs:
        settings["max_num_seqs"] = args.max_num_seqs
    if args.backend:
        settings["attention_backend"] = args.backend
    from vllm import LLM

    began = time.perf_counter()
    llm = LLM(
        str(served),
        dtype=args.dtype,
        max_model_len=1024,
        enforce_eager=args.eager,
        # vLLM wants more memory free after sleep than before, whatever others take meanwhile.
        kv_cache_memory_bytes=(16 if args.sleep else 1) << 30,
        gpu_memory_utilization=0.05,  # only checked against what is free
        block_size=args.kv_block_size,
        seed=0,
        **settings,
    )
    print(f"{args.name}: started in {time.perf_counter() - began:.1f} s", flush=True)
    return llm, model, adapter


def parts(llm: Any) -> tuple[Any, Any]:
    core = llm.llm_engine.engine_core.engine_core
    worker = core.model_executor.driver_worker
    return core, getattr(worker, "worker", worker).model_runner


def count_graphs(runner: Any, counts: dict[str, int]) -> None:
    """Count decode steps inside and outside FULL graphs, for verify and draft."""

    def watch(manager: Any, kind: str, rows: int) -> None:
        dispatch = manager.dispatch

        def counted(num_reqs: int, num_tokens: int, uniform: Any, *a: Any, **k: Any) -> Any:
            desc = dispatch(num_reqs, num_tokens, uniform, *a, **k)
            if uniform == rows:
                key = f"{kind} {desc.cg_mode.name}"
                counts[key] = counts.get(key, 0) + 1
            return desc

        manager.dispatch = counted

    watch(runner.cudagraph_manager, "verify", runner.decode_query_len)
    if getattr(runner.speculator, "cudagraph_manager", None) is not None:
        watch(runner.speculator.cudagraph_manager, "draft", runner.speculator.block_size)


def forbid_syncs(speculator: Any) -> None:
    """Make every call in `propose` that waits for the GPU an error."""
    import torch

    propose = speculator.propose

    def guarded(*args: Any, **kwargs: Any) -> Any:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return propose(*args, **kwargs)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    speculator.propose = guarded


def right_drafts(
    args: argparse.Namespace, runner: Any, prompts: list[list[int]], kind: str
) -> AbstractContextManager[None]:
    """With --texts, trees that hold what plain emitted: a random model's drafts are seldom right,
    and only deep paths show whether attention and KV compaction are."""
    if args.texts is None:
        return nullcontext()
    from oracle_trees import oracle_trees

    plain = json.loads((args.work / f"{args.texts}.json").read_text())
    texts = plain["tokens"] if kind == "greedy" else plain["seeded"][kind]
    engine = SimpleNamespace(runner=runner, speculator=runner.speculator)
    return oracle_trees(engine, dict(zip(map(tuple, prompts), texts, strict=True)))


@contextmanager
def counted(runner: Any, result: dict[str, Any], kind: str) -> Iterator[None]:
    """result["tau"][kind]: tokens a cycle meanwhile."""
    counters = getattr(getattr(runner, "speculator", None), "counters", None)
    if counters is None:  # another method, or another process
        yield
        return
    before = counters.snapshot()
    yield
    after = counters.snapshot()
    cycles = after.cycles - before.cycles
    result.setdefault("tau", {})[kind] = (after.emitted - before.emitted) / max(1, cycles)


def greedy(
    llm: Any,
    runner: Any,
    args: argparse.Namespace,
    result: dict[str, Any],
    users: list[Any] | None = None,
) -> None:
    """The prompts; with `users` (LoRARequests or None) each for one of them in turn."""
    from prompts import make_gpu_prompts
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=args.tokens, ignore_eos=True, logprobs=2)
    texts = make_gpu_prompts(VOCAB)[: args.prompts]
    prompts = [{"prompt_token_ids": p} for p in texts]
    asked = None if users is None else [users[i % len(users)] for i in range(len(prompts))]
    with right_drafts(args, runner, texts, "greedy"):
        began = time.perf_counter()
        with counted(runner, result, "greedy"):
            outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=asked)
        result["seconds"] = time.perf_counter() - began
        result["tokens"] = [list(o.outputs[0].token_ids) for o in outputs]
        result["gaps"] = [
            [
                sorted((lp.logprob for lp in at.values()), reverse=True)[0]
                - sorted((lp.logprob for lp in at.values()), reverse=True)[1]
                for at in o.outputs[0].logprobs
            ]
            for o in outputs
        ]
        if users is not None:
            bare = llm.generate(prompts[: len(users)], params, use_tqdm=False)
            # Leading tokens that a request has in common with the base model's answer.
            result["users_agree"] = [
                next(
                    (i for i, token in enumerate(o.outputs[0].token_ids) if token != tokens[i]),
                    len(tokens),
                )
                for o, tokens in zip(bare, result["tokens"], strict=False)
            ]
        # 1 ... 64 requests at a time: every decode batch size meets its graph.
        short = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
        for n in (1, 2, 3, 5, 7, 9, 17, 30, 33, 48, 57, 64):
            if n <= len(prompts):
                llm.generate(prompts[:n], short, use_tqdm=False)


def seeded(llm: Any, runner: Any, args: argparse.Namespace, result: dict[str, Any]) -> None:
    """Every set of `SEEDED`; the seed is the prompt's number."""
    from prompts import make_gpu_prompts
    from vllm import SamplingParams

    texts = make_gpu_prompts(VOCAB)[: args.prompts]
    result["seeded"] = {}
    for name, kinds in SEEDED.items():
        params = [
            SamplingParams(**kinds[i % len(kinds)], seed=i, max_tokens=args.tokens, ignore_eos=True)
            for i in range(len(texts))
        ]
        with right_drafts(args, runner, texts, name), counted(runner, result, name):
            outputs = llm.generate([{"prompt_token_ids": p} for p in texts], params, use_tqdm=False)
        result["seeded"][name] = [list(o.outputs[0].token_ids) for o in outputs]


@contextmanager
def profiled_sampling(result: dict[str, Any]) -> Iterator[None]:
    """While open, an engine that starts says what its profile holds for sampling, in GiB."""
    import torch

    from vllm_uno import proposer

    imitate = proposer.sampling_peak

    def measured(*heads: Any, **rows: Any) -> None:
        with allocated(result, "profiled"):
            imitate(*heads, **rows)
        result["rows"] = {k: v for k, v in rows.items() if k.endswith("_rows")}

    with mock.patch.object(proposer, "sampling_peak", measured):
        yield
    if not torch.cuda.is_available():
        result["profiled"] = None


@contextmanager
def allocated(result: dict[str, Any], name: str) -> Iterator[None]:
    """result[name]: the most GiB allocated meanwhile, beyond what was before."""
    import torch

    if not torch.cuda.is_available():
        yield
        return
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    yield
    torch.cuda.synchronize()
    result[name] = (torch.cuda.max_memory_allocated() - before) / 2**30


def serve_at_most(llm: Any, args: argparse.Namespace, result: dict[str, Any]) -> None:
    """As many requests as the engine takes, with all that sampling can be asked for."""
    from prompts import make_prompts
    from vllm import SamplingParams

    requests = llm.llm_engine.vllm_config.scheduler_config.max_num_seqs
    params = SamplingParams(
        temperature=0.8,
        top_k=50,
        top_p=0.9,
        logit_bias={7: 2.0},
        logprobs=5,
        max_tokens=args.tokens,
        ignore_eos=True,
        detokenize=False,
    )
    prompts = [{"prompt_token_ids": p} for p in make_prompts(VOCAB, requests, lengths=(16,))]
    with allocated(result, "served"):
        outputs = llm.generate(prompts, params, use_tqdm=False)
    result["requests"] = sum(len(o.outputs[0].token_ids) == args.tokens for o in outputs)


def user_loras(work: Path, name: str, model: Path) -> list[Any]:
    """No adapter, and two that move the model's output well."""
    from vllm.lora.request import LoRARequest

    from vllm_uno.tiny_model import write_random_adapter

    folders = [
        write_random_adapter(work / f"user-{name}-{i}", model, seed=100 + i, strength=0.5)
        for i in (1, 2)
    ]
    return [None, *(LoRARequest(f"user-{i}", i, str(f)) for i, f in enumerate(folders, start=1))]


def wrappers(module: Any) -> list[str]:
    """Kinds of vLLM's LoRA wrappers in a model."""
    from vllm.lora.layers import BaseLayerWithLoRA

    return sorted({type(m).__name__ for m in module.modules() if isinstance(m, BaseLayerWithLoRA)})


def adapter_sums(view: Any) -> dict[str, float]:
    """Of every buffer of UNO's in the draft view, the sum of its elements' magnitudes."""
    return {
        name: float(buffer.double().abs().sum())
        for name, buffer in view.named_buffers()
        if name.rpartition(".")[2].startswith("uno_")
    }


def sleep_and_wake(llm: Any, speculator: Any, result: dict[str, Any]) -> None:
    """Tokens, acceptance and adapter before sleep and after each level's."""
    from vllm import SamplingParams

    from vllm_uno.bundled import as_chat, problems

    texts = [as_chat(problem.question) for problem in problems.generate("test", 32)]
    params = SamplingParams(temperature=0.0, max_tokens=64)

    def answer() -> dict[str, Any]:
        speculator.counters.reset()
        outputs = llm.generate(texts, params, use_tqdm=False)
        stats = speculator.counters.snapshot()
        return {
            "tokens": [list(o.outputs[0].token_ids) for o in outputs],
            "tau": stats.tokens_per_cycle,
            "acceptance": stats.acceptance,
            "adapter": adapter_sums(speculator.model),
        }

    result["sleep"] = {"before": answer()}
    llm.sleep(level=1)
    llm.wake_up()
    result["sleep"]["level 1"] = answer()
    llm.sleep(level=2)
    llm.wake_up(tags=["weights"])
    if speculator.fp8 is not None:  # what was kept of them is of the weights before
        for name, buffer in speculator.model.named_buffers():
            if name.endswith("uno_wq"):
                buffer.zero_()
    llm.collective_rpc("reload_weights")
    llm.wake_up(tags=["kv_cache"])
    llm.reset_prefix_cache()
    result["sleep"]["level 2"] = answer()


def verify_kernels(runner: Any, num_reqs: int = 8) -> list[str]:
    """Kernels of the verify graph for `num_reqs` requests, in order. Overwrites KV: comes last."""
    import torch

    manager = runner.cudagraph_manager
    rows = num_reqs * runner.decode_query_len
    desc = manager.dispatch(num_reqs, rows, runner.decode_query_len, num_active_loras=0)
    assert desc.cg_mode.name == "FULL" and desc.num_tokens == rows, desc
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        manager.run_fullgraph(desc)
        torch.cuda.synchronize()
    found = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return [e.name for e in sorted(found, key=lambda e: e.time_range.start)]


def relative_error(got: Any, want: Any) -> float:
    """Largest of the rows' ||got - want|| / ||want||."""
    return float(((got - want).norm(dim=1) / want.norm(dim=1)).max())


def oracle(llm: Any, model: Path, adapter: Path, result: dict[str, Any]) -> None:
    """Worst relative error of the engine's draft logits against transformers + PEFT in fp32."""
    import torch
    from oracle import DraftOracle
    from prompts import make_prompts
    from vllm import SamplingParams

    reference = DraftOracle(model, adapter, fp8=result["draft_fp8"])
    base = DraftOracle(model)
    block = llm.collective_rpc(draft_block_size)[0]
    result["slow_layers"] = llm.collective_rpc(layers_without_kernels)
    llm.collective_rpc(start_recording)
    worst = worst_row0 = moved = 0.0
    prompts = make_prompts(llm.llm_engine.model_config.get_vocab_size())[2:5]
    if result["draft_context"]:  # longer than what is seen of it
        prompts += make_prompts(VOCAB, 2, lengths=(150, 290), seed=1)
    for prompt in prompts:
        params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
        llm.collective_rpc(take_records)
        out = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)[0]
        ranks = llm.collective_rpc(take_records)
        records = ranks[0]
        for other in ranks[1:]:  # every rank drafts from the same rows
            same = [torch.equal(a.ids, b.ids) for a, b in zip(records, other, strict=True)]
            result["ranks_agree"] = result.get("ranks_agree", True) and all(same)
        text = prompt + list(out.outputs[0].token_ids)
        for record in records:
            context, ids = record.context, record.ids[0].tolist()
            if context[0] >= len(text) or text[context[0]] != ids[0]:
                continue  # drafted past the end of the request
            logits = record.logits[0]
            left_out = unseen(result, context[0] + block)
            result["left_out"] = max(result.get("left_out", 0), len(left_out))
            want = reference.draft_logits(text[: context[0]], ids, left_out)
            plain = base.draft_logits(text[: context[0]], ids)
            kept = logits[0].isfinite()
            result["columns"] = int(kept.sum())
            # A reduced draft head alone may leave columns out, and all rows the same.
            whole = logits.shape[1] if not result["draft_vocab"] else result["columns"]
            assert logits.isfinite().sum() == len(logits) * whole, (
                "draft logits that are no numbers"
            )
            logits, want, plain = logits[:, kept], want[:, kept], plain[:, kept]
            worst = max(worst, relative_error(logits, want))
            worst_row0 = max(worst_row0, relative_error(logits[:1], plain[:1]))
            if block > 1:
                moved = max(moved, float((want - plain)[1:].abs().max()))
            result["oracle_blocks"] = result.get("oracle_blocks", 0) + 1
    assert result.get("oracle_blocks"), "no block was compared"
    result.update(oracle_error=worst, oracle_row0=worst_row0, adapter_moves=moved)


def unseen(result: dict[str, Any], length: int) -> range:
    """Positions that draft rows leave out, by uno_draft_context's own words: all but the first KV
    block and the last ones, that the rows and so many tokens before them may begin anywhere in."""
    if not result["draft_context"]:
        return range(0)
    kv_block, block = result["kv_block_size"], result["block_size"]
    last = math.ceil((result["draft_context"] + block - 1) / kv_block) + 1
    return range(kv_block, kv_block * max(1, math.ceil(length / kv_block) - last))


def sampled(llm: Any, runner: Any, args: argparse.Namespace, result: dict[str, Any]) -> None:
    """Row-0 acceptance for each kind of sampling parameter."""
    from prompts import make_gpu_prompts
    from vllm import SamplingParams

    kinds: dict[str, dict[str, Any]] = {
        "greedy": {"temperature": 0.0},
        "temperature": {"temperature": 0.7},
        "top_k": {"top_k": 10},
        "top_p": {"top_p": 0.8},
        "both": {"top_k": 20, "top_p": 0.9},
        "min_p": {"min_p": 0.1},
        "penalties": {"repetition_penalty": 1.2, "presence_penalty": 0.5},
        "logit_bias": {"logit_bias": {5: 4.0, 9: -4.0}},
        "allowed_token_ids": {"allowed_token_ids": list(range(5, 900))},
    }
    prompts = [{"prompt_token_ids": p} for p in make_gpu_prompts(VOCAB)[: args.prompts]]
    result["row0"] = {}
    size = min(48, args.tokens)
    for name, kind in kinds.items():
        params = SamplingParams(**{"temperature": 1.0, **kind}, max_tokens=size, ignore_eos=True)
        runner.speculator.counters.reset()
        print(f"{name}: first request of its kind", flush=True)
        llm.generate(prompts, params, use_tqdm=False)
        stats = runner.speculator.counters.snapshot()
        result["row0"][name] = [*stats.acceptance, stats.tokens_per_cycle]


def main() -> None:
    args = arguments()
    alone = args.tensor_parallel == 1  # else the engine's workers are other processes
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch

    if not torch.cuda.is_available():
        os.environ["UNO_CPU_INTERPRETER"] = "1"
    if args.invariant:
        os.environ["VLLM_BATCH_INVARIANT"] = "1"
        # Inductor times variants of a reduction and keeps the fastest: two processes may choose
        # differently, and then sum in another order.
        os.environ["TORCHINDUCTOR_DETERMINISTIC"] = "1"
    if args.cache:
        os.environ["VLLM_CACHE_ROOT"] = args.cache
    args.work.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {
        "draft_vocab": args.draft_vocab,
        "draft_fp8": args.draft_fp8,
        "draft_context": args.draft_context,
        "kv_block_size": args.kv_block_size,
        "block_size": args.block_size,
    }
    with profiled_sampling(result) if args.memory else nullcontext():
        llm, model, adapter = start(args)
    counts: dict[str, int] = {}
    runner = None
    if alone:
        core, runner = parts(llm)
        result["async"] = core.vllm_config.scheduler_config.async_scheduling
        count_graphs(runner, counts)
        watched = args.method == "uno" and not args.oracle and args.texts is None
        if torch.cuda.is_available() and watched:
            forbid_syncs(runner.speculator)
    if args.oracle:
        oracle(llm, model, adapter, result)
    elif args.sampled:
        sampled(llm, runner, args, result)
    elif args.memory:
        serve_at_most(llm, args, result)
    elif args.sleep:
        sleep_and_wake(llm, runner.speculator, result)
    elif args.user_loras:
        greedy(llm, runner, args, result, user_loras(args.work, args.name, model))
        result["wrappers"] = {"target": wrappers(runner.model)}
        if args.method == "uno":
            result["wrappers"]["view"] = wrappers(runner.speculator.model)
    else:
        greedy(llm, runner, args, result)
        if args.seeded:
            seeded(llm, runner, args, result)
    result["graphs"] = dict(counts)
    plain_run = "tokens" in result and not (args.sleep or args.user_loras or args.tree)
    if counts.get("verify FULL") and plain_run:
        result["verify_kernels"] = verify_kernels(runner)
    if args.method == "uno":
        from vllm_uno.inspect_engine import draft_stats

        result["stats"] = draft_stats(llm).__dict__
    (args.work / f"{args.name}.json").write_text(json.dumps(result))
    hidden = ("tokens", "gaps", "seeded", "sleep")
    shown = {k: v for k, v in result.items() if k not in hidden}
    print(f"{args.name}: {json.dumps(shown)}", flush=True)
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
