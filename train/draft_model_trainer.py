"""DraftModelConfig -> a trained draft model: the accelerate loop over accumulation windows."""

from __future__ import annotations

import hashlib
import math
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from tqdm import tqdm

from medusa_heads.fingerprint import fingerprint, weights_digest
from train.batch import TrainBatch, window_counts
from train.draft_model_config import DraftModelConfig
from train.draft_model_loss import FIGURES, DistilledModel
from train.history import History
from train.packing import PackedDataset
from train.run_state import newest_checkpoint, restore, save_checkpoint
from train.schedule import number_of_steps, warmup_cosine
from train.windows import WindowPlan, windows


class DraftModelTrainer:
    """Distils the draft model of a DistilledModel. One instance runs one training run, from any step."""

    def __init__(self, config: DraftModelConfig, model: DistilledModel, rows: PackedDataset, accelerator: Accelerator) -> None:
        """rows: packed with num_heads = 1."""
        self.config, self.accelerator, self.rows = config, accelerator, rows
        self.plan = WindowPlan(
            len(rows),
            config.batch_size,
            config.gradient_accumulation_steps,
            accelerator.num_processes,
            accelerator.process_index,
            config.seed,
        )
        self.num_steps = number_of_steps(config.epochs, self.plan.steps_per_epoch, config.max_steps)
        self.trained = model.trained()
        self.base_fingerprint = fingerprint(model.base)
        optimizer = torch.optim.AdamW(
            self.trained.values(),
            lr=config.learning_rate,
            betas=(0.9, 0.95),
            weight_decay=config.weight_decay,
            fused=accelerator.device.type == "cuda",
        )
        self.model, self.optimizer = accelerator.prepare(model, optimizer)
        self.distilled: DistilledModel = accelerator.unwrap_model(self.model)
        self.history = History(Path(config.output_dir), accelerator)
        self.tokens_done = 0

    def identity(self) -> dict[str, Any]:
        """What a resumed run must share with the run it continues."""
        content = hashlib.sha256(repr((len(self.rows), self.rows.content_key)).encode()).hexdigest()[:16]
        return self.config.schedule_dict() | {
            "num_processes": self.accelerator.num_processes,
            "data_content": content,
            "base_fingerprint": self.base_fingerprint,
            "num_steps": self.num_steps,
        }

    def learning_rate(self, step: int) -> float:
        return warmup_cosine(step, self.num_steps, peak=self.config.learning_rate, warmup_ratio=self.config.warmup_ratio)

    def train(self) -> None:
        """Runs from the newest checkpoint, or from the start, to the last step.

        Raises ValueError when a loss or a gradient is not finite, and AssertionError when the base changed.
        """
        before = weights_digest(self.distilled.base)
        first_step = self._resume()
        self.history.go_back(first_step)
        bar = tqdm(total=self.num_steps, initial=first_step, desc="training", unit="step", disable=not self.accelerator.is_main_process)
        source = windows(
            self.rows, self.plan, num_heads=1, first_step=first_step, num_steps=self.num_steps, num_workers=self.config.num_workers
        )
        pending: list[Tensor] = []  # figures of the steps since the last log line, still on their way from the device
        self.started = time.perf_counter()
        for step, window in enumerate(source, start=first_step):
            pending.append(self._step(step, window))
            done, last = step + 1, step + 1 == self.num_steps
            saves = last or done % self.config.save_every == 0
            if saves or done % self.config.log_every == 0:
                self._log(done, pending, bar)
                pending = []
            if saves:
                self._save(done)
            bar.update()
        bar.close()
        assert weights_digest(self.distilled.base) == before, "the frozen base model changed during training"

    def _resume(self) -> int:
        """Puts the newest usable checkpoint, if any, into weights and optimizer; returns the number of finished steps."""
        checkpoint, damaged = newest_checkpoint(Path(self.config.output_dir))
        if checkpoint is None:
            return 0
        for problem in damaged:
            self.accelerator.print(f"warning: {problem}: going back to {checkpoint.folder.name}", file=sys.stderr)
        restore(checkpoint, self.trained, self.optimizer.optimizer, self.identity())
        self.accelerator.print(f"resuming from {checkpoint.folder} at step {checkpoint.step} of {self.num_steps}")
        return checkpoint.step

    def _save(self, step: int) -> None:
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process:
            output, keep = Path(self.config.output_dir), self.config.keep_checkpoints
            state = {"heads": self.trained.state_dict(), "optimizer": self.optimizer.state_dict()}
            save_checkpoint(output, step, state, self.identity(), keep)

    def _step(self, step: int, window: list[TrainBatch]) -> Tensor:
        """One optimizer step over an accumulation window: the mean KL over its supervised positions.

        Returns this process's sums of FIGURES, the count over all processes and the gradient norm. Data
        parallelism averages gradients over processes, which the factor num_processes undoes.
        """
        accelerator = self.accelerator
        count = accelerator.reduce(window_counts(window).to(accelerator.device), reduction="sum")
        weight = accelerator.num_processes / count.clamp(min=1)
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate(step)
        sums = torch.zeros(len(FIGURES), device=accelerator.device)
        for index, batch in enumerate(window):
            synchronise = accelerator.no_sync(self.model) if index + 1 < len(window) else nullcontext()
            with synchronise, accelerator.autocast():
                loss, figures = self.model(**batch.to(accelerator.device).tensors)
                accelerator.backward(loss * weight[0])
            sums += figures
        norm = accelerator.clip_grad_norm_(self.trained.values(), self.config.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return torch.cat([sums, count.float(), norm.reshape(1)])

    def _log(self, step: int, steps: list[Tensor], bar: Any) -> None:
        """Means over `steps`, the last of which is number `step`, over all processes.

        Raises ValueError when one of them was not finite; its weights are not saved.
        """
        stacked = torch.stack(steps)
        sums = self.accelerator.reduce(stacked[:, : len(FIGURES)].sum(0), reduction="sum").tolist()
        count, norms = int(stacked[:, -2].sum()), stacked[:, -1].tolist()
        if not all(map(math.isfinite, [*sums, *norms])):
            raise ValueError(
                f"the loss or the gradient is not finite at step {step - len(steps) + 1} to {step}: lower learning_rate, or look for what "
                f"is odd in the data, and train into another --output-dir. The last checkpoint in {self.config.output_dir}/checkpoints is "
                "from before it"
            )
        self.tokens_done += count
        speed = self.tokens_done / (time.perf_counter() - self.started)
        figures = {name: value / max(1, count) for name, value in zip(FIGURES, sums, strict=True)}
        self.history.record(
            figures | {"learning_rate": self.learning_rate(step - 1), "grad_norm": norms[-1], "response_tokens_per_second": speed}, step
        )
        bar.set_postfix_str(" ".join(f"{name} {value:.3f}" for name, value in figures.items()) + f" {speed:.0f} tok/s")


@torch.no_grad()
def measure(model: DistilledModel, rows: PackedDataset, *, batch_size: int) -> dict[str, float]:
    """FIGURES, means over held-out rows (packed with num_heads = 1); empty where nothing is supervised."""
    plan = WindowPlan(len(rows), batch_size, 1, 1, 0, seed=0)
    sums, count, device = torch.zeros(len(FIGURES)), 0, model.base.device
    for window in windows(rows, plan, num_heads=1, first_step=0, num_steps=plan.steps_per_epoch, num_workers=0):
        for batch in window:
            sums += model(**batch.to(device).tensors)[1].cpu()
            count += batch.num_response_tokens
    return {name: value / count for name, value in zip(FIGURES, sums.tolist(), strict=True)} if count else {}
