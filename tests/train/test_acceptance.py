"""Acceptance in the loop: the decoder's own figures, the best heads, patience, and the same history after every kill."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import datasets
import pytest
import torch

from infer.drafters.heads import HeadsDrafter
from infer.generate import Generator
from infer.tree_spec import BeamTree
from medusa_heads.checkpoint import load_heads, save_heads
from tests.tiny_models import tiny_model, tiny_tokenizer
from tests.train.training_runs import make_trainer
from train import acceptance
from train import trainer as trainer_module
from train.__main__ import choose_heads
from train.acceptance import Validation, decode, make_validation, prompts_of_answers, prompts_of_file, spread
from train.config import TrainConfig
from train.history import ACCEPTANCE, EXPECTED, FILE_NAME, History, plot_history, read_history
from train.packing import PackedDataset
from train.run_state import Measured, Validations, checkpoint_folders
from train.trainer import Trainer

PROMPTS = [[3, 4, 5], [6, 7, 8, 9], [10, 11], [12, 13, 14, 15, 16]]


def own_answers(num: int, length: int) -> datasets.Dataset:
    """Prompts of 6 random tokens and what the tiny model itself answers."""
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(3, 300, (6,), generator=generator).tolist() for _ in range(num)]
    answers = Generator(tiny_model("llama")).generate(prompts, max_new_tokens=length, eos_ids=())
    ids = [prompt + answer.token_ids for prompt, answer in zip(prompts, answers, strict=True)]
    return datasets.Dataset.from_dict(
        {"input_ids": ids, "assistant_mask": [[False] * 6 + [True] * length] * num, "id": [str(i) for i in range(num)]}
    )


@pytest.fixture
def short_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptance, "MAX_NEW_TOKENS", 6)


def test_overfitting_eight_samples_accepts_nearly_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The decoder, not the loss, says so: at least 0.9 (K + 1) tokens a forward; half way it is less."""
    monkeypatch.setattr(acceptance, "MAX_NEW_TOKENS", 32)
    samples = own_answers(8, 32)
    options: dict[str, Any] = dict(epochs=150, learning_rate=0.03, num_layers=2, batch_size=8, log_every=50, save_every=1000)
    trainer = make_trainer(tmp_path, dataset=samples, held_out=1, validate_every=30, **options)
    trainer.train(Validation(prompts_of_answers(samples), ()))
    first, last = trainer.validations.measured[0].length, trainer.validations.measured[-1].length
    assert last >= 0.9 * (trainer.num_heads + 1) > first


@pytest.mark.parametrize("own_lm_head", [False, True])
def test_acceptance_is_that_of_the_finished_heads(tmp_path: Path, own_lm_head: bool) -> None:
    """Counts over heads in training equal those over the same heads written, loaded and used for generation."""
    trainer = make_trainer(tmp_path, dataset=own_answers(8, 32), epochs=20, learning_rate=0.03, own_lm_head=own_lm_head)
    trainer.train()
    found_P2 = decode(trainer.headed, Validation(PROMPTS, (2,)))
    save_heads(trainer.heads, tmp_path / "finished", card="")
    model = tiny_model("llama")
    drafter = HeadsDrafter(model, load_heads(tmp_path / "finished", model).heads, BeamTree(16))
    answers = Generator(model, drafter).generate(PROMPTS, max_new_tokens=64, eos_ids=(2,))
    assert found_P2.tolist() == [[answer.stats.num_steps, answer.stats.num_accepted_tokens] for answer in answers]
    assert found_P2[:, 1].sum() > 0
    parts = [decode(trainer.headed, Validation(PROMPTS, (2,)), part=part, num_parts=3) for part in range(3)]
    assert torch.equal(sum(parts), found_P2), "what processes decode adds up"  # type: ignore[arg-type]
    assert not decode(trainer.headed, Validation(PROMPTS, (2,)), part=5, num_parts=6).any()


def scripted(monkeypatch: pytest.MonkeyPatch, lengths: list[float]) -> None:
    """Validations find these acceptance lengths, one after another, the same on every prompt."""
    remaining = iter(lengths)
    monkeypatch.setattr(acceptance, "decode", lambda *args, **options: torch.tensor([[100, round(100 * next(remaining)) - 100]] * 3))


def weights(trainer: Trainer) -> torch.Tensor:
    return trainer.heads.weight.detach().clone()


def test_the_best_heads_are_kept_and_never_pruned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, [1.2, 1.7, 1.5, 1.69, 1.6])
    trainer = make_trainer(tmp_path, held_out=1, validate_every=2, max_steps=10, save_every=1, keep_checkpoints=1)
    after: dict[int, torch.Tensor] = {}
    real = trainer._validate

    def validate(step: int) -> None:
        real(step)
        after[step] = weights(trainer)

    trainer._validate = validate  # type: ignore[method-assign]
    trainer.train(Validation(PROMPTS, ()))
    assert [folder.name for folder in checkpoint_folders(tmp_path)] == ["step-4", "step-10"]
    assert torch.equal(weights(trainer), after[10]) and not torch.equal(after[4], after[10])
    assert trainer.take_best() == 4 and torch.equal(weights(trainer), after[4])


