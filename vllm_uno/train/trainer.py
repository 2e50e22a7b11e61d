"""The training loop: curriculum, checkpoints, log, plot and the adapter's folder."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vllm_uno.adapter_source import METADATA_FILE
from vllm_uno.train.acceptance import Acceptance, count_cycles, longest_block
from vllm_uno.train.blocks import PADDING, block_seeds, draw_noise, draw_offsets
from vllm_uno.train.data import (
    PackedRows,
    fingerprint,
    load_samples,
    pack,
    row_order,
    split_heldout,
)
from vllm_uno.train.model import (
    NoisedModel,
    add_adapter,
    check_doubled_pass,
    learning_rows,
    load_model,
    load_tokenizer,
    noise_high,
)
from vllm_uno.train.settings import TrainSettings

CHECKPOINT = "checkpoint"
LOG = "log.jsonl"
PLOT = "training.png"


class SettingsError(ValueError):
    """Settings that do not fit what is there; names them and the way out."""


@dataclass
class TrainResult:
    """Attributes:
    adapter: folder of the finished adapter, None when the run stopped before.
    steps: optimizer steps done.
    heldout: last measurement, None where there was none.
    """

    adapter: Path | None
    steps: int
    heldout: Acceptance | None


def train(settings: TrainSettings) -> TrainResult:
    """Train an adapter; everything that can be wrong is found before anything is written.

    Run under `accelerate launch` for several GPUs: each takes its share of every step's rows.

    Raises:
        SettingsError, DataError, ModelError: with the setting and the way out.

    """
    from accelerate import Accelerator
    from accelerate.utils import DistributedType, GradientAccumulationPlugin
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    output = Path(settings.output)
    check_output(output, settings)
    # The user's own accelerate configuration may say otherwise.
    plugin = GradientAccumulationPlugin(num_steps=1)
    accelerator = Accelerator(mixed_precision="no", gradient_accumulation_plugin=plugin)
    if accelerator.distributed_type in (DistributedType.DEEPSPEED, DistributedType.FSDP):
        raise SettingsError(
            f"accelerate is configured for {accelerator.distributed_type.value}: launch with plain "
            f"data parallelism (accelerate launch --multi_gpu)"
        )
    device = accelerator.device
    rows_per_pass = settings.micro_batch_size * accelerator.num_processes
    if settings.batch_size % rows_per_pass:
        raise SettingsError(
            f"batch_size={settings.batch_size} must be a multiple of micro_batch_size * processes "
            f"({settings.micro_batch_size} * {accelerator.num_processes})"
        )
    tokenizer = load_tokenizer(settings.model, settings.revision)
    attention = settings.attention
    if attention == "auto":
        attention = "flex" if device.type == "cuda" else "sdpa"
    base = load_model(
        settings.model,
        revision=settings.revision,
        dtype=getattr(torch, settings.dtype),
        attention=attention,
        device=device,
    )
    high = noise_high(tokenizer, base.config.vocab_size, settings.mask_token_id)
    if settings.noise_low >= high:
        raise SettingsError(f"noise_low={settings.noise_low} must be below mask_token_id={high}")
    limit = getattr(base.config, "max_position_embeddings", settings.context)
    if settings.context > limit:
        raise SettingsError(f"context={settings.context} is past the model's {limit} positions")
    training, heldout = _load_data(settings, tokenizer)
    if (longest := longest_block(heldout)) < max(settings.block_sizes):
        raise SettingsError(
            f"no held-out text is long enough for a block of {max(settings.block_sizes)} (the "
            f"longest takes {longest}): give smaller block_sizes, or longer text in heldout"
        )
    torch.manual_seed(settings.seed)  # PEFT's initial A
    peft_model = add_adapter(base, settings.targets, settings.rank, settings.scale)
    if settings.gradient_checkpointing:
        peft_model.train()  # without it transformers checkpoints nothing; `load_model` took
        # the dropout out
        base.gradient_checkpointing_enable({"use_reentrant": False})
    model = NoisedModel(peft_model, attention)
    check_doubled_pass(model, training, device)
    # A branch moves on: the commit that was trained on.
    revision = settings.revision or getattr(base.config, "_commit_hash", None)
    run = _Run(
        settings, accelerator, model, training, heldout, (settings.noise_low, high), revision
    )
    return run.go()


def check_output(output: Path, settings: TrainSettings) -> None:
    """Refuse to write over anything, and to resume what is not there or is another run."""
    checkpoint, old = output / CHECKPOINT, output / f"{CHECKPOINT}.old"
    if not checkpoint.exists() and old.exists():  # killed between two renames
        os.rename(old, checkpoint)
    if not settings.resume:
        # A run that ended before its first checkpoint leaves its log alone.
        left = {p.name for p in output.iterdir()} if output.is_dir() else set()
        if output.is_file() or left - {LOG, f"{CHECKPOINT}.partial"}:
            way_out = (
                "resume goes on from its checkpoint"
                if checkpoint.exists()
                else "it has no checkpoint to resume from"
            )
            raise SettingsError(f"output folder {output} is not empty: give a new one ({way_out})")
        return
    if not (checkpoint / "settings.json").is_file():
        raise SettingsError(f"{output} has no checkpoint to resume from")
    saved = json.loads((checkpoint / "settings.json").read_text())
    mine = settings.fixed()
    # As JSON has it: the file knows no tuples.
    differing = [
        f"{name}: {saved.get(name)!r} there, {value!r} now"
        for name, value in json.loads(json.dumps(mine)).items()
        if saved.get(name) != value
    ]
    if differing:
        raise SettingsError(
            f"the checkpoint in {output} is of other settings ({'; '.join(differing)}): give "
            f"those, or another output"
        )


def _load_data(settings: TrainSettings, tokenizer: Any) -> tuple[PackedRows, PackedRows]:
    samples = load_samples(settings.data, tokenizer, settings.context, settings.data_split)
    if settings.heldout is None:
        samples, heldout = split_heldout(samples, settings.heldout_samples)
    else:
        heldout = load_samples(
            settings.heldout,
            tokenizer,
            settings.context,
            settings.data_split,
            settings.heldout_samples,
        )
    return pack(samples, settings.context), pack(heldout, settings.context)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


# Of `_Run._optimizer_step`: loss, TV, CE, KL, learning rows, interrupted processes.
_SUMS, _INTERRUPTED = 6, 5


@dataclass(frozen=True)
class _Batch:
    """A step's rows on the CPU, [rows, context] each; the same in every process.

    Attributes:
        rows: the text.
        seeds: of every column's block (`block_seeds`).
        noise: ids.
        learning: rows of the draft that are learnt from.
        tokens: of the text.
    """

    rows: PackedRows
    seeds: torch.Tensor
    noise: torch.Tensor
    learning: int
    tokens: int


class _Run:
    def __init__(
        self,
        settings: TrainSettings,
        accelerator: Any,
        model: NoisedModel,
        rows: PackedRows,
        heldout: PackedRows,
        noise_range: tuple[int, int],
        revision: str | None,
    ) -> None:
        self.settings = settings
        self.revision = revision
        self.data = fingerprint(rows, heldout)
        self.interrupted = False
        self.accelerator = accelerator
        self.model = model
        self.rows = rows
        self.heldout = heldout
        self.noise_range = noise_range
        self.output = Path(settings.output)
        parameters = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(
            parameters,
            lr=settings.lr,
            weight_decay=0.0,
            fused=accelerator.device.type == "cuda",
        )
        self.trained_parameters = parameters
        self.wrapped, self.optimizer = accelerator.prepare(model, optimizer)
        self.step = 0
        self.measured: Acceptance | None = None
        self.seconds = 0.0  # of earlier parts of a resumed run

    def go(self) -> TrainResult:
        from tqdm import tqdm

        settings = self.settings
        self.accelerator.wait_for_everyone()  # all have looked at the folder
        self.output.mkdir(parents=True, exist_ok=True)
        if settings.resume:
            self._load_checkpoint()
        end = min(settings.steps, settings.stop_after or settings.steps)
        main = self.accelerator.is_main_process
        if main and self.step == 0:
            (self.output / LOG).unlink(missing_ok=True)
        started, tokens = time.monotonic(), 0
        bar = tqdm(total=settings.steps, initial=self.step, unit="step", disable=not main)
        # On the device: read when they are logged, since reading waits for the GPU.
        sums = torch.zeros(_SUMS, dtype=torch.float64, device=self.accelerator.device)
        more = torch.zeros_like(sums)
        if self.step == 0:
            self._measure()
        with self._stop_on_interrupt():
            while self.step < end:
                batch = self._draw_batch()
                # All processes agree, or some would wait for the others for ever. Read after the
                # next batch was drawn: its way to the GPU waits for the step before as well.
                if more[_INTERRUPTED]:
                    break
                lr = settings.lr_at(self.step)
                more = self._optimizer_step(batch, lr)
                sums += more
                self.step += 1
                tokens += batch.tokens
                bar.update(1)
                saves = self.step % settings.save_every == 0
                if self.step % settings.log_every == 0 or saves or self.step == end:
                    elapsed = time.monotonic() - started
                    self._log_losses(bar, sums, lr, tokens / elapsed, self.seconds + elapsed)
                    sums.zero_()
                if self.step % settings.eval_every == 0 or self.step == settings.steps:
                    self._measure()
                if saves and self.step < end:
                    self._save_checkpoint(self.seconds + time.monotonic() - started)
        bar.close()
        self._save_checkpoint(self.seconds + time.monotonic() - started)
        adapter = self._finish() if self.step == settings.steps else None
        self._plot()
        self.accelerator.wait_for_everyone()
        return TrainResult(adapter, self.step, self.measured)

    @contextmanager
    def _stop_on_interrupt(self) -> Iterator[None]:
        """Control-C in any process ends the run after its step, with a checkpoint.

        A second one ends it at once.
        """

        def stop(number: int, frame: Any) -> None:
            if self.interrupted:
                raise KeyboardInterrupt
            self.interrupted = True

        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGINT, stop)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def _draw_batch(self) -> _Batch:
        """The rows of this step, for all processes, with their blocks and noise."""
        settings = self.settings
        block_size = settings.block_size_at(self.step)
        # Of this step alone, and the same whatever the number of processes.
        generator = torch.Generator().manual_seed(settings.seed * 1_000_003 + self.step)
        first = self.step * settings.batch_size
        order = row_order(len(self.rows), settings.seed, range(first, first + settings.batch_size))
        rows = self.rows.rows(order, torch.device("cpu"))
        offsets = draw_offsets(rows.documents, block_size, generator)
        noise = draw_noise((len(order), settings.context), *self.noise_range, generator)
        seeds = block_seeds(rows.documents, rows.positions, offsets, block_size)
        return _Batch(
            rows,
            seeds,
            noise,
            learning=learning_rows(seeds, rows.trained).shape[0],
            tokens=int((rows.documents != PADDING).sum()),
        )

    def _optimizer_step(self, batch: _Batch, lr: float) -> torch.Tensor:
        """One update.

        Every learning row of the step weighs the same, however rows are spread over passes and
        processes.

        Returns:
            Over all processes, fp64 [6]: sums of loss, TV, CE and KL over the learning rows, their
            number, and how many processes have been interrupted.

        """
        settings, accelerator = self.settings, self.accelerator
        rows, seeds, noise = batch.rows, batch.seeds, batch.noise
        all_rows = max(1, batch.learning)
        mine = range(
            accelerator.process_index * settings.micro_batch_size,
            len(rows),
            accelerator.num_processes * settings.micro_batch_size,
        )
        device = accelerator.device
        total = torch.zeros(_SUMS, dtype=torch.float64, device=device)
        set_learning_rate(self.optimizer, lr)
        for number, start in enumerate(mine):
            part = torch.arange(start, start + settings.micro_batch_size)
            used = learning_rows(seeds[part], rows.trained[part])
            count = used.shape[0]
            with _sync(accelerator, self.wrapped, number == len(mine) - 1):
                loss, means = self.wrapped(
                    rows.rows(part, device),
                    seeds[part].to(device),
                    noise[part].to(device),
                    used.to(device),
                    settings.loss_weights,
                )
                # Data parallelism takes the mean over processes.
                accelerator.backward(loss * (count * accelerator.num_processes / all_rows))
            total[:4] += torch.cat([loss.detach().view(1), means]) * count
            total[4] += count
        torch.nn.utils.clip_grad_norm_(self.trained_parameters, settings.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        total[_INTERRUPTED] = float(self.interrupted)
        return accelerator.reduce(total, "sum")

    def _log_losses(
        self, bar: Any, sums: torch.Tensor, lr: float, rate: float, seconds: float
    ) -> None:
        loss, tv, ce, kl = (sums[:4] / sums[4].clamp(min=1)).tolist()
        if not math.isfinite(loss):
            raise SettingsError(
                f"the loss is not finite at step {self.step}: lower lr or max_grad_norm. The last "
                f"checkpoint in {self.output}, if there is one, is sound."
            )
        shown = {"loss": f"{loss:.4f}", "tok/s": f"{rate:.0f}"}
        if self.measured is not None:
            shown["tau"] = f"{self.measured.tau:.2f}"
            shown["acc"] = "/".join(f"{a:.2f}" for a in self.measured.per_position)
        bar.set_postfix(shown)
        self._log(
            step=self.step,
            block_size=self.settings.block_size_at(self.step - 1),
            loss=loss,
            tv=tv,
            ce=ce,
            kl=kl,
            lr=lr,
            tokens_per_second=rate,
            seconds=seconds,
        )

    def _measure(self) -> None:
        """Acceptance on held-out text; every process looks at its share."""
        accelerator, block_size = self.accelerator, max(self.settings.block_sizes)
        mine = torch.arange(accelerator.process_index, len(self.heldout), accelerator.num_processes)
        counts = count_cycles(
            self.model,
            self.heldout.only(mine),
            block_size,
            self.noise_range,
            1.0,
            micro_batch=self.settings.micro_batch_size,
            device=accelerator.device,
        )
        self.measured = Acceptance.of(accelerator.reduce(counts.to(accelerator.device), "sum"))
        self._log(
            step=self.step, tau=self.measured.tau, acceptance=list(self.measured.per_position)
        )

    def _log(self, **entry: Any) -> None:
        if self.accelerator.is_main_process:
            with (self.output / LOG).open("a") as log:
                log.write(json.dumps(entry) + "\n")

    def _state(self) -> dict[str, torch.Tensor]:
        return {
            name: p.detach().cpu() for name, p in self.model.named_parameters() if p.requires_grad
        }

    def _save_checkpoint(self, seconds: float) -> None:
        if not self.accelerator.is_main_process:
            return
        folder = self.output / f"{CHECKPOINT}.partial"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        measured = self.measured
        state = {
            "step": self.step,
            "data": self.data,
            "seconds": seconds,
            "adapter": self._state(),
            "optimizer": self.optimizer.state_dict(),
            "measured": None if measured is None else dataclasses.astuple(measured),
            "log_bytes": (self.output / LOG).stat().st_size if (self.output / LOG).exists() else 0,
        }
        torch.save(state, folder / "state.pt")
        (folder / "settings.json").write_text(json.dumps(self.settings.fixed(), indent=1))
        # A run that is killed between the renames finds the old one (`check_output`).
        old, new = self.output / f"{CHECKPOINT}.old", self.output / CHECKPOINT
        shutil.rmtree(old, ignore_errors=True)
        if new.exists():
            os.rename(new, old)
        os.rename(folder, new)
        shutil.rmtree(old, ignore_errors=True)

    def _load_checkpoint(self) -> None:
        state = torch.load(
            self.output / CHECKPOINT / "state.pt", map_location="cpu", weights_only=True
        )
        if state["data"] != self.data:
            raise SettingsError(
                f"{self.settings.data} is not the data that the run in {self.output} began with "
                f"(or the tokenizer writes it differently): resume with that, or start anew"
            )
        parameters = dict(self.model.named_parameters())
        with torch.no_grad():
            for name, value in state["adapter"].items():
                parameters[name].copy_(value)
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.seconds = state["step"], state["seconds"]
        if state["measured"] is not None:
            self.measured = Acceptance(*state["measured"])
        if self.accelerator.is_main_process and (self.output / LOG).exists():
            # Lines after the checkpoint are written again.
            os.truncate(self.output / LOG, state["log_bytes"])

    def _finish(self) -> Path:
        """The adapter as a PEFT folder with our metadata; the checkpoint goes."""
        if self.accelerator.is_main_process:
            settings = self.settings
            # In the base model's dtype, as engines load it.
            dtype = getattr(torch, settings.dtype)
            state = {
                name: p.detach().to(dtype)
                for name, p in self.model.peft_model.named_parameters()
                if p.requires_grad
            }
            self.model.peft_model.save_pretrained(self.output, state_dict=state)
            metadata = {
                "noise_low": self.noise_range[0],
                "mask_token_id": self.noise_range[1],
                "block_sizes": settings.block_sizes,
                "base_model": settings.model,
                "revision": self.revision,
            }
            (self.output / METADATA_FILE).write_text(json.dumps(metadata, indent=1) + "\n")
            (self.output / "settings.json").write_text(
                json.dumps(settings.fixed(), indent=1) + "\n"
            )
            shutil.rmtree(self.output / CHECKPOINT)
        return self.output

    def _plot(self) -> None:
        if not self.accelerator.is_main_process:
            return
        from vllm_uno.train.plots import plot_training

        try:
            plot_training(self.output / LOG, self.output / PLOT)
        except Exception as error:  # the adapter is there: a picture is no reason to fail
            print(f"no {PLOT}: {error}")


def _sync(accelerator: Any, model: Any, last: bool) -> Any:
    """Gradients are exchanged with the last of a step's passes only."""
    return nullcontext() if last else accelerator.no_sync(model)
