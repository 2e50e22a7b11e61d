"""What a UNO cycle costs in plain decode steps: C_B, on a Qwen3-8B shape.

    python benchmarks/cycle_cost.py --out cycle_cost.json
    python benchmarks/cycle_cost.py --settings 8 16/32/32 --requests 1 8 32 --context 4600

A setting is B, or B/K/V in tree mode, with +fp8 and +CONTEXT for drafts that are made with FP8
weights and a part of the context (8+fp8+1024): what these cost in acceptance is not in the figures
here; math_eval.py measures that, on weights. Dummy weights, a random adapter (rank 128, all
projections) and imposed acceptance: the figures say what a cycle costs, not what text it writes.
Plain vLLM and UNO run in the same call, each in a process of its own; every figure is a ratio
between the two. With --side-by-side they start together, where the GPU has room for all, and then
take turns, row by row.

    C_B = time of a cycle / time of a plain decode step, at equal requests and context

The host is more than a step ahead of the GPU, so time is taken between CUDA events, in the GPU's
own order of work: by the host's clock a measurement would begin with steps that it does not count.

Then, for each row, where a cycle's time goes: spans between CUDA events around verification's
forward, its sampling, the draft's forward and its sampling (waiting included), and the share of
time in which no kernel runs, by the profiler.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import IO, Any

from runner import uno_config

SHAPE: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 4096,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    "attention_bias": False,
    "use_sliding_window": False,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "dtype": "bfloat16",
}
RANK = 128
PAPER_TAU = {"4": 3.89, "8": 4.94, "16": 5.42, "16/32/32": 5.97}  # T = 1
MEASURED_STEPS, PROFILED_STEPS = 48, 8
# Not counted: where a profile begins, the GPU has nothing queued and waits for every launch.
STEPS_AHEAD = 4
STEP_MARK = "_post_update_kernel"  # vLLM's; once a step


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64, 128])
    parser.add_argument("--context", type=int, nargs="+", default=[128, 4600])
    parser.add_argument("--settings", nargs="+", default=["8"], metavar="B[/K/V][+fp8][+CONTEXT]")
    parser.add_argument("--max-num-seqs", type=int, help="of the engines (default: most requests)")
    parser.add_argument("--work", type=Path, help="keep the model here: the next start is warm")
    parser.add_argument("--layers", type=int, default=SHAPE["num_hidden_layers"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("cycle_cost.json"))
    parser.add_argument("--eager", action="store_true", help="for a try on a small machine")
    parser.add_argument("--side-by-side", action="store_true", help="start all engines at once")
    parser.add_argument("--wait-for", type=Path, help="begin to measure when this file exists")
    parser.add_argument("--engines", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--run", choices=("plain", "uno"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.max_num_seqs and args.max_num_seqs < max(args.requests):
        parser.error("--max-num-seqs is less than the largest of --requests")
    return args


def uno_settings(setting: str) -> dict[str, Any]:
    """vLLM's speculative_config of "B", or of "B/K/V" for trees, with +fp8 and +CONTEXT."""
    sizes, *drafts = setting.split("+")
    config = uno_config(None, *(int(n) for n in sizes.split("/")))
    for draft in drafts:
        if draft == "fp8":
            config["uno_draft_quantization"] = draft
        else:
            config["uno_draft_context"] = int(draft)
    return config


def file_name(kind: str, setting: str) -> str:
    return f"{kind}-{setting.replace('/', '-')}"


def write_shape(folder: Path, layers: int) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**SHAPE, "num_hidden_layers": layers}))
    return folder


def write_adapter(folder: Path, layers: int) -> Path:
    """Unless an earlier call has: the last file that it writes is there."""
    last = folder / "uno_config.json"
    if last.exists():
        return folder
    import torch
    from safetensors.torch import save_file

    hidden, inner = SHAPE["hidden_size"], SHAPE["intermediate_size"]
    q = SHAPE["num_attention_heads"] * SHAPE["head_dim"]
    kv = SHAPE["num_key_value_heads"] * SHAPE["head_dim"]
    linears = {
        "self_attn.q_proj": (q, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, q),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for layer in range(layers):
        for name, (rows, columns) in linears.items():
            key = f"base_model.model.model.layers.{layer}.{name}"
            for part, shape in (("lora_A", (RANK, columns)), ("lora_B", (rows, RANK))):
                weight = torch.empty(shape, dtype=torch.bfloat16)
                tensors[f"{key}.{part}.weight"] = weight.uniform_(-0.01, 0.01, generator=generator)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, str(folder / "adapter_model.safetensors"))
    config = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": RANK * 16,
        "target_modules": sorted({name.split(".")[1] for name in linears}),
        "bias": "none",
        "base_model_name_or_path": "qwen3-8b-shape",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    last.write_text(json.dumps({"noise_low": 1, "mask_token_id": 151669}))
    return folder


