"""Numbers that are not finite: found at once, in the loss or in the gradient alone, named to the conversation, and never saved."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from torch import Tensor

from tests.train.medusa2_runs import make_trainer as make_medusa2_trainer
from tests.train.training_runs import make_trainer, rows
from train.headed_model import _first_bad
from train.run_state import checkpoint_folders, newest_checkpoint

VICTIM = 7  # a token that one conversation alone will hold


def poisoned(conversation: int) -> datasets.Dataset:
    data = rows().to_list()
    for row in data:
        row["input_ids"] = [8 if token == VICTIM else token for token in row["input_ids"]]
    data[conversation]["input_ids"][-4] = VICTIM
    return datasets.Dataset.from_list(data)


@pytest.mark.parametrize("conversation", [3, 5, 17])
@pytest.mark.parametrize("has_adapter", [False, True])
def test_the_conversation_is_found_in_any_row_of_a_batch(tmp_path: Path, conversation: int, has_adapter: bool) -> None:
    """An adapter that took that step would make every conversation look like it."""
    make: Any = partial(make_medusa2_trainer, lora_start_ratio=0.0) if has_adapter else make_trainer
    trainer = make(tmp_path, batch_size=4, dataset=poisoned(conversation))
    trainer.headed.base.get_input_embeddings().weight.data[VICTIM] = float("nan")  # type: ignore[union-attr,index,operator]
    with pytest.raises(
        ValueError, match=rf"the loss is not finite at step \d+, in conversation 'conversation-{conversation}' .*hidden states"
    ):
        trainer.train()


def test_the_first_pair_that_is_not_finite_counts_whatever_it_is() -> None:
    losses = torch.tensor([1.0, float("inf"), 2.0, float("nan")])
    assert _first_bad(losses) == 1 and _first_bad(losses[2:]) == 1 and _first_bad(losses[:1]) == -1 and _first_bad(losses[:0]) == -1


def spoil(parameter: Tensor, backward: int, value: float) -> list[int]:
    """Makes the gradient of this backward pass (from 1) not finite; returns what counts them."""
    passes = [0]

    def hook(gradient: Tensor) -> Tensor:
        passes[0] += 1
        return torch.full_like(gradient, value) if passes[0] == backward else gradient

    parameter.register_hook(hook)
    return passes


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_gradient_that_is_not_finite_is_never_saved(tmp_path: Path, value: float) -> None:
    """The loss of that step is fine, so the weights alone would be lost, without a word."""
    trainer = make_trainer(tmp_path, save_every=1)
    spoil(trainer.heads.weight, 3, value)
    with pytest.raises(ValueError, match=r"the gradient is not finite at step 3\. The last checkpoint in .* is from before it"):
        trainer.train()
    checkpoint, damaged = newest_checkpoint(tmp_path)
    assert checkpoint is not None and checkpoint.step == 2 and not damaged and checkpoint.state["heads"]["weight"].isfinite().all()


def test_the_run_ends_one_step_later_not_at_the_next_checkpoint(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, save_every=1000, epochs=4)
    assert trainer.num_steps > 8
    passes = spoil(trainer.heads.weight, 2, float("nan"))
    with pytest.raises(ValueError, match="not finite at step 2"):
        trainer.train()
    assert passes[0] <= 3 and not checkpoint_folders(tmp_path)


def test_the_gradient_of_an_adapter_is_watched_too(tmp_path: Path) -> None:
    trainer: Any = make_medusa2_trainer(tmp_path, save_every=1, lora_start_ratio=0.0)
    spoil(trainer.headed.adapter.parameters()[-1], 3, float("nan"))
    with pytest.raises(ValueError, match="the gradient is not finite at step 3"):
        trainer.train()
    assert [folder.name for folder in checkpoint_folders(tmp_path)] == ["step-1", "step-2"]
