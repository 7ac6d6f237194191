"""--tree and what becomes of it: the adaptive drafter, the copy of the base, what a stored tree was measured with."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from infer import loading, verifiers
from infer.bench.drafter_rows import load_all_heads
from infer.drafters.adaptive import AdaptiveDrafter
from infer.drafters.heads import HeadsDrafter
from infer.engine import packed_linear
from infer.engine.packed_linear import decoding_copies, is_packed
from infer.generate import Generator
from infer.hardware import hardware
from infer.loading import load_with_tree
from infer.tree_spec import TUNED_FILE, BeamTree
from infer.tune import auto_tree
from infer.tune.auto_tree import TreeChoice
from infer.tune.tune_tree import TuneTree
from infer.verifiers import BestVerifier, VerifierChoice
from medusa_heads.checkpoint import save_heads
from tests.infer.test_generate import answers_of, prompts
from tests.random_heads import random_heads
from tests.tiny_models import tiny_model
from train.command_line import parse_command

MODEL = tiny_model("llama")


@pytest.fixture
def heads(tmp_path: Path) -> str:
    return str(save_heads(random_heads(MODEL), tmp_path / "heads", card="random", measured={"acceptance_length": {"8": 2.0}}))


def steps_taking(monkeypatch: pytest.MonkeyPatch, seconds: Any) -> None:
    """Step times by nodes and rows instead of a clock."""
    monkeypatch.setattr(auto_tree, "_time_step", lambda model, drafter, cache: (0.0, seconds(drafter.max_nodes, len(cache.lengths))))


def test_auto_adapts_and_other_trees_stay(heads: str, monkeypatch: pytest.MonkeyPatch) -> None:
    steps_taking(monkeypatch, lambda nodes, rows: 1 + 0.05 * nodes * rows)
    loaded = load_with_tree(heads, [MODEL], "auto", batch_size=3)
    drafter = loaded.drafter()
    assert isinstance(drafter, AdaptiveDrafter) and isinstance(drafter.drafter, HeadsDrafter)
    assert loaded.tree == BeamTree(2) and drafter.name == "heads"
    assert set(drafter.seconds) == {1, 3} and drafter.step_seconds(3)[2] == pytest.approx(1.3)
    assert drafter.step_seconds(2)[2] == pytest.approx(1.2)
    texts = prompts()
    answers = answers_of(MODEL, texts, 60)
    found = Generator(MODEL, drafter).generate(texts, max_new_tokens=60, eos_ids=())
    assert [g.token_ids for g in found] == answers
    drafted = found[0].stats.num_drafted_tokens
    assert 0 < drafted < 59 * 2  # random heads: it began with 2 nodes and gave up
    assert drafter.max_nodes == max(drafter.step_seconds(1)) > max(drafter.step_seconds(3))
    assert isinstance(load_with_tree(heads, [MODEL], "beam:3").drafter(), HeadsDrafter)


def test_auto_draws_when_asked_to_and_its_nodes_are_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By default it does not: what it drafts depends on times, and a seed is to give the same text everywhere."""
    monkeypatch.setattr(verifiers, "AUTO", (BestVerifier("heads", "tree", 1.0, 1, "traversal"),))
    steps_taking(monkeypatch, lambda nodes, rows: 1 + 0.01 * nodes)
    measured = {"acceptance_length": {"8": 2.0}, "static_nodes": {"0": 0.5, "1": 0.3, "0,0": 0.2}}
    known = str(save_heads(random_heads(MODEL), tmp_path / "known", card="random", measured=measured))
    unknown = str(save_heads(random_heads(MODEL), tmp_path / "unknown", card="random", measured={"acceptance_length": {"8": 2.0}}))
    deep = {"acceptance_length": {"8": 2.0}, "static_nodes": {"0": 0.5, "0,0": 0.5, "0,0,0": 0.5, "0,0,0,0": 0.5}}
    too_deep = str(save_heads(random_heads(MODEL), tmp_path / "deep", card="random", measured=deep))
    sampled = dict(generation_config=GenerationConfig(do_sample=True, temperature=1.0), max_new_tokens=30, eos_ids=(), seed=3)

    def texts(heads: str, tree: str, verifier: VerifierChoice = "auto") -> list[list[int]]:
        generator = Generator(MODEL, load_with_tree(heads, [MODEL], tree).drafter())
        return [answer.token_ids for answer in generator.generate(prompts(), verifier=verifier, **sampled)]  # type: ignore[arg-type]

    assert texts(known, "auto", "traversal") == texts(known, "auto", "traversal") != texts(known, "auto")
    assert texts(known, "static:3") == texts(known, "static:3", "traversal")
    assert texts(unknown, "auto") == texts(known, "auto") == texts(known, "auto", "sample-and-match") == texts(known, "beam:3")
    with pytest.raises(ValueError, match="--verifier traversal needs drafts that are drawn at random"):
        texts(unknown, "auto", "traversal")
    with pytest.raises(ValueError, match="node '0,0,0,0' is beyond 3 heads"):
        texts(too_deep, "auto", "traversal")