def measure(args: argparse.Namespace) -> None:
    """One engine: seconds per decode step (plain) or per cycle (UNO), by requests and context."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams

    model = write_shape(args.work / f"model-{args.layers}", args.layers)
    settings: dict[str, Any] = {}
    setting = args.settings[0]
    if args.run == "uno":
        settings["speculative_config"] = {
            **uno_settings(setting),
            "uno_lora_path": str(args.work / f"adapter-{args.layers}"),
            "rejection_sample_method": "synthetic",
            "synthetic_acceptance_length": PAPER_TAU.get(setting.split("+")[0], 5.0),
        }
    if args.engines:
        # No engine may take the memory for itself, nor be misled by what another takes meanwhile.
        tokens = max(r * (c + 512) for r in args.requests for c in args.context)
        heads = SHAPE["num_key_value_heads"] * SHAPE["head_dim"]
        settings["kv_cache_memory_bytes"] = tokens * args.layers * heads * 2 * 2
        settings["gpu_memory_utilization"] = 0.05
    began = time.perf_counter()
    llm = LLM(
        str(model),
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=max(args.context) + 1024,
        max_num_seqs=args.max_num_seqs or max(args.requests),
        max_num_batched_tokens=8192,
        enable_prefix_caching=False,
        enforce_eager=args.eager,
        seed=0,
        **settings,
    )
    result: dict[str, Any] = {"start_s": time.perf_counter() - began, "rows": []}
    core = llm.llm_engine.engine_core.engine_core
    worker = core.model_executor.driver_worker
    runner = getattr(worker, "worker", worker).model_runner
    speculator = runner.speculator
    engine = llm.llm_engine
    serial = 0
    wait_for_all(args)
    for context in args.context:
        for requests in args.requests:
            if requests * (context + 1024) > 1_200_000:
                continue
            turn = take_turn(args.work) if args.engines else None
            times = []
            stages: dict[str, float] = {}
            kernels: dict[str, list[float]] = {}
            gaps: dict[str, list[float]] = {}
            for repeat in range(args.repeats + 1):
                params = SamplingParams(temperature=1.0, max_tokens=900, ignore_eos=True)
                ids = [f"b{serial + i}" for i in range(requests)]
                serial += requests
                for i, name in enumerate(ids):
                    tokens = [(7 * i + j) % 150000 + 1 for j in range(context)]
                    engine.add_request(name, {"prompt_token_ids": tokens}, params)
                seen: set[str] = set()
                while len(seen) < requests:  # prefill everything first
                    seen |= {o.request_id for o in engine.step() if o.outputs[0].token_ids}
                for _ in range(8):
                    engine.step()
                if repeat == args.repeats:
                    stages, kernels, gaps = measure_stages(engine, runner)
                else:
                    if speculator is not None:
                        speculator.counters.reset()
                    begin, steps = moment(), float(MEASURED_STEPS)
                    for _ in range(MEASURED_STEPS):
                        engine.step()
                    end = moment()
                    if speculator is not None:
                        steps = speculator.counters.snapshot().cycles / requests
                    times.append(seconds(begin, end) / steps)
                engine.abort_request(ids)
                while engine.has_unfinished_requests():
                    engine.step()
            row = {
                "requests": requests,
                "context": context,
                "ms": [1e3 * t for t in sorted(times)],
                "stages": stages,
            }
            if speculator is not None:
                row["tau"] = speculator.counters.snapshot().tokens_per_cycle
            result["rows"].append(row)
            print(args.run, setting, row, flush=True)
            row |= {"kernels": kernels, "gaps": gaps}
            if turn is not None:
                turn.close()
    args.out.write_text(json.dumps(result))


def wait_for_all(args: argparse.Namespace) -> None:
    """Until every engine has started, and nothing else runs."""
    (args.work / file_name(f"started-{args.run}", args.settings[0])).touch()
    while len(list(args.work.glob("started-*"))) < args.engines:
        time.sleep(0.2)
    while args.wait_for is not None and not args.wait_for.exists():
        time.sleep(0.2)


def take_turn(folder: Path) -> IO[bytes]:
    """The GPU to oneself, until what is returned is closed."""
    turn = (folder / "turn").open("wb")
    fcntl.flock(turn, fcntl.LOCK_EX)
    return turn


def moment() -> Any:
    """When the GPU has done what it was given so far; without one, now."""
    import torch

    if not torch.cuda.is_available():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds(begin: Any, end: Any) -> float:
    """Between two moments; waits for the second."""
    if isinstance(begin, float):
        return float(end - begin)
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def measure_stages(
    engine: Any, runner: Any, steps: int = 24
) -> tuple[dict[str, float], dict[str, list[float]], dict[str, list[float]]]:
    """Median milliseconds of each stage of a step, with the share of time without a kernel; the
    kernels that take longest; where no kernel runs for longest."""
    import statistics

    import torch

    if not torch.cuda.is_available():  # a try on a small machine
        return {}, {}, {}
    spans: dict[str, list[tuple[Any, Any]]] = {}
    undo = []

    def watch(owner: Any, name: str, stage: str) -> None:
        inner = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = moment()
            out = inner(*args, **kwargs)
            spans.setdefault(stage, []).append((begin, moment()))
            return out

        setattr(owner, name, timed)
        undo.append(lambda: setattr(owner, name, inner))

    watch(runner, "execute_model", "verify")
    watch(runner, "sample_tokens", "sample and draft")
    if runner.speculator is not None:
        watch(runner.speculator, "propose", "draft")
        watch(runner.speculator, "_sample", "draft sampling")
        if runner.speculator.sampling_graphs is not None:
            watch(runner.speculator.sampling_graphs, "run_fullgraph", "draft sampling")
        if runner.speculator.cudagraph_manager is not None:
            watch(runner.speculator.cudagraph_manager, "run_fullgraph", "draft forward")
    for _ in range(steps):
        engine.step()
    torch.cuda.synchronize()
    for restore in undo:
        restore()
    found = {
        stage: 1e3 * statistics.median(seconds(begin, end) for begin, end in pairs)
        for stage, pairs in spans.items()
    }
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(STEPS_AHEAD + PROFILED_STEPS):
            engine.step()
        torch.cuda.synchronize()
    events = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    try:
        kernels = last_steps(events, PROFILED_STEPS)
    except ValueError as error:  # no reason to lose the row
        print(error, flush=True)
        kernels = []
    found["idle share"] = idle_share([(e.time_range.start, e.time_range.end) for e in kernels])
    return found, time_by_kernel(kernels, PROFILED_STEPS), gaps_by_place(kernels, PROFILED_STEPS)


def last_steps(events: list[Any], steps: int) -> list[Any]:
    """The kernels of the last whole steps, each counted from one mark to the next.

    Raises:
        ValueError: there are not so many steps.
    """
    marks = sorted(e.time_range.start for e in events if STEP_MARK in e.name)
    if len(marks) <= steps:
        raise ValueError(f"the profile has {len(marks)} of {STEP_MARK}, for {steps} steps")
    return [e for e in events if marks[-steps - 1] <= e.time_range.start < marks[-1]]


def time_by_kernel(events: list[Any], steps: int, most: int = 40) -> dict[str, list[float]]:
    """Of the kernels that take longest: milliseconds and launches a step, by name."""
    spans = ((e.name[:120], e.time_range.end - e.time_range.start) for e in events)
    return longest(spans, steps, most)


def gaps_by_place(events: list[Any], steps: int, most: int = 15) -> dict[str, list[float]]:
    """Of the places where no kernel runs: milliseconds and times a step, by "after > before"."""

    def gaps() -> Iterator[tuple[str, float]]:
        last = None
        for event in sorted(events, key=lambda e: e.time_range.start):
            if last is not None and event.time_range.start > last.time_range.end:
                place = f"{last.name[:60]} > {event.name[:60]}"
                yield place, event.time_range.start - last.time_range.end
            if last is None or event.time_range.end > last.time_range.end:
                last = event

    return longest(gaps(), steps, most)


def longest(spans: Iterable[tuple[str, float]], steps: int, most: int) -> dict[str, list[float]]:
    """Names and microseconds -> milliseconds and times a step, of the names that take longest."""
    totals: dict[str, list[float]] = {}
    for name, microseconds in spans:
        total = totals.setdefault(name, [0.0, 0.0])
        total[0] += microseconds / 1e3 / steps
        total[1] += 1 / steps
    return dict(sorted(totals.items(), key=lambda item: -item[1][0])[:most])


def idle_share(intervals: list[tuple[float, float]]) -> float:
    """Part of the time between the first start and the last end that no interval covers."""
    if not intervals:
        return float("nan")
    intervals = sorted(intervals)
    begin, reached = intervals[0][0], intervals[0][0]
    idle = 0.0
    for start, end in intervals:
        idle += max(0.0, start - reached)
        reached = max(reached, end)
    return idle / max(reached - begin, 1e-9)


def main() -> None:
    args = arguments()
    if args.run:
        measure(args)
        return
    with nullcontext(args.work) if args.work else tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        for old in work.glob("started-*"):
            old.unlink()
        write_adapter(work / f"adapter-{args.layers}", args.layers)
        runs: dict[str, Any] = {}
        # Plain vLLM reads the first setting for its name alone.
        engines = [("plain", args.settings[0]), *(("uno", setting) for setting in args.settings)]
        started: list[subprocess.Popen[bytes]] = []
        for kind, setting in engines:
            out = work / file_name(kind, setting)
            command = [sys.executable, __file__, "--run", kind, "--work", str(work)]
            command += ["--out", str(out)]
            command += ["--settings", setting, "--layers", str(args.layers)]
            command += ["--repeats", str(args.repeats), "--requests", *map(str, args.requests)]
            command += ["--context", *map(str, args.context)]
            if args.max_num_seqs:
                command += ["--max-num-seqs", str(args.max_num_seqs)]
            command += ["--eager"] if args.eager else []
            command += ["--wait-for", str(args.wait_for)] if args.wait_for is not None else []
            command += ["--engines", str(len(engines))] if args.side_by_side else []
            started.append(subprocess.Popen(command))
            if not args.side_by_side:
                wait(started)
        wait(started)
        for kind, setting in engines:
            name = kind if kind == "plain" else f"{kind} {setting}"
            runs[name] = json.loads((work / file_name(kind, setting)).read_text())
    plain = {(r["requests"], r["context"]): r["ms"] for r in runs["plain"]["rows"]}
    table = []
    print("dummy weights, imposed acceptance; medians of ms")
    print(" setting  requests  context    plain    cycle   C_B   gain  stages")
    for setting in args.settings:
        for row in runs[f"uno {setting}"]["rows"]:
            key = (row["requests"], row["context"])
            step, cycle = (ms[len(ms) // 2] for ms in (plain[key], row["ms"]))
            cost = cycle / step
            gain = PAPER_TAU.get(setting.split("+")[0], float("nan")) / cost
            table.append(
                {
                    "setting": setting,
                    "requests": key[0],
                    "context": key[1],
                    "plain_ms": step,
                    "cycle_ms": cycle,
                    "C_B": cost,
                    "gain_at_paper_tau": gain,
                    "stages": row["stages"],
                    "weights": "dummy",
                    "acceptance": "imposed",
                }
            )
            stages = ", ".join(f"{k} {v:.2f}" for k, v in row["stages"].items())
            print(
                f"{setting:>8} {key[0]:9} {key[1]:8} {step:8.2f} {cycle:8.2f} {cost:5.2f} "
                f"{gain:6.2f}  {stages}"
            )
    for name, run in runs.items():
        print(f"{name}: started in {run['start_s']:.0f} s")
    plot(table, args.out.with_suffix(".png"))
    args.out.write_text(json.dumps({"table": table, "runs": runs}, indent=1))


def wait(processes: list[subprocess.Popen[bytes]]) -> None:
    """Until all have ended; one that fails ends the others."""
    while any(process.poll() is None for process in processes):
        if any(process.poll() for process in processes):
            for process in processes:
                process.terminate()
        time.sleep(0.2)
    if any(process.returncode for process in processes):
        raise SystemExit("an engine failed")


def plot(table: list[dict[str, Any]], out: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(7, 4), constrained_layout=True)
    for setting, context in sorted({(r["setting"], r["context"]) for r in table}):
        rows = [r for r in table if (r["setting"], r["context"]) == (setting, context)]
        axis.plot(
            [r["requests"] for r in rows],
            [r["C_B"] for r in rows],
            marker="o",
            label=f"{setting}, context {context}",
        )
    axis.set(
        xlabel="requests",
        ylabel="cycle / plain decode step",
        xscale="log",
        title="dummy weights, imposed acceptance",
    )
    axis.legend()
    figure.savefig(out, dpi=120)


if __name__ == "__main__":
    main()
