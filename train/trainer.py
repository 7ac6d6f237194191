"""TrainConfig -> trained heads: the accelerate loop over accumulation windows."""

# K heads

from __future__ import annotations

import hashlib
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from tqdm import tqdm

from medusa_heads.fingerprint import weights_digest
from medusa_heads.heads import MedusaHeads
from train import acceptance
from train.acceptance import Validation
from train.batch import TrainBatch, window_counts
from train.config import TrainConfig
from train.finished_step import FinishedStep, culprit, slot_means, slot_norms
from train.headed_model import HeadedModel
from train.hidden_states import training_windows
from train.history import ACCEPTANCE, EXPECTED, History
from train.packing import PackedDataset, num_supervised_slots
from train.run_state import (
    NO_VALIDATIONS,
    checkpoint_folder,
    heads_digest,
    newest_checkpoint,
    read_checkpoint,
    restore,
    save_checkpoint,
)
from train.schedule import number_of_steps, warmup_cosine
from train.sharding import (
    average_gradients,
    backward,
    clip_gradients,
    gradients,
    in_lock_step,
    is_sharded,
    prepare,
    reshard,
    share_out,
    whole,
)
from train.windows import WindowPlan


class Trainer:
    """Trains the heads of a HeadedModel. One instance runs one training run, from any step."""

    def __init__(self, config: TrainConfig, model: HeadedModel, rows: PackedDataset, accelerator: Accelerator) -> None:
        self.config, self.accelerator, self.rows = config, accelerator, rows
        self.num_heads = model.heads.config.num_heads
        self.initial_heads = heads_digest(model.heads) if config.init_heads else None
        self.plan = WindowPlan(
            len(rows),
            config.batch_size,
            config.gradient_accumulation_steps,
            accelerator.num_processes,
            accelerator.process_index,
            config.seed,
        )
        self.num_steps = number_of_steps(config.epochs, self.plan.steps_per_epoch, config.max_steps)
        share_out(accelerator, model, batch_size=config.batch_size, max_grad_norm=config.max_grad_norm)
        optimizer = torch.optim.AdamW(
            self.parameter_groups(model),
            lr=config.learning_rate,
            betas=(0.9, 0.95),
            weight_decay=config.weight_decay,
            fused=accelerator.device.type == "cuda",
        )
        self.model, self.optimizer = prepare(accelerator, model, optimizer)
        self.headed: HeadedModel = accelerator.unwrap_model(self.model)
        decay = config.slot_decay if config.slot_weights == "decay" else 1.0
        self.slot_weights = decay ** torch.arange(self.num_heads, device=accelerator.device)
        self.tokens_done = 0
        self.history = History(Path(config.output_dir), accelerator)
        self.validation: Validation | None = None
        self.validations = NO_VALIDATIONS

    @property
    def heads(self) -> MedusaHeads:
        return self.headed.heads

    @property
    def trained(self) -> nn.Module:
        """What trains, as checkpoints hold it."""
        return self.heads

    def parameter_groups(self, model: HeadedModel) -> list[dict[str, Any]]:
        return [{"params": list(model.heads.parameters())}]

    def learning_rates(self, step: int) -> list[float]:
        """One for each parameter group."""
        return [self.learning_rate(step)]

    def forward_options(self, step: int) -> dict[str, Any]:
        """Further arguments of the model's forward."""
        return {}

    def clip_gradients(self, step: int) -> Tensor | None:
        """Before the optimizer steps; returns the gradient norm of what trains besides the heads, if anything."""
        clip_gradients(self.accelerator, self.heads.parameters(), self.config.max_grad_norm)
        return None

    def identity(self) -> dict[str, Any]:
        """What a resumed run must share with the run it continues."""
        content = hashlib.sha256(repr((len(self.rows), self.rows.content_key)).encode()).hexdigest()[:16]
        return self.config.schedule_dict() | {
            "num_processes": self.accelerator.num_processes,
            "data_content": content,
            "base_fingerprint": self.heads.config.base_fingerprint,
            "init_heads_weights": self.initial_heads,
            "num_steps": self.num_steps,
            "validation_prompts": self.validation.key if self.validation else None,
        }

    def learning_rate(self, step: int) -> float:
        return warmup_cosine(step, self.num_steps, peak=self.config.learning_rate, warmup_ratio=self.config.warmup_ratio)

    def train(self, validation: Validation | None = None) -> None:
        """Runs from the newest checkpoint, or from the start, to the last step, or until validation says stop.

        validation: what acceptance is measured on, at intervals and at the end, if anything. Raises ValueError when a
        loss is not finite, naming the conversation, and AssertionError when the base changed or a head receives no gradient.
        """
        if validation:
            acceptance.pick_tree(validation.tree, self.headed)  # refused now, not at the first validation
        self.validation = validation
        self._check_answers()
        before = self._base_digest()
        first_step = self._resume()
        self.history.go_back(first_step)
        self.model.train()
        source = training_windows(
            self.config,
            self.headed,
            self.rows,
            self.plan,
            self.accelerator,
            first_step=first_step,
            num_steps=self.num_steps if not self._is_patience_over() else first_step,
        )
        bar = tqdm(total=self.num_steps, initial=first_step, desc="training", unit="step", disable=not self.accelerator.is_main_process)
        pending: FinishedStep | None = None
        history: list[FinishedStep] = []
        self.started = time.perf_counter()
        for step, window in enumerate(source, start=first_step):
            finished = self._step(step, window)
            if step == 0:
                self._assert_every_head_learns(finished)
            if pending is not None:
                self._check_finite(pending)  # one step behind, so the device is never waited for
            pending = finished
            history.append(replace(finished, batches=[]))  # which may hold hidden states
            last = step + 1 == self.num_steps
            validates = validation is not None and (last or self._is_due(step, self.config.validate_every))
            saves = last or self._is_due(step, self.config.save_every)
            if saves or validates or self._is_due(step, self.config.log_every):  # a resumed run logs the same means
                self._log(history, bar)
                history = []
            if saves or validates:
                self._check_finite(pending)
            if validates:
                self._validate(step + 1)
            if saves or (validates and self._is_best(step + 1)) or self._is_patience_over():
                self._save(step + 1)
            bar.update()
            if self._is_patience_over():
                break
        bar.close()
        assert self._base_digest() == before, "the frozen base model changed during training"

    def _base_digest(self) -> int:
        reshard(self.headed)
        return weights_digest(self.headed.base)

    def _check_answers(self) -> None:
        """Raises ValueError when no answer is long enough for the last head to learn from."""
        masks = (document["assistant_mask"] for document in self.rows.documents)
        if not any((num_supervised_slots(np.array(mask), self.num_heads) == self.num_heads).any() for mask in masks):
            raise ValueError(
                f"num_heads: no answer in the data has {self.num_heads + 1} tokens, so head {self.num_heads} would learn nothing; "
                "give longer answers, raise max_length, or lower num_heads"
            )

    def _resume(self) -> int:
        """Puts the newest usable checkpoint, if any, into heads and optimizer; returns the number of finished steps."""
        checkpoint, damaged = newest_checkpoint(Path(self.config.output_dir))
        if checkpoint is None:
            return 0
        for problem in damaged:
            self.accelerator.print(f"warning: {problem}: going back to {checkpoint.folder.name}", file=sys.stderr)
        with whole(self.accelerator, self.trained, changed=True):
            restore(checkpoint, self.trained, self.optimizer, self.identity())
        if self.accelerator.scaler is not None and "scaler" in checkpoint.state:
            self.accelerator.scaler.load_state_dict(checkpoint.state["scaler"])
        self.validations = checkpoint.validations
        self.accelerator.print(f"resuming from {checkpoint.folder} at step {checkpoint.step} of {self.num_steps}")
        return checkpoint.step

    def _save(self, step: int) -> None:
        self.accelerator.wait_for_everyone()
        with whole(self.accelerator, self.trained):
            state = {"heads": self.trained.state_dict(), "optimizer": self.optimizer.state_dict()}  # by all processes
            if self.accelerator.scaler is not None:
                state["scaler"] = self.accelerator.scaler.state_dict()
            if self.accelerator.is_main_process:
                save_checkpoint(
                    Path(self.config.output_dir),
                    step,
                    state,
                    self.identity(),
                    self.config.keep_checkpoints,
                    validations=self.validations,
                )

    @staticmethod
    def _is_due(step: int, every: int) -> bool:
        return every > 0 and (step + 1) % every == 0

    def _is_best(self, step: int) -> bool:
        return self.validations.best is not None and self.validations.best.step == step

    def _is_patience_over(self) -> bool:
        return 0 < self.config.patience <= self.validations.num_since_longest

    def _validate(self, step: int) -> None:
        """Decodes the validation prompts, each process its part; every process learns the result."""
        assert self.validation is not None
        accelerator = self.accelerator
        self.model.eval()
        expected = None
        with in_lock_step(accelerator, self.headed):
            counts_P2 = acceptance.decode(self.headed, self.validation, part=accelerator.process_index, num_parts=accelerator.num_processes)
            if accelerator.is_main_process:
                expected = acceptance.expected_length(self.headed, self.validation)
        counts_P2 = accelerator.reduce(counts_P2.to(accelerator.device), reduction="sum")
        self.validations = self.validations.add(step, tuple((steps, accepted) for steps, accepted in counts_P2.tolist()))
        length, best = self.validations.measured[-1].length, self.validations.best
        figures = {ACCEPTANCE: length}
        if expected:
            figures[EXPECTED] = expected
        self.model.train()
        self.history.record(figures, step)
        if accelerator.is_main_process and best is not None:
            tqdm.write(f"step {step}: acceptance length {length:.3f} (best {best.length:.3f}, step {best.step})", file=sys.stderr)

    def take_best(self) -> int:
        """Puts the heads of the best validation into the model and returns their step; where they cannot be read, the last ones stay."""
        best, last = self.validations.best, self.validations.measured[-1].step
        assert best is not None
        if best.step == last:
            return last
        try:
            checkpoint = read_checkpoint(checkpoint_folder(Path(self.config.output_dir), best.step))
        except ValueError as error:
            print(f"warning: {error}: the last heads are kept instead of the best", file=sys.stderr)
            return last
        self.trained.load_state_dict(checkpoint.state["heads"])
        return best.step

    def _step(self, step: int, window: list[TrainBatch]) -> FinishedStep:
        """One optimizer step over an accumulation window.

        Every slot's sum is divided by its own count over all processes and micro-batches; the count
        is known before the first backward. Data parallelism averages gradients over processes,
        which the factor num_processes undoes.
        """
        accelerator = self.accelerator
        own_K = window_counts(window)
        if accelerator.device.type == "cuda":  # pinned, so that the copy waits for nothing
            own_K = own_K.pin_memory()
        counts_K = accelerator.reduce(own_K.to(accelerator.device, non_blocking=True), reduction="sum")
        weights_K = self.slot_weights * accelerator.num_processes / counts_K.clamp(min=1)
        for group, learning_rate in zip(self.optimizer.param_groups, self.learning_rates(step), strict=True):
            group["lr"] = learning_rate
        outputs = []
        for index, batch in enumerate(window):
            last = index + 1 == len(window)
            synchronise = nullcontext() if last else accelerator.no_sync(self.model)
            with synchronise, accelerator.autocast():
                output = self.model(**batch.to(accelerator.device).tensors, slot_weights=weights_K, **self.forward_options(step))
                backward(accelerator, self.model, output.loss, last=last)
            outputs.append(output._replace(loss=output.loss.detach()))
        average_gradients(accelerator, self.trained.parameters())
        accelerator.unscale_gradients()  # of float16, whose losses were scaled
        of_heads = gradients(accelerator, self.heads)
        norms_K = slot_norms(of_heads, self.num_heads)
        adapter_norm = self.clip_gradients(step)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return FinishedStep(step, window, outputs, counts_K, norms_K, adapter_norm)

    def _assert_every_head_learns(self, finished: FinishedStep) -> None:
        self._check_finite(finished)
        assert not (silent := finished.silent_heads()), f"heads {silent} received no gradient in the first step"

    def _check_finite(self, finished: FinishedStep) -> None:
        """Raises ValueError when a loss or a gradient of the step was not finite; its weights are not saved."""
        if bad := finished.bad_pair():
            batch, pair = bad
            where = culprit(self.headed, batch, pair, runs_alone=not is_sharded(self.accelerator))
            head = int(batch.tensors["pair_slot"][pair]) + 1
            raise ValueError(f"the loss is not finite at step {finished.step + 1}, {where}, head {head}. {self._what_to_do()}")
        if not finished.has_finite_gradients() and not self._rescales():
            raise ValueError(f"the gradient is not finite at step {finished.step + 1}. {self._what_to_do()}")

    def _rescales(self) -> bool:
        """Whether losses were scaled too high for float16: that step was left out, and the scale halved."""
        scaler = self.accelerator.scaler
        return scaler is not None and scaler.get_scale() >= 1

    def _what_to_do(self) -> str:
        return (
            f"The last checkpoint in {self.config.output_dir}/checkpoints is from before it. Remove the conversation from the data or "
            "lower learning_rate, and train into another --output-dir"
        )

    def further_figures(self, history: list[FinishedStep]) -> dict[str, float]:
        """What is logged besides the heads' own figures."""
        return {}

    def _log(self, history: list[FinishedStep], bar: Any) -> None:
        """Means over the steps since the last log line, over all processes."""
        slots = slot_means(history, self.accelerator)
        self.tokens_done += int(torch.stack([finished.slot_counts[0] for finished in history]).sum())
        losses = torch.stack([output.loss for finished in history for output in finished.outputs])
        figures = {
            "loss": self.accelerator.reduce(losses.sum(), reduction="mean").item() / len(history),
            "learning_rate": self.learning_rate(history[-1].step),
            "response_tokens_per_second": self.tokens_done / (time.perf_counter() - self.started),
        }
        shows_overlap = self.headed.objective.needs_teacher
        for k, slot in enumerate(slots, start=1):
            figures |= {f"slot{k}/{name}": value for name, value in slot.items() if name != "overlap" or shows_overlap}
        figures |= self.further_figures(history)
        self.history.record(figures, history[-1].step + 1)
        top1 = " ".join(f"{slot['top1']:.2f}" for slot in slots)
        overlap = " overlap " + " ".join(f"{slot['overlap']:.2f}" for slot in slots) if shows_overlap else ""
        bar.set_postfix_str(f"loss {figures['loss']:.3f} top1 {top1}{overlap} {figures['response_tokens_per_second']:.0f} tok/s")
