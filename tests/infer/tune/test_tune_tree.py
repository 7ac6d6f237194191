"""`medusa-heads tree`: acceptance against decoding by hand, the choice, what is stored, and what is refused."""

# R positions, K heads

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from infer import output_file
from infer.drafters.heads import HeadsDrafter
from infer.generate import Generator
from infer.prompts import encode_chat
from infer.tree import Tree
from infer.tree_builders import accepted_lengths, best_nodes, static_length, static_tree, step_starts
from infer.tree_spec import BeamTree, parse_tree
from infer.tune import answer_acceptance, auto_tree, expected_acceptance, tune_tree
from infer.tune.answer_acceptance import measure_acceptance, text_hidden_states
from infer.tune.expected_acceptance import Measured, held_out_static_lengths, measure_runs, split_runs, true_ranks
from infer.tune.tune_report import draw_acceptance, draw_curves
from infer.tune.tune_tree import TuneTree, best_row, summarize
from infer.tune.tuned_check import tune_command
from medusa_heads import base_model
from medusa_heads.checkpoint import load_heads, save_heads
from medusa_heads.cli import main
from tests.random_heads import random_heads
from tests.tiny_models import tiny_model, tiny_tokenizer
from train.command_line import parse_command

MODEL, TOKENIZER = tiny_model("llama"), tiny_tokenizer()
QUESTIONS = ("hello", "the cat", "the dog ran", "what is the answer", "how are you", "the house", "in the morning", "to help")
NUM_HEADS, NEW_TOKENS = 2, 20


def write_prompts(path: Path, questions: tuple[str, ...] = QUESTIONS) -> Path:
    rows = [{"id": str(i), "messages": [{"role": "user", "content": text}]} for i, text in enumerate(questions)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    MODEL.save_pretrained(tmp_path / "base")
    TOKENIZER.save_pretrained(tmp_path / "base")
    save_heads(random_heads(MODEL, num_heads=NUM_HEADS), tmp_path / "heads", card="random")
    write_prompts(tmp_path / "prompts.jsonl")
    return tmp_path


def tune(workspace: Path, *options: str, heads: str = "heads") -> int:
    files = ["--base", str(workspace / "base"), "--heads", str(workspace / heads), "--prompts", str(workspace / "prompts.jsonl")]
    return main(["tree", *files, "--max-new-tokens", str(NEW_TOKENS), *options])


@pytest.fixture
def fixed_times(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Any, int], float]], None]:
    """Step times from a function of (tree, context) instead of a clock."""

    def use(seconds: Callable[[Any, int], float]) -> None:
        monkeypatch.setattr(auto_tree, "_time_step", lambda model, drafter, cache: (0.0, seconds(drafter.tree, cache.lengths[0])))

    return use


