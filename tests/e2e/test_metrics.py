"""What Prometheus shows is what the engine counted: in one process, and over three."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from engines import engine
from prompts import make_prompts
from vllm import SamplingParams

PROMPTS = make_prompts(2048)
PARAMS = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True, seed=1)
LABELS = {"model_name": "tiny", "engine": "0"}


def shown(name: str, **labels: str) -> float | None:
    """Of the registry that vLLM's /metrics serves."""
    from vllm.v1.metrics.prometheus import get_prometheus_registry

    found: float | None = get_prometheus_registry().get_sample_value(name, {**LABELS, **labels})
    return found


def as_shown(block_size: int) -> dict[str, Any]:
    def by_position(name: str) -> list[float | None]:
        return [shown(name, position=str(i)) for i in range(block_size)]

    return {
        "cycles": shown("vllm_uno:cycles_total"),
        "emitted": shown("vllm_uno:emitted_tokens_total"),
        "proposed": by_position("vllm_uno:proposed_tokens_total"),
        "accepted": by_position("vllm_uno:accepted_tokens_total"),
    }


def test_one_process(model: Path, adapter: Path) -> None:
    uno = {"uno_lora_path": str(adapter), "num_speculative_tokens": 4}
    with engine(model, uno, disable_log_stats=False, served_model_name="tiny") as e:
        passes = 0
        forward = e.speculator._forward

        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal passes
            passes += 1
            return forward(*args, **kwargs)

        e.speculator._forward = counted
        e.tokens(PROMPTS, PARAMS)
        stats = e.speculator.counters.snapshot()
        assert stats.cycles > 0 and 1.5 < stats.tokens_per_cycle < 5
        assert as_shown(4) == {
            "cycles": stats.cycles,
            "emitted": stats.emitted,
            "proposed": list(stats.proposed),
            "accepted": list(stats.accepted),
        }
        # No graphs on a CPU. Every draft pass follows a verify pass.
        assert shown("vllm_uno:steps_total", **{"pass": "draft", "graph": "none"}) == passes > 0
        assert shown("vllm_uno:steps_total", **{"pass": "verify", "graph": "none"}) == passes
        assert shown("vllm_uno:steps_total", **{"pass": "draft", "graph": "full"}) == 0
        for one in ("draft", "verify"):
            seconds = shown("vllm_uno:timed_seconds_total", **{"pass": one})
            assert seconds is not None and seconds > 0
        assert shown("vllm_uno:draft_width") == 4


OVER_PROCESSES = """
import json, logging, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])

def main():
    from vllm import LLM
    import test_metrics as t
    from vllm_uno.inspect_engine import draft_stats
    from vllm_uno import stat_logger
    lines = []
    stat_logger.logger = type("L", (), {"info": lambda self, text, *a: lines.append(text % a)})()
    llm = LLM(
        sys.argv[2], served_model_name="tiny", dtype="float32", max_model_len=512,
        max_num_seqs=8, max_num_batched_tokens=512, enforce_eager=True, block_size=32,
        disable_log_stats=False, distributed_executor_backend="mp",
        speculative_config={"method": "uno", "uno_lora_path": sys.argv[3],
                            "num_speculative_tokens": 4},
    )
    llm.generate([{"prompt_token_ids": p} for p in t.PROMPTS], t.PARAMS, use_tqdm=False)
    stats = draft_stats(llm)
    llm.llm_engine.do_log_stats()
    print("RESULT", json.dumps({
        "shown": t.as_shown(4),
        "counted": {"cycles": stats.cycles, "emitted": stats.emitted,
                    "proposed": list(stats.proposed), "accepted": list(stats.accepted)},
        "lines": lines,
    }))

if __name__ == "__main__":
    main()
"""


@pytest.mark.slow
def test_three_processes(model: Path, adapter: Path, tmp_path: Path) -> None:
    """Worker, engine and front-end each in its own, as a server has them."""
    script = tmp_path / "over_processes.py"  # spawned processes import it anew
    script.write_text(OVER_PROCESSES)
    here = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, str(script), str(here), str(model), str(adapter)],
        env={
            **os.environ,
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
            "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
            "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
            "PYTHONPATH": os.pathsep.join([*sys.path, str(here.parent)]),
        },
        capture_output=True,
        text=True,
        timeout=300,
    )
    found = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert found, done.stdout[-2000:] + done.stderr[-4000:]
    result = json.loads(found[0].removeprefix("RESULT "))
    assert result["counted"]["cycles"] > 0
    assert result["shown"] == result["counted"]
    assert len(result["lines"]) >= 1
    assert result["lines"][0].startswith("Engine 000: UNO: tau "), result["lines"]


def test_plain_engines_have_none_of_it(model: Path) -> None:
    with engine(model, disable_log_stats=False, served_model_name="plain") as e:
        e.tokens(PROMPTS[:2], PARAMS)
        names = {type(one).__name__ for one in e.llm.llm_engine.logger_manager.stat_loggers}
        assert "UnoStatLogger" not in names


@pytest.mark.slow
def test_trees_count_by_depth(model: Path, adapter: Path) -> None:
    uno = {
        "uno_lora_path": str(adapter),
        "num_speculative_tokens": 6,
        "uno_tree_top_k": 4,
        "uno_block_size": 4,
    }
    with engine(model, uno, disable_log_stats=False, served_model_name="tiny") as e:
        e.tokens(PROMPTS[:3], PARAMS)
        stats = e.speculator.counters.snapshot()
        assert as_shown(4) == {
            "cycles": stats.cycles,
            "emitted": stats.emitted,
            "proposed": list(stats.proposed),
            "accepted": list(stats.accepted),
        }
        assert shown("vllm_uno:draft_width") == 6