def test_a_damaged_best_costs_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    scripted(monkeypatch, [1.7, 1.5])
    trainer = make_trainer(tmp_path, held_out=1, validate_every=2, max_steps=4)
    trainer.train(Validation(PROMPTS, ()))
    (tmp_path / "checkpoints" / "step-2" / "state.pt").write_bytes(b"")
    before = weights(trainer)
    assert trainer.take_best() == 4 and torch.equal(weights(trainer), before)
    assert "step-2 is damaged" in capsys.readouterr().err


def test_patience_stops_and_a_resumed_run_has_stopped_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, [1.2, 1.7, 1.5, 1.8, 1.8, 1.7])  # of equal ones the last is the best, but no longer one
    options: dict[str, Any] = dict(held_out=1, validate_every=1, max_steps=10, save_every=100, patience=2)
    trainer = make_trainer(tmp_path, **options)
    trainer.train(Validation(PROMPTS, ()))
    assert [step for step, _ in trainer.validations.measured] == [1, 2, 3, 4, 5, 6]
    assert trainer.validations.best == Measured(5, ((100, 80),) * 3) and trainer.validations.measured[4].length == 1.8
    assert [folder.name for folder in checkpoint_folders(tmp_path)] == ["step-5", "step-6"]
    resumed = make_trainer(tmp_path, **options)
    resumed.train(Validation(PROMPTS, ()))
    assert resumed.validations == trainer.validations and not resumed.losses  # type: ignore[attr-defined]


class Killed(Exception):
    pass