def stored(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    return json.loads((folder / "trees/measured.json").read_text()), json.loads((folder / "trees/tuned.json").read_text())


def test_text_is_read_as_one_forward_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer_acceptance, "CHUNK_TOKENS", 7)
    text = torch.randint(3, 300, (30,)).tolist()
    with torch.inference_mode():
        expected = base_model.forward_hidden(MODEL, torch.tensor([text]))[0]
        torch.testing.assert_close(text_hidden_states(MODEL, text), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.compat
@pytest.mark.parametrize("vocabulary", [None, torch.arange(0, 300, 2)])
def test_acceptance_is_what_drafting_at_every_step_gives(workspace: Path, vocabulary: torch.Tensor | None) -> None:
    """By hand: prefix by prefix, draft, and compare with what the base went on to say."""
    checkpoint = replace(load_heads(workspace / "heads", MODEL), draft_vocabulary=vocabulary)
    prompts = [encode_chat(TOKENIZER, [{"role": "user", "content": text}]) for text in QUESTIONS]
    answers = [generation.token_ids for generation in Generator(MODEL).generate(prompts, max_new_tokens=NEW_TOKENS)]
    measured = measure_acceptance(MODEL, checkpoint, prompts, answers)
    proposed = list(range(300)) if vocabulary is None else vocabulary.tolist()
    drafter = HeadsDrafter(MODEL, checkpoint.heads, BeamTree(8), draft_vocabulary=vocabulary)
    runs: list[list[list[int]]] = []
    emitted: list[int] = []
    for prompt, answer in zip(prompts, answers, strict=True):
        text = prompt + answer
        runs.append([])
        next_step = len(prompt)
        for root in range(len(prompt), len(text) - NUM_HEADS):
            with torch.inference_mode():
                hidden_1D = base_model.forward_hidden(MODEL, torch.tensor([text[:root]]))[:, -1]
                logits_KV = drafter.draft_logits(hidden_1D)[0]
                candidates = drafter.propose(torch.tensor([text[root]]), hidden_1D, [])
            ranks = []
            for logits_V, token in zip(logits_KV, text[root + 1 :], strict=False):
                ranks.append(int((logits_V > logits_V[proposed.index(token)]).sum()) if token in proposed else len(proposed))
            runs[-1].append(ranks)
            parents, tokens = candidates.parents_BN[0].tolist(), candidates.tokens_BN[0].tolist()
            depths, right = candidates.depths_BN[0].tolist(), [True]
            for node in range(1, len(tokens)):
                right.append(right[parents[node]] and tokens[node] == text[root + depths[node]])
            if root == next_step:
                emitted.append(1 + max(depth for depth, ok in zip(depths, right, strict=True) if ok))
                next_step += emitted[-1]
    assert measured.num_positions == sum(map(len, runs)) >= 100
    assert [run.tolist() for run in measured.runs_RK] == [run for run in runs if run]
    assert measured.acceptance_length[8] == pytest.approx(sum(emitted) / len(emitted))
    assert measured.static_nodes == best_nodes(measured.runs_RK)


def test_stepping_through_the_runs_is_decoding(workspace: Path) -> None:
    """Every forward of the real decoder over a static tree emits what the measured ranks say, up to the answer's last tokens."""
    checkpoint = load_heads(workspace / "heads", MODEL)
    prompts = [encode_chat(TOKENIZER, [{"role": "user", "content": text}]) for text in QUESTIONS]
    answers = [generation.token_ids for generation in Generator(MODEL).generate(prompts, max_new_tokens=NEW_TOKENS)]
    # Drafts that are often right: heads that never are would step one by one.
    runs_RK = measure_acceptance(MODEL, checkpoint, prompts, answers).runs_RK
    tree = static_tree(best_nodes(runs_RK), 12)
    decoded = Generator(MODEL, HeadsDrafter(MODEL, checkpoint.heads, tree)).generate(prompts, max_new_tokens=NEW_TOKENS)
    simulated = []
    for run_RK in runs_RK:
        accepted = accepted_lengths(run_RK, tree)
        simulated.append([1 + int(accepted[start]) for start in step_starts(accepted)])
    assert [generation.token_ids for generation in decoded] == answers
    real = [generation.runs[1 : 1 + len(steps)] for generation, steps in zip(decoded, simulated, strict=True)]
    assert real == simulated and max(map(max, real)) > 1


def test_a_token_that_is_not_proposed_has_no_rank() -> None:
    logits = torch.tensor([[[0.1, 0.9, 0.5]], [[0.1, 0.9, 0.5]], [[0.1, 0.9, 0.5]]])
    assert true_ranks(logits, torch.tensor([[9], [4], [40]]), torch.tensor([2, 4, 9])).tolist() == [[1], [0], [32]]


def test_runs_are_of_consecutive_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expected_acceptance, "RUN", 4)
    positions = torch.tensor([3, 4, 5, 6, 7, 8, 11, 12, 20])
    runs = [run.tolist() for run in split_runs(positions, keep=1.0, generator=torch.Generator())]
    assert runs == [[3, 4, 5, 6], [7, 8], [11, 12], [20]]
    assert list(split_runs(positions[:0], keep=1.0, generator=torch.Generator())) == []
    many = sum(1 for _ in split_runs(torch.arange(4000), keep=0.3, generator=torch.Generator().manual_seed(0)))
    assert 240 < many < 360
    assert measure_runs([]) is None


