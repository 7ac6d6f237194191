"""Frozen base model + trainable draft model as ONE module: packed tokens -> KL to the base's next-token law, and figures.

The law is learned where it is used: after an answer token, for the answer token that follows. (An
answer's first token is always the base's own.) In terms of train/batch.py, the pair (t, slot 1) with
the target t + 2 stands for the law after t + 1.
"""

# B batch, T sequence, R supervised positions, D hidden, V vocabulary

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from medusa_heads import base_model
from train.losses import LogitHead, Teacher, chunked_loss
from train.objectives import Objective, Transform

KL = Objective("kl")
FIGURES = ("kl", "top1", "overlap")


class DistilledModel(nn.Module):
    """A base model that never trains and a draft model that does, both without dropout."""

    def __init__(self, base: PreTrainedModel, draft: PreTrainedModel, *, train_embeddings: bool = False) -> None:
        """train_embeddings: the draft's token embedding and lm_head train too; tied ones stay tied either way."""
        super().__init__()
        base.requires_grad_(False)
        draft.requires_grad_(True)
        for module in (draft.get_input_embeddings(), base_model.lm_head(draft)):
            module.requires_grad_(train_embeddings)
        self.base, self.draft = base, draft
        self.eval()

    @property
    def config(self) -> Any:
        """The base model's config, which sharding strategies ask for."""
        return self.base.config

    def train(self, mode: bool = True) -> DistilledModel:
        """Both stay in eval mode, so that a resumed run is the uninterrupted one."""
        return super().train(False)

    def trained(self) -> nn.ParameterDict:
        """The draft's weights that train, by name (with / for the dots, which a ParameterDict does not take)."""
        return nn.ParameterDict({name.replace(".", "/"): p for name, p in self.draft.named_parameters() if p.requires_grad})

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, document_ids: Tensor, positions: Tensor, targets: Tensor, **_: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Packed rows [B, T], pairs [R] as train/batch.py lists them -> the sum of the KL over all pairs, and the
        detached sums of FIGURES: KL, hits (the draft's likeliest token is the text's), overlap (sum min(p, q))."""
        steps = torch.arange(input_ids.shape[1], device=input_ids.device)
        allowed_BTT = (document_ids[:, :, None] == document_ids[:, None, :]) & (steps[:, None] >= steps)
        states: list[Tensor] = []
        for model in (self.base, self.draft):
            with torch.set_grad_enabled(model is self.draft and torch.is_grad_enabled()):
                mask = base_model.additive_masks(model, allowed_BTT, position_ids, position_ids)
                hidden_BTD = base_model.forward_hidden(model, input_ids, attention_mask=mask, position_ids=position_ids)
                states.append(hidden_BTD.flatten(0, 1)[positions + 1])
        base_RD, draft_RD = states
        teacher = Teacher(base_RD, torch.arange(len(positions), device=positions.device), _logit_head(self.base))
        pairs = chunked_loss(draft_RD.to(base_RD.dtype), _logit_head(self.draft), targets, objective=KL, teacher=teacher)
        figures = torch.stack([pairs.losses.detach().sum(), (pairs.ranks == 0).float().sum(), pairs.overlaps.sum()])
        return pairs.losses.sum(), figures


def _logit_head(model: PreTrainedModel) -> LogitHead:
    weight_VD, bias_V = base_model.lm_head_parameters(model)
    return LogitHead(weight_VD, bias_V, Transform(*base_model.logit_scale_and_cap(model)))
