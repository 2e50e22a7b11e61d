"""Settings of `vllm-uno train`: one field, one flag."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

from vllm_uno.train.losses import LossWeights


def option(default: Any, help: str) -> Any:
    """A field with a default, and the text that `--help` shows."""
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata={"help": help})
    return field(default=default, metadata={"help": help})


# What may change when a run is resumed without changing its result.
_FREE_ON_RESUME = frozenset(
    {"output", "resume", "save_every", "eval_every", "log_every", "stop_after"}
)


@dataclass
class TrainSettings:
    """Trains a UNO adapter for a causal language model, which itself stays as it is.

    The defaults are the released 8B recipe's where it is known (arXiv 2609.04010): rank 128 on all
    projections, scale 16, learning rate 1e-5, blocks 2 to 16. Small models and short runs take
    other ones: docs/training.md.
    """

    model: str = field(metadata={"help": "base model: local folder or hub id"})
    data: str = field(
        metadata={"help": "JSONL with `text` or chat `messages`, or a dataset: name[:config]"}
    )
    output: str = field(metadata={"help": "folder for the adapter; must be new or empty"})
    revision: str | None = option(None, "revision of the base model on the hub")
    data_split: str = option("train", "split of a datasets name")
    heldout: str | None = option(None, "JSONL to measure on; none: taken from the end of `data`")
    heldout_samples: int = option(64, "samples to measure acceptance on")
    context: int = option(4096, "tokens of a packed row; no sample may be longer")
    block_sizes: list[int] = option([2, 4, 6, 8, 12, 16], "curriculum, equal shares of the steps")
    steps: int = option(1000, "optimizer steps in all")
    batch_size: int = option(128, "rows of a step, over all processes")
    micro_batch_size: int = option(1, "rows of one forward pass of one process")
    targets: list[str] = option(
        ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        "names of the linear layers that get an adapter",
    )
    rank: int = option(128, "rank of the adapter")
    scale: float = option(16.0, "alpha / rank")
    lr: float = option(1e-5, "learning rate")
    warmup_steps: int = option(100, "steps of linear warm-up")
    schedule: str = option("constant", "after the warm-up: constant or cosine (to zero)")
    max_grad_norm: float = option(1.0, "gradients are clipped to this norm")
    loss_tv: float = option(1.0, "weight of total variation")
    loss_ce: float = option(0.0, "weight of the cross entropy with the text")
    loss_kl: float = option(0.0, "weight of KL(base || draft)")
    noise_low: int = option(1, "lowest noise id")
    mask_token_id: int | None = option(
        None, "noise ids lie below it; none: the tokenizer's mask token, else its size"
    )
    dtype: str = option("bfloat16", "of the base model and the products: bfloat16 or float32")
    attention: str = option("auto", "flex or sdpa; auto: flex on a GPU")
    gradient_checkpointing: bool = option(False, "less memory, a third more time")
    seed: int = option(0, "of noise, blocks, order and initial weights")
    save_every: int = option(500, "steps between checkpoints")
    eval_every: int = option(250, "steps between measurements on held-out text")
    log_every: int = option(10, "steps between lines of log.jsonl")
    resume: bool = option(False, "go on from the last checkpoint in `output`")
    stop_after: int | None = option(None, "stop at this step, with a checkpoint to resume from")

    def __post_init__(self) -> None:
        problems = []
        for name in (
            *("context", "steps", "batch_size", "micro_batch_size", "rank", "heldout_samples"),
            *("save_every", "eval_every", "log_every"),
        ):
            if getattr(self, name) < 1:
                problems.append(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.stop_after is not None and self.stop_after < 1:
            problems.append(f"stop_after must be at least 1, not {self.stop_after}")
        for name in ("warmup_steps", "noise_low"):
            if getattr(self, name) < 0:
                problems.append(f"{name} must not be negative, not {getattr(self, name)}")
        if self.warmup_steps > self.steps:
            problems.append(f"warmup_steps ({self.warmup_steps}) must not be more than steps")
        if not 0 <= self.seed < 1 << 32:
            problems.append(f"seed must be from 0 to 2^32 - 1, not {self.seed}")
        for name in ("scale", "lr"):
            if not 0 < getattr(self, name) < math.inf:
                problems.append(f"{name} must be a number above 0, not {getattr(self, name)}")
        if not self.max_grad_norm > 0:  # inf: no clipping
            problems.append(f"max_grad_norm must be above 0, not {self.max_grad_norm}")
        if not self.block_sizes or min(self.block_sizes) < 2:
            problems.append(f"block_sizes must be numbers of at least 2, not {self.block_sizes}")
        elif max(self.block_sizes) > self.context:
            problems.append(f"block_sizes reach past context ({self.context})")
        if self.block_sizes and self.steps < len(self.block_sizes):
            problems.append(f"steps ({self.steps}) must reach every one of block_sizes")
        if self.schedule not in ("constant", "cosine"):
            problems.append(f"schedule must be constant or cosine, not {self.schedule!r}")
        if self.attention not in ("auto", "flex", "sdpa"):
            problems.append(f"attention must be auto, flex or sdpa, not {self.attention!r}")
        if self.dtype not in ("bfloat16", "float32"):
            problems.append(f"dtype must be bfloat16 or float32, not {self.dtype!r}")
        weights = (self.loss_tv, self.loss_ce, self.loss_kl)
        if not all(0 <= w < math.inf for w in weights) or not any(weights):
            problems.append("loss_tv, loss_ce and loss_kl must be numbers >= 0 and not all zero")
        if not self.targets:
            problems.append("targets must name at least one layer")
        if problems:
            raise ValueError("; ".join(problems))

    @property
    def loss_weights(self) -> LossWeights:
        return LossWeights(self.loss_tv, self.loss_ce, self.loss_kl)

    def block_size_at(self, step: int) -> int:
        """B of optimizer step `step` (from 0): equal shares, in the order given."""
        return self.block_sizes[min(step, self.steps - 1) * len(self.block_sizes) // self.steps]

    def lr_at(self, step: int) -> float:
        """Learning rate of optimizer step `step` (from 0)."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        if self.schedule == "constant":
            return self.lr
        done = (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
        return self.lr * (1 + math.cos(math.pi * done)) / 2

    def fixed(self) -> dict[str, Any]:
        """What a checkpoint must agree with."""
        return {k: v for k, v in dataclasses.asdict(self).items() if k not in _FREE_ON_RESUME}