def test_a_static_tree_is_judged_on_runs_it_was_not_built_from() -> None:
    runs_RK = [torch.tensor([[0]] * 10), torch.tensor([[5]] * 10)]  # each half's tree misses in the other
    assert held_out_static_lengths(runs_RK, [1, 2]) == {1: 1.0}  # neither half has two nodes
    assert static_length(runs_RK, static_tree(best_nodes(runs_RK), 1)) > 1.3
    assert held_out_static_lengths(runs_RK[:1], [1]) == {}


def test_what_was_measured_survives_json() -> None:
    runs_RK = [torch.tensor([[0, 0], [1, 0]]), torch.tensor([[0, 3]])]
    measured = Measured(best_nodes(runs_RK), {1: 1.5}, [0.6, 0.6], 3, runs_RK)
    again = Measured.from_exact_dict(json.loads(json.dumps(measured.as_exact_dict())))
    assert again == measured and [run.tolist() for run in again.runs_RK] == [run.tolist() for run in runs_RK]


def curve_row(kind: str, num_nodes: int, context: int, speed: float) -> dict[str, Any]:
    row = {"engine": "stock", "kind": kind, "num_nodes": num_nodes, "context": context}
    return row | {"expected_acceptance_length": 2.0, "expected_tokens_per_second": speed}


def test_contexts_count_by_time_and_all_must_have_been_measured() -> None:
    curve = [
        curve_row("beam", 4, 10, 100.0),
        curve_row("beam", 4, 90, 25.0),
        curve_row("static", 4, 10, 60.0),
        curve_row("static", 4, 90, 50.0),
    ]
    summary = summarize([*curve, curve_row("beam", 8, 10, 999.0)])
    assert [(row["kind"], row["num_nodes"], row["expected_tokens_per_second"]) for row in summary] == [
        ("beam", 4, pytest.approx(40.0)),
        ("static", 4, pytest.approx(60 * 50 * 2 / 110)),
    ]
    assert best_row(summary)["kind"] == "static"  # a mean of speeds would say beam
    assert best_row([curve_row("beam", 8, 1, 5.0), curve_row("beam", 2, 1, 5.0)])["num_nodes"] == 2


