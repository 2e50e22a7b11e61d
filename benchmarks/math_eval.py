"""Maths problems through any model, plain vLLM against UNO: accuracy, tokens per pass, speed.

    python benchmarks/math_eval.py prepare --set gsm8k --out gsm8k.jsonl
    python benchmarks/math_eval.py run --model Qwen/Qwen3-8B --problems gsm8k.jsonl \\
        --block-size 8 --concurrency 16 --max-tokens 2048 --thinking off --out results/gsm8k-B8

`prepare` writes {"id", "problem", "answer"} a line; `run` takes any such file. Problems whose id
does not begin with "bundled/" are asked for a \\boxed{} answer and graded by math-verify
(pip install '.[eval]'). `run` may be broken off and called again: it goes on where it was
(see runner.py for the files), and its speeds are of all calls together.

`--tree-top-k` K or `--nodes` V turns tree mode on. tau, TPF and acceptance leave out the last two
cycles of each request, which matters where answers take less than some 20 cycles (runner.figures).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from runner import (
    Job,
    Problem,
    Sampling,
    Setup,
    UsageError,
    bundled_problems,
    check,
    figures,
    print_table,
    read_problems,
    run,
    show,
    uno_config,
    write_problems,
)

# Hub id, configuration, split; then the columns of the problem and of the answer.
PUBLIC = {
    "gsm8k": ("openai/gsm8k", "main", "test", "question", "answer"),
    "math500": ("HuggingFaceH4/MATH-500", None, "test", "problem", "answer"),
    "aime25": ("math-ai/aime25", None, "test", "problem", "answer"),
}


def prepare(name: str, count: int | None) -> list[Problem]:
    """The first `count` problems (default: all; 500 of the bundled ones) of a set.

    Raises:
        UsageError: the data set cannot be had here.

    """
    if name == "bundled":
        return bundled_problems(500 if count is None else count)
    hub_id, config, split, question, answer = PUBLIC[name]
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise UsageError(
            f"--set {name} needs the package datasets: pip install datasets"
        ) from error
    try:
        rows = load_dataset(hub_id, config, split=split)
        problems = [
            # GSM8K's answer is the worked solution; the number stands at its end.
            Problem(f"{name}/{n}", row[question], str(row[answer]).rsplit("####", 1)[-1].strip())
            for n, row in enumerate(rows)
        ]
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(
            f"--set {name}: cannot load the data set {hub_id} (configuration "
            f"{config or 'default'}, split {split}; columns {question}, {answer}): {error}. Call "
            "this command where the hub can be reached and copy its file here, or make the file "
            'yourself: {"id": ..., "problem": ..., "answer": ...} a line'
        ) from error
    return problems[:count]


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    prepare_ = commands.add_parser("prepare", help="write a file of problems")
    prepare_.add_argument("--set", choices=(*PUBLIC, "bundled"), required=True)
    prepare_.add_argument("--out", type=Path, required=True, metavar="F.jsonl")
    prepare_.add_argument(
        "--count", type=int, help="the first N only (default: all; 500 of the bundled ones)"
    )

    run_ = commands.add_parser("run", help="ask a model")
    run_.add_argument("--model", required=True, help="folder or hub id")
    run_.add_argument("--problems", type=Path, required=True, metavar="F.jsonl")
    run_.add_argument("--out", type=Path, required=True, metavar="DIR")
    run_.add_argument("--adapter", help="UNO adapter (default: the one UNO finds)")
    run_.add_argument("--block-size", type=int, help="B (default: UNO's)")
    run_.add_argument("--tree-top-k", type=int, help="K, candidates per position of a tree")
    run_.add_argument("--nodes", type=int, help="V, nodes of a tree")
    run_.add_argument(
        "--uno",
        type=json.loads,
        default={},
        metavar="JSON",
        help='more of UNO\'s settings, such as {"uno_draft_quantization": "fp8"}',
    )
    run_.add_argument(
        "--concurrency", type=int, default=16, help="requests at a time (default: %(default)s)"
    )
    run_.add_argument("--temperature", type=float, default=0.0)
    run_.add_argument("--top-k", type=int, default=0, help="0: all (default)")
    run_.add_argument("--top-p", type=float, default=1.0)
    run_.add_argument("--seed", type=int, default=0)
    run_.add_argument("--max-tokens", type=int, default=2048, help="default: %(default)s")
    run_.add_argument(
        "--samples-per-problem", type=int, default=1, metavar="K", help="avg@K (default: 1)"
    )
    run_.add_argument(
        "--thinking", choices=("on", "off"), help="enable_thinking of the chat template"
    )
    run_.add_argument(
        "--engine",
        type=json.loads,
        default={},
        metavar="JSON",
        help='more settings of vLLM\'s LLM, such as {"tensor_parallel_size": 2}',
    )
    only = run_.add_mutually_exclusive_group()
    only.add_argument("--plain-only", action="store_true", help="without UNO")
    only.add_argument("--no-plain", action="store_true", help="UNO alone, compared with nothing")
    args = parser.parse_args(argv)
    if args.command == "run" and args.concurrency < 1:
        run_.error("--concurrency must be at least 1")
    return args


def evaluate(args: argparse.Namespace) -> dict[str, Any]:
    """Run what is left to run; the report by "plain" and "uno", with "ratio" where both are there.

    The report is also written to report.json.
    """
    sampling = Sampling(
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        seed=args.seed,
        samples=args.samples_per_problem,
    )
    plain = Setup(
        model=args.model,
        concurrency=args.concurrency,
        thinking=None if args.thinking is None else args.thinking == "on",
        engine=args.engine,
    )
    setups = {}
    if not args.no_plain:
        setups["plain"] = plain
    if not args.plain_only:
        config = uno_config(args.adapter, args.block_size, args.tree_top_k, args.nodes) | args.uno
        setups["uno"] = dataclasses.replace(plain, uno=config)
    problems = read_problems(args.problems)
    jobs = {name: Job(args.out / f"{name}.jsonl", problems, sampling) for name in setups}
    for name, setup in setups.items():
        check(setup, jobs[name])  # before an engine has worked for nothing

    outcomes = {name: run(setup, [jobs[name]], name)[0] for name, setup in setups.items()}
    report: dict[str, Any] = {name: figures(outcome) for name, outcome in outcomes.items()}
    if "uno" in report:
        report["uno"]["speculative_config"] = setups["uno"].uno
    if len(report) == 2:
        report["ratio"] = {
            key: report["uno"][key] / report["plain"][key]
            for key in ("tokens_per_s", "tokens_per_s_per_request")
            if report["uno"][key] and report["plain"][key]
        }
    (args.out / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    return report


def print_report(report: dict[str, Any]) -> None:
    names = [name for name in ("plain", "uno") if name in report]
    rows = [["", *names]]
    rows.append(["requests", *(str(report[n]["requests"]) for n in names)])
    lines = [
        ("accuracy", "accuracy", 4),
        ("  standard error", "accuracy_error", 4),
        ("ended by themselves", "stopped", 3),
        ("tokens per answer", "mean_tokens", 1),
        ("tau, tokens per cycle", "tau", 3),
        ("TPF, tokens per pass", "tpf", 3),
        ("tok/s", "tokens_per_s", 1),
        ("tok/s per request", "tokens_per_s_per_request", 1),
    ]
    for label, key, digits in lines:
        rows.append([label, *(show(report[n][key], digits) for n in names)])
    print_table(rows)
    for key, label in (
        ("tokens_per_s", "tok/s"),
        ("tokens_per_s_per_request", "tok/s per request"),
    ):
        if key in report.get("ratio", {}):
            print(f"UNO / plain, {label}: {report['ratio'][key]:.3f}")
    if "uno" in report:
        shares = " ".join(show(a) for a in report["uno"]["acceptance"] or [])
        tree = report["uno"]["speculative_config"].get("uno_mode") == "tree"
        where = "depth of the tree" if tree else "position"
        print(f"cycles that accepted a draft, by {where}: {shares or '-'}")
        print("(tau, TPF and these leave out the last two cycles of each request)")


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    try:
        if args.command == "prepare":
            problems = prepare(args.set, args.count)
            write_problems(args.out, problems)
            print(f"{args.out}: {len(problems)} problems")
        else:
            print_report(evaluate(args))
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