class KillSwitch:
    """Raises at the n-th moment: before each line of history and each checkpoint, or after the last checkpoint."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, moment: int) -> None:
        self.left, self.moments = moment, 0
        for owner, name in ((History, "record"), (trainer_module, "save_checkpoint")):
            monkeypatch.setattr(owner, name, self.around(getattr(owner, name)))

    def pass_by(self) -> None:
        self.moments += 1
        if self.moments == self.left:
            raise Killed

    def around(self, real: Any) -> Any:
        def wrapped(*args: Any, **options: Any) -> None:
            self.pass_by()
            real(*args, **options)

        return wrapped


def outcome(trainer: Trainer, folder: Path) -> dict[str, Any]:
    rows = [{name: value for name, value in row.items() if "second" not in name} for row in read_history(folder / FILE_NAME)]
    last = weights(trainer)
    return {"history": rows, "validations": trainer.validations, "chosen": trainer.take_best(), "last": last, "best": weights(trainer)}


def test_a_kill_at_any_moment_changes_nothing(tmp_path: Path, short_answers: None) -> None:
    """Acceptance, best, patience, every line of history and the weights are those of the uninterrupted run, bit for bit."""
    samples = own_answers(6, 12)
    answers = PackedDataset(samples, pack_length=64, num_heads=3)
    options: dict[str, Any] = dict(
        dataset=samples, held_out=1, validate_every=2, save_every=3, keep_checkpoints=1, max_steps=7, log_every=2, batch_size=1
    )

    def run(folder: Path, moment: int) -> tuple[Trainer, int]:
        with pytest.MonkeyPatch.context() as patch:
            switch = KillSwitch(patch, moment)
            trainer = make_trainer(folder, patience=3, learning_rate=0.06, **options)
            trainer.train(Validation(prompts_of_answers(samples)[:3], (), answers=answers))
            switch.pass_by()
        return trainer, switch.moments

    whole, num_moments = run(tmp_path / "whole", -1)
    expected = outcome(whole, tmp_path / "whole")
    assert sum(ACCEPTANCE in row for row in expected["history"]) == 4 and all(EXPECTED in r for r in expected["history"] if ACCEPTANCE in r)
    for moment in range(1, num_moments + 1):
        folder = tmp_path / str(moment)
        with pytest.raises(Killed):
            run(folder, moment)
        if moment % 3 == 0 and (folder / FILE_NAME).exists():  # in the middle of a line
            with (folder / FILE_NAME).open("a") as file:
                file.write('{"step": 1, "lo')
        found = outcome(run(folder, -1)[0], folder)
        for name in ("history", "validations", "chosen"):
            assert found[name] == expected[name], (moment, name)
        assert torch.equal(found["last"], expected["last"]) and torch.equal(found["best"], expected["best"])


def test_other_prompts_or_another_tree_do_not_continue_a_run(tmp_path: Path, short_answers: None) -> None:
    options: dict[str, Any] = dict(max_steps=1, held_out=1)
    make_trainer(tmp_path, **options).train(Validation(PROMPTS, ()))
    with pytest.raises(ValueError, match=r"validation_prompts was '\w{16}', is '\w{16}'"):
        make_trainer(tmp_path, **options).train(Validation(PROMPTS[1:], ()))
    with pytest.raises(ValueError, match="validation_tree was 'beam:16', is 'chain'"):
        make_trainer(tmp_path, validation_tree="chain", **options).train(Validation(PROMPTS, (), "chain"))
    make_trainer(tmp_path, validate_every=1, patience=2, keep="last", **options).train(Validation(PROMPTS, ()))


@pytest.mark.parametrize("tree", ["auto", "tuned", "static:8", "beam:0", "nowhere.json"])
def test_trees_that_need_finished_heads_are_refused_before_training(tmp_path: Path, tree: str) -> None:
    with pytest.raises(ValueError, match=f"--validation-tree.*{tree}"):
        make_trainer(tmp_path, max_steps=1).train(Validation(PROMPTS, (), tree))


def test_a_lost_tracker_costs_one_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = make_trainer(tmp_path, max_steps=4)

    def log(figures: dict[str, float], step: int) -> None:
        raise ConnectionError("no route to the tracker")

    trainer.accelerator.log = log  # type: ignore[method-assign]
    trainer.train()
    warnings = [line for line in capsys.readouterr().err.splitlines() if "tracker" in line]
    assert len(warnings) == 1 and "no route" in warnings[0]
    assert [row["step"] for row in read_history(tmp_path / FILE_NAME)] == [1, 2, 3, 4]


def test_the_best_is_the_last_within_a_standard_error_of_the_longest() -> None:
    def added(validations: Validations, step: int, *accepted: int) -> Validations:
        return validations.add(step, tuple((10, count) for count in accepted))

    none = Validations()
    assert none.best is None and none.num_since_longest == 0
    some = added(added(added(none, 2, 5, 1, 3), 4, 9, 4, 6), 6, 8, 3, 5)
    assert some.best and (some.best.step, some.best.length) == (4, pytest.approx(1 + 19 / 30)) and some.num_since_longest == 1
    noisy = added(some, 8, 5, 8, 5)  # 18 for 19, by -4, +4 and -1: less than they scatter
    assert noisy.best and noisy.best.step == 8 and noisy.num_since_longest == 2
    worse = added(noisy, 10, 6, 5, 4)  # 15 for 19, by -3, +1 and -2: more than a standard error
    assert worse.best and worse.best.step == 8
    alone = none.add(2, ((10, 9),)).add(4, ((10, 8),))
    assert alone.best and alone.best.step == 2, "a single prompt has no standard error"
    assert Measured(2, ((0, 0), (0, 0))).length == 1, "answers of one token"


def test_prompts_come_from_a_file_or_from_held_out_answers(tmp_path: Path) -> None:
    tokenizer, model = tiny_tokenizer(), tiny_model("llama")
    path = tmp_path / "prompts.jsonl"
    questions = [[{"role": "user", "content": f"what {i}"}, {"role": "assistant", "content": "a"}] for i in range(6)]
    path.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in questions))
    rendered = [tokenizer.apply_chat_template(m[:1], add_generation_prompt=True, return_dict=False) for m in questions]
    assert prompts_of_file(path, tokenizer, 3) == [rendered[0], rendered[2], rendered[4]]
    samples = own_answers(5, 8)
    assert prompts_of_answers(samples) == [row["input_ids"][:6] for row in samples]  # type: ignore[index,call-overload]
    config = TrainConfig(output_dir="x", data=["y"], num_validation_prompts=2, pack_length=64, max_length=64)
    assert make_validation(config, None, model, tokenizer) is None
    validation = make_validation(config, samples, model, tokenizer)
    assert validation is not None and validation.prompts == prompts_of_answers(samples.select([0, 2]))
    assert validation.eos_ids == (2,) and validation.answers is not None and len(validation.answers) == 1
    long = datasets.Dataset.from_list([{"input_ids": [3] * 600, "assistant_mask": [False] * 599 + [True], "id": "long"}])
    with pytest.raises(ValueError, match="none of 1 prompts has 1 to 511 tokens"):
        make_validation(config, long, model, tokenizer)


def test_spread_is_even_and_whole() -> None:
    assert spread(10, 3) == [0, 3, 6] and spread(2, 5) == [0, 1] and spread(0, 5) == []


def test_history_is_drawn(tmp_path: Path, short_answers: None, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer(tmp_path, max_steps=4, held_out=1, validate_every=2, objective="kl")
    trainer.train(Validation(PROMPTS, ()))
    rows = read_history(tmp_path / FILE_NAME)
    assert [row["step"] for row in rows] == [1, 2, 2, 3, 4, 4] and "slot3/overlap" in rows[0] and ACCEPTANCE in rows[2]
    pytest.importorskip("matplotlib")
    assert plot_history(tmp_path).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("keep", "chosen"), [("best", 20), ("last", 30)])
def test_the_end_says_which_heads_are_kept_and_how_good_best_and_last_are(
    capsys: pytest.CaptureFixture[str], keep: Literal["best", "last"], chosen: int
) -> None:
    validations = Validations().add(10, ((10, 2),)).add(20, ((10, 8),)).add(30, ((10, 6),))
    trainer = SimpleNamespace(validations=validations, validation=Validation(PROMPTS, ()), take_best=lambda: 20)
    choose_heads(TrainConfig(data=["x"], output_dir="x", keep=keep), trainer)
    best_and_last = "decoded acceptance length of the best (step 20) 1.800, of the last (step 30) 1.600"
    assert capsys.readouterr().out == f"the heads of step {chosen} are kept; {best_and_last}\n"