def test_the_fastest_tree_is_stored_and_used(workspace: Path, fixed_times: Any, capsys: pytest.CaptureFixture[str]) -> None:
    fixed_times(lambda tree, context: 1.0 if isinstance(tree, Tree) and tree.num_nodes == 3 else 1000.0)
    assert tune(workspace, "--plot", str(workspace / "tree.png")) == 0
    assert "chosen: static:3" in capsys.readouterr().out
    assert (workspace / "tree.png").read_bytes().startswith(b"\x89PNG")
    measured, tuned = stored(workspace / "heads")
    checkpoint = load_heads(workspace / "heads", MODEL)
    assert {",".join(map(str, path)): share for path, share in checkpoint.static_nodes.items()} == measured["static_nodes"]
    tree = parse_tree("tuned", checkpoint)
    assert isinstance(tree, Tree) and tree.paths == static_tree(checkpoint.static_nodes, 3).paths
    assert [list(path) for path in tree.paths] == tuned["choice"]["paths"]
    assert {row["context"] for row in tuned["curve"]} == {128, 447}  # 512 - 64 nodes - the root
    assert tuned["prompts"]["num"] == len(QUESTIONS) and len(tuned["prompts"]["sha256"]) == 64
    assert tuned["hardware"]["cpu"] and tuned["versions"]["torch"] and tuned["date"]
    assert sorted(p.name for p in (workspace / "heads/trees").iterdir()) == ["measured.json", "tuned.json"]
    files = ["--base", str(workspace / "base"), "--heads", str(workspace / "heads"), "--max-new-tokens", "8"]
    texts = []
    for tree_option in ("tuned", "beam:4"):
        assert main(["generate", *files, "--prompt", "hello", "--tree", tree_option]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != "\n"


def test_the_command_that_a_warning_names_measures_what_is_missing(
    workspace: Path, fixed_times: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another number type: the warning's command is run as it stands, and then there is nothing to warn of."""
    fixed_times(lambda tree, context: 1.0 + tree.num_nodes)
    assert tune(workspace, "--limit", "7") == 0
    decode = ["generate", "--base", str(workspace / "base"), "--heads", str(workspace / "heads"), "--tree", "tuned", "--prompt", "hello"]
    capsys.readouterr()
    assert main([*decode, "--dtype", "bfloat16"]) == 0
    (warning,) = (line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: "))
    program, *arguments = shlex.split(warning.split("`")[1])
    assert program == "medusa-heads" and main(arguments) == 0
    assert "already measured" not in capsys.readouterr().out
    _, tuned = stored(workspace / "heads")
    assert (tuned["settings"]["dtype"], tuned["settings"]["max_new_tokens"], tuned["prompts"]["num"]) == ("bfloat16", NEW_TOKENS, 7)
    assert main([*decode, "--dtype", "bfloat16"]) == 0
    assert "warning" not in capsys.readouterr().err


def test_the_command_names_what_the_base_was_loaded_with() -> None:
    settings = {
        "base": "some/base",
        "base_quantization": "4bit",
        "revision": "v1",
        "prompts": "data/my own.jsonl",
        "max_new_tokens": 64,
        "limit": None,
    }
    command = tune_command({"settings": settings}, MODEL, heads=Path("my heads"), batch_size=8)
    assert parse_command(TuneTree, shlex.split(command)[2:], prog="") == TuneTree(
        base="some/base",
        base_quantization="4bit",
        revision="v1",
        heads="my heads",
        prompts=Path("data/my own.jsonl"),
        max_new_tokens=64,
        batch_size=8,
        dtype="float32",
        device="cpu",
    )


def test_plain_decoding_is_chosen_where_no_tree_pays(workspace: Path, fixed_times: Any) -> None:
    fixed_times(lambda tree, context: 1.0 + 100 * tree.num_nodes)
    assert tune(workspace) == 0
    assert parse_tree("tuned", load_heads(workspace / "heads", MODEL)) == BeamTree(0)


def test_measured_on_this_machine(workspace: Path) -> None:
    assert tune(workspace, "--batch-size", "3", "--limit", "7") == 0
    _, tuned = stored(workspace / "heads")
    for row in tuned["curve"]:
        seconds = row["draft_s"] + row["forward_s"]
        assert row["expected_tokens_per_second"] == pytest.approx(3 * row["expected_acceptance_length"] / seconds)
    assert {row["kind"] for row in tuned["curve"]} == {"beam", "static"} and tuned["prompts"]["num"] == 7
    assert tuned["choice"]["expected_tokens_per_second"] == max(row["expected_tokens_per_second"] for row in tuned["summary"])


def test_one_curve_per_kind_and_context() -> None:
    from matplotlib.figure import Figure

    curve = [curve_row(kind, n, c, 10.0 * n + c) for c in (10, 90) for kind in ("beam", "static") for n in (1, 4)]
    document = {"choice": curve[0], "curve": curve, "summary": summarize(curve), "settings": {"contexts": [10, 90]}}
    axes: Any = Figure().add_subplot()
    draw_curves(axes, document, lambda row: row["expected_tokens_per_second"])
    assert [line.get_label() for line in axes.lines] == [f"{kind}, context {c}" for c in (10, 90) for kind in ("beam", "static")]
    assert axes.lines[2].get_xydata().tolist() == [[1, 100], [4, 130]]
    axes = Figure().add_subplot()
    draw_acceptance(axes, document)
    assert [line.get_ydata().tolist() for line in axes.lines] == [[2, 2], [2, 2]]


def refuse_writing(monkeypatch: pytest.MonkeyPatch, below: Path) -> None:
    real = output_file.tempfile.NamedTemporaryFile

    def refusing(*args: Any, **options: Any) -> Any:
        if Path(options["dir"]).is_relative_to(below):
            raise PermissionError(13, "Permission denied")
        return real(*args, **options)

    monkeypatch.setattr(output_file.tempfile, "NamedTemporaryFile", refusing)


def test_heads_that_cannot_be_written_are_copied(
    workspace: Path, fixed_times: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    refuse_writing(monkeypatch, workspace / "heads")
    assert tune(workspace) == 2
    assert "Permission denied" in (error := capsys.readouterr().err) and "--output DIR" in error and error.count("\n") == 1
    (workspace / "heads" / "checkpoint-5").mkdir()
    before = sorted(p for p in (workspace / "heads").rglob("*") if p.is_file())
    fixed_times(lambda tree, context: 1.0 if tree == BeamTree(8) else 1000.0)
    assert tune(workspace, "--output", str(workspace / "copies/own")) == 0
    assert sorted(p for p in (workspace / "heads").rglob("*") if p.is_file()) == before
    assert [p.name for p in (workspace / "copies").iterdir()] == ["own"]
    copied = load_heads(workspace / "copies/own", MODEL)
    assert parse_tree("tuned", copied) == BeamTree(8) and copied.acceptance
    assert not (workspace / "copies/own/checkpoint-5").exists()  # training states stay where they are
    assert tune(workspace, "--output", str(workspace / "copies/own")) == 2
    assert "is there already" in capsys.readouterr().err


def test_a_failed_write_leaves_the_old_tree(workspace: Path, fixed_times: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fixed_times(lambda tree, context: 1.0)
    assert tune(workspace) == 0
    before = (workspace / "heads/trees/tuned.json").read_bytes()
    real = Path.write_text

    def full(path: Path, text: str, **options: Any) -> int:
        if "tuned.json" in path.name:
            real(path, text[:10])
            raise OSError(28, "No space left on device")
        return real(path, text, **options)

    monkeypatch.setattr(Path, "write_text", full)
    assert tune(workspace, "--limit", "7") == 2
    assert (workspace / "heads/trees/tuned.json").read_bytes() == before
    assert sorted(path.name for path in (workspace / "heads/trees").glob("*.json")) == ["measured.json", "tuned.json"]


class Killed(BaseException):
    """What no `except Exception` holds up."""


def test_a_killed_run_goes_on_where_it_was(workspace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Killed at the third batch of answers, at the acceptance, and at the second context: no finished piece is repeated."""
    done: list[str] = []
    kills = [["answer"] * 2, ["answer"] * 8, ["answer"] * 8 + ["acceptance", "times"]]
    real_answer, real_acceptance = Generator.generate, tune_tree.measure_acceptance

    def work(name: str, result: Callable[[], Any]) -> Any:
        if kills and done == kills[0]:
            kills.pop(0)
            raise Killed
        done.append(name)
        return result()

    def timed(model: Any, checkpoint: Any, trees: Any, lengths: Any, *, context: int, **_: Any) -> Any:
        times = {key: auto_tree.StepTime(tree.num_nodes, 0.0, float(context + tree.num_nodes)) for key, tree in trees.items()}
        return work("times", lambda: times)

    monkeypatch.setattr(Generator, "generate", lambda *a, **o: work("answer", lambda: real_answer(*a, **o)))
    monkeypatch.setattr(tune_tree, "measure_acceptance", lambda *a: work("acceptance", lambda: real_acceptance(*a)))
    monkeypatch.setattr(tune_tree, "measure_trees", timed)
    for _ in range(3):
        with pytest.raises(Killed):
            tune(workspace)
        assert not (workspace / "heads/trees/tuned.json").exists()
    everything = ["answer"] * 8 + ["acceptance", "times", "times"]
    assert tune(workspace) == 0 and done == everything
    first = stored(workspace / "heads")
    assert {row["context"] for row in first[1]["curve"]} == {128, 447}
    assert sorted(path.name for path in (workspace / "heads/trees").iterdir()) == ["measured.json", "tuned.json"]
    capsys.readouterr()
    assert tune(workspace) == 0 and done == everything
    assert "already measured: remove" in capsys.readouterr().out and stored(workspace / "heads") == first
    assert tune(workspace, "--max-new-tokens", "19") == 0 and done == 2 * everything  # other settings, other answers


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--max-new-tokens", "0"], "--max-new-tokens 0"),
        (["--batch-size", "0"], "--batch-size 0"),
        (["--limit", "1"], "at least 100 are needed: give more prompts or a larger --max-new-tokens"),
        (["--max-new-tokens", "600"], "pass the context of 512"),
        (["--heads", "nowhere"], "--heads nowhere: no such folder"),
    ],
)
def test_bad_options_are_one_line(workspace: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str) -> None:
    assert tune(workspace, *options) == 2
    error = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(error) == 1 and message in error[0]
    assert not (workspace / "heads/trees/tuned.json").exists()


def test_empty_prompts_and_a_file_as_output(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tune(workspace, "--output", str(workspace / "prompts.jsonl" / "copy")) == 2
    assert "--output" in capsys.readouterr().err
    (workspace / "prompts.jsonl").write_text("\n")
    assert tune(workspace) == 2
    assert "holds no prompts" in capsys.readouterr().err


def test_heads_of_another_base_are_refused(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_heads(random_heads(tiny_model("llama", 1), num_heads=2), workspace / "others", card="random")
    assert tune(workspace, heads="others") == 2
    assert "were trained on other weights" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "holds no tuned tree: run `medusa-heads tree`"),
        ("{", "is damaged"),
        ("[]", "is damaged"),
        ("[" * 100_000, "is damaged"),
        ('{"choice": {"kind": "beam", "num_nodes": 8, "engine": ["packed"]}}', "is damaged .*engine"),
        ('{"choice": {"kind": "beam", "num_nodes": 8}, "settings": 3}', "is damaged .*settings"),
        ('{"choice": {"kind": "beam", "num_nodes": 8}, "hardware": "fast"}', "is damaged .*hardware"),
        ('{"choice": [8]}', "is damaged"),
        ('{"choice": {"kind": "static", "paths": [[Infinity]]}}', "is damaged .*expected a list of rank paths"),
        ('{"choice": {"kind": "static", "paths": [[0.7], [1.2]]}}', "is damaged .*expected a list of rank paths"),
        ('{"choice": {"kind": "static", "paths": ["0"]}}', "is damaged .*expected a list of rank paths"),
        ('{"choice": {"kind": "beam", "num_nodes": 8}, "settings": {"base": 5}}', "is damaged .*settings"),
        ('{"choice": {"kind": "beam", "num_nodes": 8}, "prompts": {"file": 7}}', "is damaged .*prompts"),
        ('{"choice": {"kind": "beam", "num_nodes": "8"}}', "is damaged"),
        ('{"choice": {"kind": "static", "paths": [[0, 1]]}}', "has no parent"),
        ('{"choice": {"kind": "static", "paths": [[0], [0, 0], [0, 0, 0]]}}', "3 deep"),
    ],
)
def test_no_or_damaged_tuned_tree(workspace: Path, text: str | None, message: str) -> None:
    if text is not None:
        (workspace / "heads/trees").mkdir()
        (workspace / "heads/trees/tuned.json").write_text(text)
    checkpoint = load_heads(workspace / "heads", MODEL)
    with pytest.raises(ValueError, match=message):
        parse_tree("tuned", checkpoint)
