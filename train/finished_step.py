"""A finished optimizer step -> the figures that are logged of it, and what broke where it is not finite."""

# K heads, T = len(TOP), X figures of a slot

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from torch import Tensor

from medusa_heads import base_model
from train.batch import TrainBatch
from train.headed_model import TOP, HeadedModel, HeadedOutput


@dataclass(slots=True)
class FinishedStep:
    """A window whose numbers may still be on their way from the device."""

    step: int
    batches: list[TrainBatch]
    outputs: list[HeadedOutput]
    slot_counts: Tensor
    grad_norms: Tensor
    adapter_norm: Tensor | None = None

    def silent_heads(self) -> list[int]:
        """Heads, from 1, without a gradient although they had something to learn: 0 is the loss where no target was one to be proposed."""
        losses_K = torch.stack([output.slot_loss_K for output in self.outputs]).sum(0)
        learned = zip(self.grad_norms.tolist(), losses_K.tolist(), strict=True)
        return [k for k, (norm, loss) in enumerate(learned, start=1) if loss and norm == 0]

    def bad_pair(self) -> tuple[TrainBatch, int] | None:
        """The first batch whose loss is not finite, and the pair in it that made it so."""
        for batch, output in zip(self.batches, self.outputs, strict=True):
            if (pair := int(output.first_bad_pair)) >= 0:
                return batch, pair
        return None

    def has_finite_gradients(self) -> bool:
        norms = (self.grad_norms,) if self.adapter_norm is None else (self.grad_norms, self.adapter_norm)
        return all(bool(norm.isfinite().all()) for norm in norms)


def culprit(headed: HeadedModel, batch: TrainBatch, pair: int, *, runs_alone: bool) -> str:
    """Which conversation broke the loss. One that is not finite spoils its whole packed row through
    the masked half of attention (0 x NaN), so each is tried on its own; not in a sharded base, which no process can run alone."""
    documents = batch.documents_of_row(batch.row_of_pair(pair))
    for name, ids in documents if runs_alone else ():
        with torch.no_grad(), headed.untouched_base():
            hidden = base_model.forward_hidden(headed.base, ids[None].to(headed.base.device))
        if not hidden.isfinite().all():
            return f"in conversation {name!r} (the base model's own hidden states are not finite)"
    return f"in a row of conversations {', '.join(repr(name) for name, _ in documents)}"


def slot_means(history: Sequence[FinishedStep], accelerator: Accelerator) -> list[dict[str, float]]:
    """Of every slot: `loss`, `overlap` and `topN`, means over its positions in all steps and processes, and the last `grad_norm`."""
    outputs = [output for finished in history for output in finished.outputs]
    sums_KX = torch.stack([torch.cat([o.slot_loss_K[:, None], o.slot_overlap_K[:, None], o.slot_hits_KT], 1) for o in outputs]).sum(0)
    counts_K = torch.stack([finished.slot_counts for finished in history]).sum(0)
    means_KX = (accelerator.reduce(sums_KX, reduction="sum") / counts_K.clamp(min=1)[:, None]).tolist()
    norms = history[-1].grad_norms.tolist()
    return [
        {"loss": loss, "grad_norm": norm, "overlap": overlap} | {f"top{n}": hit for n, hit in zip(TOP, hits, strict=True)}
        for (loss, overlap, *hits), norm in zip(means_KX, norms, strict=True)
    ]


def slot_norms(gradients: dict[str, Tensor], num_heads: int) -> Tensor:
    """The gradient norm of each head's parameters, [K]."""
    return torch.stack([_slot_norm(gradients, k) for k in range(num_heads)])


def _slot_norm(gradients: dict[str, Tensor], slot: int) -> Tensor:
    parts = [gradient[slot] if name == "lm_head" else gradient[:, slot] for name, gradient in gradients.items()]
    return torch.stack([torch.linalg.vector_norm(part, dtype=torch.float64) for part in parts]).norm().float()
