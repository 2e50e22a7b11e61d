"""vLLM engines in this process, plain or with UNO, that tests can look into."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.platforms.cpu import CpuPlatform

GREEDY = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)

SMALL: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 512,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 512,
    "enforce_eager": True,
    # The smallest that vLLM's CPU attention takes (16 is tested on the GPU).
    "block_size": 32,
    "seed": 0,
}
if torch.cuda.is_available():  # beside other engines
    SMALL |= {"kv_cache_memory_bytes": 1 << 30, "gpu_memory_utilization": 0.05}


@contextmanager
def asynchronous() -> Iterator[None]:
    """Engines that are made meanwhile schedule as on a GPU; vLLM's CPU platform forbids it."""
    check = CpuPlatform.check_and_update_config.__func__  # type: ignore[attr-defined]

    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        scheduler = vllm_config.scheduler_config
        wanted = scheduler.async_scheduling
        check(cls, vllm_config)
        scheduler.async_scheduling = wanted
        if wanted:
            scheduler.scheduler_cls = None

    with mock.patch.object(
        CpuPlatform, "check_and_update_config", classmethod(check_and_update_config)
    ):
        yield


class Engine:
    """One in-process engine."""

    def __init__(self, model: Path, uno: dict[str, Any] | None = None, **settings: Any) -> None:
        if uno is not None:
            settings["speculative_config"] = {"method": "uno", **uno}
        self.llm = LLM(str(model), **(SMALL | settings))
        core: Any = self.llm.llm_engine.engine_core
        self.scheduler = core.engine_core.scheduler
        self.runner = core.engine_core.model_executor.driver_worker.worker.model_runner
        self.speculator = self.runner.speculator
        self.preemptions = 0
        preempt = self.scheduler._preempt_request

        def count(*args: Any, **kwargs: Any) -> Any:
            self.preemptions += 1
            return preempt(*args, **kwargs)

        self.scheduler._preempt_request = count
        # Requests that began with placeholder drafts: a cached prompt but for one token.
        self.placeholders = 0
        schedule = self.scheduler.schedule

        def watch(*args: Any, **kwargs: Any) -> Any:
            step = schedule(*args, **kwargs)
            for new in step.scheduled_new_reqs:
                drafts = step.scheduled_spec_decode_tokens.get(new.req_id, [])
                self.placeholders += -1 in drafts
            return step

        self.scheduler.schedule = watch

    def outputs(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] = GREEDY,
    ) -> list[Any]:
        """vLLM's RequestOutputs for prompts of token ids."""
        return self.llm.generate(
            [{"prompt_token_ids": list(p)} for p in prompts],
            params,  # type: ignore[arg-type]
            use_tqdm=False,
        )

    def tokens(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] = GREEDY,
    ) -> list[list[int]]:
        """The first completion's token ids, per prompt."""
        return [list(o.outputs[0].token_ids) for o in self.outputs(prompts, params)]

    def close(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()
        del self.llm, self.scheduler, self.runner, self.speculator
        gc.collect()
        cleanup_dist_env_and_memory()
        torch._dynamo.reset()


@contextmanager
def engine(model: Path, uno: dict[str, Any] | None = None, **settings: Any) -> Iterator[Engine]:
    running = Engine(model, uno, **settings)
    try:
        yield running
    finally:
        running.close()