def test_all_heads_of_a_benchmark_decode_on_one_copy(heads: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second copy is the faster one for the first heads, and would be the slower one for the next."""
    others = str(save_heads(random_heads(MODEL, seed=1), tmp_path / "others", card="random"))
    copies, seconds = [MODEL, tiny_model("llama")], iter([2.0, 1.0, 2.0, 1.0])

    def measured(engine: Any, checkpoint: Any, **options: Any) -> TreeChoice:
        row = {"batch_size": 1, "num_nodes": 0, "draft_s": 0.0, "forward_s": (took := next(seconds))}
        return TreeChoice(BeamTree(0), [row | {"expected_acceptance_length": 1.0, "expected_tokens_per_second": 1 / took}])

    monkeypatch.setattr(loading, "choose_tree", measured)
    found = load_all_heads(copies, [heads, others], base="x", tree="auto", batch_size=1)
    assert [loaded.engine for loaded in found.values()] == [copies[1], copies[1]] and list(found) == ["heads", "heads:others"]
    fixed = load_all_heads(copies, [heads, others], base="x", tree="beam:3", batch_size=1)
    assert len({id(loaded.engine) for loaded in fixed.values()}) == 1


def test_plain_decoding_where_nothing_pays(heads: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No size would pay even on the best text: none is tried."""
    steps_taking(monkeypatch, lambda nodes, rows: 1.0 + 100 * nodes)
    drafter = load_with_tree(heads, [MODEL], "auto").drafter()
    texts = prompts()
    found = Generator(MODEL, drafter).generate(texts, max_new_tokens=40, eos_ids=())
    assert [g.token_ids for g in found] == answers_of(MODEL, texts, 40) and not any(g.stats.num_drafted_tokens for g in found)


@pytest.mark.parametrize(
    ("tree_speed", "length", "expected"),
    [
        (60.0, 2.5, 1),  # 33 tokens/s where a quarter of the gain comes true: more than 20
        (60.0, 6.0, 1),  # 22.5
        (50.0, 6.0, 0),  # 18.75: text that the drafts hardly fit would become slower
        (39.0, 2.0, 0),
    ],
)
def test_a_copy_with_slow_plain_steps_must_pay_on_unfit_text(tree_speed: float, length: float, expected: int) -> None:
    measured = [[(0, 20.0, 1.0), (8, 40.0, 2.0)], [(0, 15.0, 1.0), (16, tree_speed, length)]]
    names = ("num_nodes", "expected_tokens_per_second", "expected_acceptance_length")
    curves = [[dict(zip(names, row, strict=True)) | {"batch_size": 1} for row in rows] for rows in measured]
    assert loading.best_copy(curves, 1) == expected


def test_more_nodes_than_the_context_holds_are_refused(heads: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--tree beam:512: 512 nodes and the root do not fit the context of 512 tokens: use fewer nodes"):
        load_with_tree(heads, [MODEL], "beam:512")
    (tmp_path / "wide.json").write_text(json.dumps([[rank] for rank in range(299)]))
    small = tiny_model("gpt2")
    folder = str(save_heads(random_heads(small), tmp_path / "small", card=""))
    with pytest.raises(ValueError, match=r"--tree .*wide.json: 299 nodes and the root do not fit the context of 64 tokens"):
        load_with_tree(folder, [small], str(tmp_path / "wide.json"))


def tuned(heads: str, **changes: Any) -> None:
    """Stores a tuned tree as measured here, but for `changes`."""
    document: dict[str, Any] = {
        "choice": {"kind": "beam", "num_nodes": 4, "engine": "stock"},
        "settings": {"base": "some/base", "dtype": "float32", "batch_size": 1},
        "hardware": hardware(torch.device("cpu")),
        "prompts": {"file": "p.jsonl"},
    }
    for name, value in changes.items():
        part, _, key = name.partition("__")
        document[part][key] = value
    (Path(heads) / TUNED_FILE).write_text(json.dumps(document))


def test_a_tree_tuned_here_is_used_in_silence(heads: str, capsys: pytest.CaptureFixture[str]) -> None:
    tuned(heads)
    assert load_with_tree(heads, [MODEL], "tuned").tree == BeamTree(4)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hardware__cpu": "Abacus 3000"}, "measured with CPU Abacus 3000, here "),
        ({"hardware__num_threads": 99}, "measured with threads 99, here "),
        ({"hardware__gpu": "Big GPU"}, "measured with CPU None, here "),
        ({"settings__dtype": "bfloat16"}, "measured with dtype bfloat16, here float32. "),
        ({"settings__batch_size": 8}, "measured with batch size 8, here 1. "),
        ({"choice__engine": "packed"}, "measured with layers packed, here stock. "),
    ],
)
def test_a_tree_tuned_elsewhere_is_used_with_a_warning(
    heads: str, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], message: str
) -> None:
    tuned(heads, **changes)
    assert load_with_tree(heads, [MODEL], "tuned").tree == BeamTree(4)
    (warning,) = capsys.readouterr().err.splitlines()
    assert warning.startswith("warning: --tree tuned was ") and message in warning
    _, _, *options = shlex.split(warning.split("`")[1])
    assert parse_command(TuneTree, options, prog="") == TuneTree(
        base="some/base", heads=heads, prompts=Path("p.jsonl"), dtype="float32", device="cpu"
    )


def test_a_tuned_tree_runs_on_the_copy_it_was_measured_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama").to(torch.bfloat16)  # type: ignore[arg-type]
    copies = decoding_copies(model)
    folder = str(save_heads(random_heads(model), tmp_path / "heads", card="", measured={"acceptance_length": {"8": 2.0}}))
    monkeypatch.setattr(packed_linear, "step_seconds", lambda copy, n: 1.0 if is_packed(copy) else 2.0)
    for name in ("stock", "packed"):
        tuned(folder, settings__dtype="bfloat16", choice__engine=name)
        assert is_packed(load_with_tree(folder, copies, "tuned").engine) == (name == "packed")
