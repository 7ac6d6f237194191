"""Which rows a run reads: every epoch all of them, once, in an order of its own, whatever the processes, and from any step."""

from __future__ import annotations

from pathlib import Path

import datasets
import pytest
import torch

from tests.train.training_runs import make_trainer, rows
from train.history import FILE_NAME, read_history
from train.windows import WindowPlan

NUM_ROWS, PROCESSES = 23, 3


def epoch(number: int, seed: int = 0) -> list[list[int]]:
    """The rows of each step of an epoch, over all processes and micro-batches; 23 rows in steps of 12."""
    plans = [WindowPlan(NUM_ROWS, 2, 2, PROCESSES, rank, seed) for rank in range(PROCESSES)]
    steps = range(number * plans[0].steps_per_epoch, (number + 1) * plans[0].steps_per_epoch)
    return [[row for plan in plans for batch in plan.micro_batches(step) for row in batch] for step in steps]


@pytest.mark.parametrize("number", [0, 1, 5])
def test_an_epoch_reads_every_row_once_and_fills_up_with_empty_packs(number: int) -> None:
    first, second = epoch(number)
    assert len(first) == len(second) == 12, "equal work for all processes at every step"
    assert sorted(first + second) == [-1, *range(NUM_ROWS)]


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    orders = [str(epoch(number, seed)) for number in (0, 1, 2) for seed in (0, 1)]
    assert len(set(orders)) == 6 and epoch(1) == epoch(1)


@pytest.mark.filterwarnings("error")
def test_steps_with_fewer_rows_than_places_train_on_what_there_is(tmp_path: Path) -> None:
    """Micro-batches of nothing but padding cost no NaN, and move no weight: the same run as without them."""
    data = rows(3)
    wide = make_trainer(tmp_path / "wide", dataset=data, batch_size=1, gradient_accumulation_steps=8, max_steps=3)
    assert len(wide.rows) < 8
    wide.train()
    exact = make_trainer(tmp_path / "exact", dataset=data, batch_size=1, gradient_accumulation_steps=len(wide.rows), max_steps=3)
    exact.train()
    assert torch.isfinite(wide.heads.weight).all() and wide.heads.weight.any()
    torch.testing.assert_close(wide.heads.weight, exact.heads.weight, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("objective", ["ce", "lk"])
def test_steps_in_which_a_head_has_nothing_to_learn(tmp_path: Path, objective: str) -> None:
    """Answers of two tokens reach the first head alone: no figure and no weight becomes infinite, and the others rest."""
    lengths = [2, 2, 2, 12, 2, 2]
    masks = [[False] * 50 + [True] * length for length in lengths]  # one conversation fills a row
    ids = [[(7 * i + t) % 290 + 3 for t in range(len(mask))] for i, mask in enumerate(masks)]
    data = datasets.Dataset.from_dict({"input_ids": ids, "assistant_mask": masks, "id": [str(i) for i in range(6)]})
    trainer = make_trainer(tmp_path, dataset=data, batch_size=1, epochs=1, objective=objective)
    assert len(trainer.rows) == trainer.num_steps == 6
    trainer.train()
    logged = read_history(tmp_path / FILE_NAME)
    assert len(logged) == 6 and all(value is not None for row in logged for value in row.values())
    assert sorted(row["slot3/grad_norm"] > 0 for row in logged) == [False] * 5 + [True]
    assert trainer.heads.weight.isfinite().all() and all(row["slot1/grad_norm"] > 0 for row in logged)
