"""`bench`: its arithmetic on known times, its document, and its refusals, on tiny models."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, PreTrainedModel

from infer.acceptance_stats import AcceptanceStats
from infer.bench import command as bench
from infer.bench import measure as bench_measure
from infer.bench.compare import compare
from infer.bench.compiled_base import CompiledBase
from infer.bench.drafter_rows import heads_row_names
from infer.bench.figures import Findings, document_rows, fastest_base
from infer.bench.measure import make_batches, make_rows, measure, warm_up
from infer.bench.rows import Batch, BatchAnswer, Decoding, GeneratorRow, cut_answer
from infer.bench.table import remarks, row_label
from infer.drafters import Drafter
from infer.drafters.heads import HeadsDrafter
from infer.drafters.prompt_lookup import PromptLookupDrafter
from infer.engine.packed_linear import packed_copy
from infer.generate import Generator
from infer.prompts import Prompt
from infer.tree import chain
from infer.tree_spec import BeamTree
from infer.tune import auto_tree, step_times
from medusa_heads.checkpoint import save_heads
from medusa_heads.cli import main
from tests.random_heads import random_heads
from tests.tiny_models import FAMILIES, TURN_END, tiny_model, tiny_tokenizer

ROW_KEYS = {
    *("drafter", "tokens_per_second", "end_to_end_s", "time_to_first_token_s", "mean_acceptance_length", "acceptance_by_depth"),
    *("acceptance_by_depth_conditional", "num_steps", "num_drafted_tokens", "num_accepted_tokens", "num_rejected_tokens"),
    *("draft_acceptance_rate", "identical_outputs", "first_difference_margin", "speedup_vs_base"),
    *("speedup_vs_transformers_generate", "peak_memory_bytes", "by_category"),
    *("time_per_token_s", "verifier", "lossless", "quality", "profile"),
}
PROMPT_IDS = [[5, 6, 7, 5, 6, 7, 5, 6], [9, 30, 40], [20, 20, 20, 20, 20]]


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiled row's own logic without the minutes of a compiler."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("bench")
    model = tiny_model("llama")
    model.save_pretrained(root / "base")
    tiny_tokenizer().save_pretrained(root / "base")
    for name in ("first", "second"):
        save_heads(random_heads(model, seed=len(name)), root / name, card="random")
    texts = [("hello", "greeting"), ("the cat sat on the mat", "story"), ("what is the answer", "greeting")]
    rows = [
        {"id": f"p{i}", "source": "here", "category": category, "messages": [{"role": "user", "content": text}] * 2}
        for i, (text, category) in enumerate(texts)
    ]
    (root / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {name: str(root / name) for name in ("base", "first", "second", "prompts.jsonl")}


def run(files: dict[str, str], *options: str) -> int:
    return main(
        ["bench", "--base", files["base"], "--prompts", files["prompts.jsonl"], "--max-new-tokens", "10", "--tree", "beam:4", *options]
    )


def last_document(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(capsys.readouterr().out.rstrip("\n").split("\n")[-1])
    return document


def generators(model: PreTrainedModel, drafters: dict[str, Drafter]) -> dict[str, Generator]:
    return {"base": Generator(model), **{name: Generator(model, drafter) for name, drafter in drafters.items()}}


# ---------------------------------------------------------------- every way of decoding gives the same text


@pytest.mark.compat
@pytest.mark.parametrize("family", FAMILIES)
def test_all_rows_answer_alike(family: str, uncompiled: None) -> None:
    model = tiny_model(family)
    drafters: dict[str, Drafter] = {"prompt_lookup": PromptLookupDrafter(), "heads": HeadsDrafter(model, random_heads(model), BeamTree(6))}
    rows = make_rows(model, generators(model, drafters), Decoding(16, (TURN_END,)))
    expected = [answer.token_ids for answer in Generator(model).generate(PROMPT_IDS, max_new_tokens=16, eos_ids=(TURN_END,))]
    for row in rows:
        for batch in (PROMPT_IDS, PROMPT_IDS[1:2]):  # left-padded, and alone
            answer = row.answer(Batch(batch))
            assert answer.token_ids == [expected[PROMPT_IDS.index(prompt)] for prompt in batch], row.name
            assert 0 < answer.first_token_s < answer.total_s
            assert [sum(run) for run in answer.runs] == [len(ids) for ids in answer.token_ids]


def test_all_rows_end_at_the_end_token(uncompiled: None) -> None:
    model = tiny_model("llama")
    free = Generator(model).generate(PROMPT_IDS, max_new_tokens=12, eos_ids=())
    eos = free[0].token_ids[5]
    expected = [cut_answer(answer.token_ids, frozenset([eos])) for answer in free]
    assert len(expected[0]) <= 6
    for row in make_rows(model, generators(model, {}), Decoding(12, (eos,))):
        assert row.answer(Batch(PROMPT_IDS)).token_ids == expected, row.name


@pytest.mark.skipif("fbgemm" not in torch.backends.quantized.supported_engines, reason="this torch has no FBGEMM")
def test_drafts_are_judged_by_plain_decoding_on_their_own_copy(uncompiled: None) -> None:
    """Rounding apart, a drafter on a packed copy of a bfloat16 model changes nothing; a wrong answer is still seen."""
    stock = tiny_model("llama").to(torch.bfloat16)  # type: ignore[arg-type]
    packed = packed_copy(stock)
    rows = make_rows(stock, {"base": Generator(stock), "prompt_lookup": Generator(packed, PromptLookupDrafter())}, Decoding(40))
    batches = make_batches(PROMPT_IDS, batch_size=1, seed=0)
    answers = measure(rows, batches, seed=0, device=torch.device("cpu")).answers
    assert answers["prompt_lookup"] and [a.token_ids for a in answers["prompt_lookup"]] != [a.token_ids for a in answers["base"]]
    found = compare(rows, answers, batches)
    assert found["prompt_lookup"] == found["base"] == [None] * len(PROMPT_IDS)
    wrong = replace(answers["prompt_lookup"][0], token_ids=[7, *answers["prompt_lookup"][0].token_ids[1:]])
    found = compare(rows, answers | {"prompt_lookup": [wrong, *answers["prompt_lookup"][1:]]}, batches)
    assert found["prompt_lookup"][0] is not None and found["prompt_lookup"][1:] == [None, None]


SAMPLED = GenerationConfig(do_sample=True, temperature=1.5, top_k=40, top_p=0.95, repetition_penalty=1.2)


def test_sampled_rows_answer_as_plain_decoding_under_the_seed(uncompiled: None) -> None:
    """The compiled base and every drafter draw as our plain loop does, alone and in a left-padded batch."""
    model = tiny_model("llama")
    drafters: dict[str, Drafter] = {"prompt_lookup": PromptLookupDrafter(), "heads": HeadsDrafter(model, random_heads(model), BeamTree(6))}
    rows = make_rows(model, generators(model, drafters), Decoding(16, (TURN_END,), SAMPLED))
    for batch in (Batch(PROMPT_IDS, 3), Batch(PROMPT_IDS[1:2], 5)):
        expected = rows[0].answer(batch).token_ids
        for row in rows:
            answer = row.answer(batch)
            assert (answer.token_ids == expected) == row.is_exact, row.name
    for row in rows[1:3]:
        first = row.answer(Batch(PROMPT_IDS, 3)).token_ids
        assert row.answer(Batch(PROMPT_IDS, 3)).token_ids == first != row.answer(Batch(PROMPT_IDS, 4)).token_ids
    assert [row.name for row in rows if not row.is_exact] == ["transformers_generate"]


def test_batches_have_seeds_of_their_own() -> None:
    batches = make_batches([[i] for i in range(6)], batch_size=2, seed=0)
    assert [batch.prompts for batch in batches] == [[[0], [1]], [[2], [3]], [[4], [5]]]
    assert len({batch.seed for batch in batches + make_batches([[0]], batch_size=1, seed=1)}) == 4
    assert batches == make_batches([[i] for i in range(6)], batch_size=2, seed=0)


def test_verifiers_that_draw_drafts_are_not_compared(uncompiled: None) -> None:
    model = tiny_model("llama")
    rows = make_rows(
        model,
        generators(model, {"heads": HeadsDrafter(model, random_heads(model), chain(2))}),
        Decoding(8, (), SAMPLED),
        verifier="block",
        lossy={"heads": Generator(model, HeadsDrafter(model, random_heads(model), chain(2)))},
    )
    batches = make_batches(PROMPT_IDS, batch_size=1, seed=0)
    answers = measure(rows, batches, seed=0, device=torch.device("cpu")).answers
    assert list(compare(rows, answers, batches)) == ["base", "base_compiled"]
    verified = {row.name: (row.verifier, row.is_lossless) for row in rows if isinstance(row, GeneratorRow)}
    assert verified == {"base": ("sample-and-match", True), "heads": ("block", True), "typical:heads": ("typical", False)}
    with pytest.raises(ValueError, match=r"`prompt_lookup` drafter chooses its own here.*; or leave prompt_lookup out of --drafters"):
        make_rows(model, generators(model, {"prompt_lookup": PromptLookupDrafter()}), Decoding(8, (), SAMPLED), verifier="block")


@pytest.mark.slow
def test_compiled_row_is_compiled_and_right() -> None:
    model = tiny_model("llama")
    row = CompiledBase(model, Decoding(12))
    row.warm_up([Batch(PROMPT_IDS), Batch(PROMPT_IDS[:1])])
    num_graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert num_graphs >= 2
    expected = [answer.token_ids for answer in Generator(model).generate(PROMPT_IDS, max_new_tokens=12, eos_ids=())]
    assert row.answer(Batch(PROMPT_IDS)).token_ids == expected
    assert row.answer(Batch(PROMPT_IDS[:1])).token_ids == expected[:1]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == num_graphs  # nothing is compiled while the clock runs


# ---------------------------------------------------------------- the order of the work


class RecordingRow:
    def __init__(self, name: str, log: list[tuple[str, int]]) -> None:
        self.name, self.log, self.model, self.is_exact = name, log, tiny_model("llama"), True

    def warm_up(self, batches: Iterable[Batch]) -> None:
        self.log.append((self.name, -1))

    def answer(self, batch: Batch) -> BatchAnswer:
        size = len(batch.prompts)
        self.log.append((self.name, batch.prompts[0][0]))
        return BatchAnswer([[1, 2]] * size, [[1, 1]] * size, [AcceptanceStats() for _ in batch.prompts], 0.1, 0.2)


def test_rows_take_turns_at_every_prompt() -> None:
    log: list[tuple[str, int]] = []
    rows = [RecordingRow(name, log) for name in ("base", "heads", "other")]
    measured = measure(rows, make_batches([[i] for i in range(12)], batch_size=1, seed=0), seed=0, device=torch.device("cpu"))
    assert [prompt for _, prompt in log] == [-1] * 3 + [prompt for prompt in range(12) for _ in rows]
    orders = [tuple(name for name, at in log if at == prompt) for prompt in range(12)]
    assert all(sorted(order) == ["base", "heads", "other"] for order in orders)
    assert len(set(orders)) > 1  # no row always runs after the same one
    assert all(len(own) == 12 for own in measured.answers.values()) and set(measured.peak_memory_bytes.values()) == {None}


def test_row_without_a_compiler_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_compiler(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no C++ compiler was found\nat length")

    monkeypatch.setattr(torch, "compile", lambda function, **_: no_compiler)
    model = tiny_model("llama")
    rows = make_rows(model, generators(model, {}), Decoding(4))
    measured = measure(rows, make_batches(PROMPT_IDS, batch_size=1, seed=0), seed=0, device=torch.device("cpu"))
    assert list(measured.answers) == ["base", "transformers_generate"]
    assert measured.errors == {"base_compiled": "no C++ compiler was found"}
    prompts = [Prompt(str(i), "x", []) for i in range(3)]
    written = document_rows(measured, Findings(dict.fromkeys(measured.answers, [None] * 3)), prompts, rows)
    row = written[-1]
    assert row["drafter"] == "base_compiled" and row["error"] == "no C++ compiler was found" and row["tokens_per_second"] is None
    assert set(row) >= ROW_KEYS
    assert fastest_base(written) in ("base", "transformers_generate")
    document = {"rows": written, "fastest_base": "base", "settings": {"step_seconds": {}, "decoding": "greedy"}}
    assert "base_compiled did not run and does not count as a base: no C++ compiler was found" in remarks(document)


def test_an_error_of_any_other_row_is_raised() -> None:
    row = RecordingRow("base", [])
    row.warm_up = lambda batches: (_ for _ in ()).throw(RuntimeError("broken"))  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="broken"):
        warm_up([row], [Batch([[1]])])


# ---------------------------------------------------------------- the command


def test_document(files: dict[str, str], uncompiled: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "out.json"
    options = ["--json", str(out), "--plot", str(tmp_path / "p.png"), "--html", str(tmp_path / "p.html"), "--batch-size", "2"]
    assert run(files, "--heads", files["first"], files["second"], *options) == 0
    last = capsys.readouterr().out.rstrip("\n").split("\n")[-1]
    document = json.loads(last)
    assert out.read_text() == last + "\n"
    assert [row["drafter"] for row in document["rows"]] == [
        "base",
        "base_compiled",
        "transformers_generate",
        "prompt_lookup",
        "heads",
        "heads:second",
    ]
    assert document["settings"]["step_seconds"] == {}  # nothing adapts
    for row in document["rows"]:
        assert set(row) >= ROW_KEYS
        assert row["identical_outputs"] == 1.0 and row["first_difference_margin"] is None and row["peak_memory_bytes"] is None
        assert set(row["by_category"]) == {"greeting", "story"}
        assert row["num_prompts"] == 3 and row["lossless"] is True and row["quality"] is None and row["profile"] is None
        assert row["time_per_token_s"] > 0 and row["by_category"]["story"]["speedup_vs_base"] > 0
    assert {"hardware", "versions", "commit", "prompts", "settings", "rows"} <= set(document)
    digest = hashlib.sha256(Path(files["prompts.jsonl"]).read_bytes()).hexdigest()
    assert document["prompts"] == {"file": files["prompts.jsonl"], "sha256": digest, "num": 3}
    settings = document["settings"]
    assert (settings["decoding"], settings["temperature"], settings["verifier"]) == ("greedy", 0.0, "auto")
    assert settings["trees"]["heads:second"]["num_nodes"] == 4 and settings["max_new_tokens"] == 10 and settings["dtype"] == "float32"
    assert max(row["speedup_vs_base"] for row in document["rows"][:3]) == 1.0
    assert (tmp_path / "p.png").stat().st_size > 1000 and "heads:second" in (tmp_path / "p.html").read_text()


def test_suffix_and_early_exit_have_rows(files: dict[str, str], uncompiled: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(files, "--drafters", "suffix,early_exit", "--batch-size", "2") == 0
    rows = json.loads(capsys.readouterr().out.rstrip("\n").split("\n")[-1])["rows"]
    assert [row["drafter"] for row in rows[3:]] == ["suffix", "early_exit"]
    assert all(row["identical_outputs"] == 1.0 for row in rows)


def test_draft_model_has_a_row(files: dict[str, str], uncompiled: None, capsys: pytest.CaptureFixture[str]) -> None:
    """The base drafts for itself, and every draft is accepted."""
    assert run(files, "--drafters", "draft_model", "--draft-model", files["base"]) == 0
    row = last_document(capsys)["rows"][3]
    assert row["drafter"] == "draft_model" and row["identical_outputs"] == 1.0 and row["draft_acceptance_rate"] == 1.0


def test_sampled_document(files: dict[str, str], uncompiled: None, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--temperature", "0.9", "--top-k", "50", "--top-p", "0.9", "--min-p", "0.01", "--repetition-penalty", "1.1", "--seed", "5"]
    assert run(files, "--heads", files["first"], *options) == 0
    document = last_document(capsys)
    rows = {row["drafter"]: row for row in document["rows"]}
    assert {name: row["identical_outputs"] for name, row in rows.items()} == {
        **dict.fromkeys(("base", "base_compiled", "prompt_lookup", "heads"), 1.0),
        "transformers_generate": None,
    }
    assert rows["heads"]["verifier"] == "sample-and-match" and rows["base"]["verifier"] is None
    settings = document["settings"]
    assert settings["decoding"] == "sampled" and settings["seed"] == 5
    assert [settings[name] for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")] == [0.9, 50, 0.9, 0.01, 1.1]


def test_profile_of_a_run(files: dict[str, str], uncompiled: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(files, "--heads", files["first"], "--profile") == 0
    out = capsys.readouterr().out
    rows = {row["drafter"]: row for row in json.loads(out.rstrip("\n").split("\n")[-1])["rows"]}
    assert "ms per step" in out and rows["base_compiled"]["profile"] is None
    for name in ("base", "prompt_lookup", "heads"):
        profile = rows[name]["profile"]
        assert profile["num_prompts"] == 3 and profile["num_steps"] == rows[name]["num_steps"]  # the same prompts once more
        assert sum(profile["ms_per_step"].values()) == pytest.approx(profile["ms_per_step_total"])
        assert 0 < profile["share_outside_base_forward"] < profile["share_outside_base_layers"] < 1
    assert rows["heads"]["profile"]["ms_per_step"]["draft"] > rows["base"]["profile"]["ms_per_step"]["draft"]


def test_quality_of_known_answers(
    files: dict[str, str], uncompiled: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers of a row are replaced by known ones; prompts without a reference that can be judged are not counted."""
    right = ["22 rolls.", "It costs $1,250.", "```python\ndef double_all(n):\n    return [2 * x for x in n]\n```", "Paris", "It is wet."]
    wrong = ["24 rolls.", right[1], "```python\ndef double_all(n):\n    return n\n```", "Rome", "It is dry."]
    monkeypatch.setattr(bench, "decoded", lambda tokenizer, answers: {row: wrong if ":" in row else right for row in answers})
    prompts = {"prompts.jsonl": str(Path(__file__).with_name("quality_prompts.jsonl"))}
    assert run(files | prompts, "--heads", files["first"], "--quality", "--temperature", "1") == 0
    out = capsys.readouterr().out
    document = json.loads(out.rstrip("\n").split("\n")[-1])
    rows = {row["drafter"]: row for row in document["rows"]}
    assert list(rows)[-2:] == ["heads", "typical:heads"] and rows["typical:heads"]["lossless"] is False
    assert rows["heads"]["quality"] == {"kind": "final_number+tests", "num": 3, "num_right": 3, "accuracy": 1.0}
    assert rows["typical:heads"]["quality"]["num_right"] == 1 and rows["typical:heads"]["identical_outputs"] is None
    assert rows["heads"]["by_category"]["numbers"]["quality"]["num"] == 2 and rows["heads"]["by_category"]["talk"]["quality"] is None
    assert "typical:heads is lossy: its text does not follow the base model's own law" in out and "typical:heads (lossy)" in out
    assert "3 of 3" in out and "1 of 3" in out and "by category" in out


@pytest.mark.parametrize("options", [[], ["--temperature", "0.7", "--top-p", "0.95"]], ids=["greedy", "sampled"])
def test_every_drafter_adapts_and_is_judged_on_ragged_batches(
    options: list[str], files: dict[str, str], uncompiled: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five prompts, three at once: accepted, rejected, latency and quality of every row, and where its time goes."""
    for module in (auto_tree, step_times):
        monkeypatch.setattr(module, "NUM_ROUNDS", 1)
    monkeypatch.setattr(auto_tree, "SIZES", (0, 1, 4))
    texts = ["22 rolls.", "It costs $1,250.", "def double_all(n): return [2 * x for x in n]", "Paris", "It is wet."]
    monkeypatch.setattr(bench, "decoded", lambda tokenizer, answers: {row: [*texts[: len(row) % 4], *[""] * 5][:5] for row in answers})
    shown = files | {"prompts.jsonl": str(Path(__file__).with_name("quality_prompts.jsonl"))}
    drafters = ["heads", "draft_model", "prompt_lookup", "suffix", "early_exit"]
    extra = ["--heads", files["first"], "--draft-model", files["base"], "--drafters", ",".join(drafters), "--tree", "auto"]
    assert run(shown, *extra, "--batch-size", "3", "--quality", "--profile", *options) == 0
    out = capsys.readouterr().out
    document = json.loads(out.rstrip("\n").split("\n")[-1])
    rows = {row["drafter"]: row for row in document["rows"]}
    lossy = ["typical:heads"] if options else []
    assert list(rows) == ["base", "base_compiled", "transformers_generate", *drafters, *lossy]
    seconds = document["settings"]["step_seconds"]
    assert set(seconds) == {*drafters, *lossy} and all(set(by_rows) == {"1", "3"} for by_rows in seconds.values())
    drawn = {"transformers_generate", "draft_model", *lossy} if options else set()  # these draw other tokens under the same seed
    table = out[out.index("quality (") :]
    for name, row in rows.items():
        assert row["identical_outputs"] == (None if name in drawn else 1.0), name
        assert row["quality"] == {"kind": "final_number+tests", "num": 3, "num_right": len(name) % 4, "accuracy": len(name) % 4 / 3}
        assert row["lossless"] is (name not in lossy) and (row["profile"] is not None) == (name not in list(rows)[1:3])
        assert row["num_accepted_tokens"] + row["num_rejected_tokens"] == row["num_drafted_tokens"] and row["num_prompts"] == 5
        cells = next(line for line in table.splitlines() if line.startswith(f"│ {row_label(row)} ")).strip("│").split("│")
        numbers = [str(row["num_accepted_tokens"]), str(row["num_rejected_tokens"]), f"{1000 * row['time_per_token_s']:.1f} ms"]
        assert [cell.strip() for cell in cells[1:4]] == numbers and cells[6].strip() == f"{len(name) % 4} of 3"
    assert out.count("typical:heads is lossy") == len(lossy) and "ms per step" in out


def test_auto_tree_and_its_curve_are_recorded(files: dict[str, str], uncompiled: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(files, "--heads", files["first"], "--tree", "auto", "--drafters", "heads", "--limit", "1", "--dtype", "bfloat16") == 0
    document = json.loads(capsys.readouterr().out.rstrip("\n").split("\n")[-1])
    tree = document["settings"]["trees"]["heads"]
    assert tree["num_nodes"] in [row["num_nodes"] for row in tree["auto_curve"]]
    assert [row["drafter"] for row in document["rows"]] == ["base", "base_compiled", "transformers_generate", "heads"]
    assert document["settings"]["dtype"] == "bfloat16" and document["prompts"]["num"] == 1
    assert document["rows"][3]["first_difference_margin"] is not None  # reported in bfloat16, also where nothing differs


def test_broken_drafter_is_seen(
    files: dict[str, str], uncompiled: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control of every `identical_outputs == 1`: a row that answers wrongly is not identical."""
    real = bench_measure.GeneratorRow.answer

    def wrong(self: Any, batch: Batch) -> BatchAnswer:
        answered = real(self, batch)
        if self.name == "heads":
            answered.token_ids[0][3] = (answered.token_ids[0][3] + 1) % 300
        return answered

    monkeypatch.setattr(bench_measure.GeneratorRow, "answer", wrong)
    assert run(files, "--heads", files["first"], "--drafters", "heads") == 0
    out = capsys.readouterr().out.rstrip("\n").split("\n")
    row = json.loads(out[-1])["rows"][3]
    assert row["identical_outputs"] == 0.0 and len(row["first_difference_margin"]["values"]) == 3
    assert any(line.startswith("heads: 3 answers differ from plain decoding's") for line in out)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--drafters", "prompt_lokup"], "unknown drafter 'prompt_lokup' (did you mean 'prompt_lookup'?)"),
        (["--max-new-tokens", "0"], "--max-new-tokens 0"),
        (["--batch-size", "0"], "--batch-size 0"),
        (["--limit", "0"], "--limit 0"),
        (["--json", "/proc/no/out.json"], "--json /proc/no/out.json cannot be written"),
        (["--json", "/proc"], "--json /proc is a folder"),
        (["--prompts", "/nowhere.jsonl"], "--prompts /nowhere.jsonl: no such file"),
        (["--max-new-tokens", "500"], "pass the context of 512 tokens"),
        (["--heads", "/nowhere"], "--heads /nowhere: no such folder"),
        (["--drafters", "heads,draft_model"], "--drafters draft_model needs --draft-model"),
        (["--heads", "a", "b", "--drafters", "suffix"], "--heads a b draft nothing here: add heads to --drafters"),
        (["--draft-model", "/nowhere"], "--draft-model /nowhere drafts nothing here: add draft_model to --drafters"),
        (["--temperature", "-1"], "--temperature -1.0: must be 0 (greedy), or 0.001 and more"),
        (["--top-p", "0.5"], "--top-p 0.5 has no effect at --temperature 0"),
        (["--verifier", "typical"], "--verifier typical is for sampling"),
        (["--quality"], "can be judged: rows need a `reference`"),
        (["--heads", "none"], "--heads none: the base rows decode without heads; leave `heads` out of --drafters instead"),
        ([], "--heads is needed"),
    ],
)
def test_bad_input_is_one_line(files: dict[str, str], capsys: pytest.CaptureFixture[str], options: list[str], message: str) -> None:
    assert run(files, *options) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ") and message in captured.err and captured.err.count("\n") == 1
    assert not captured.out


def test_outputs_are_checked_before_the_model_is_loaded(files: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(files | {"base": "/nowhere"}, "--json", "/proc/no/out.json") == 2
    assert "--json" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--drafters", "heads", "--tree", "beam:4"], "the `heads` drafter chooses its own here: with heads give --tree chain"),
        (["--tree", "chain"], "the `prompt_lookup` drafter chooses its own here"),
        (["--tree", "chain", "--drafters", "heads,suffix"], "the `suffix` drafter chooses its own here"),
    ],
)
def test_a_verifier_that_a_drafter_cannot_serve_is_told_before_anything_is_loaded(
    files: dict[str, str], capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    shown = ["--temperature", "1", "--verifier", "block", *options]
    assert main(["bench", "--base", "/nowhere", "--heads", files["first"], "--prompts", files["prompts.jsonl"], *shown]) == 2
    error = capsys.readouterr().err
    assert message in error and "out of --drafters" in error and error.count("\n") == 1


def test_heads_rows_are_named_by_folder() -> None:
    assert heads_row_names(["x"]) == ["heads"]
    assert heads_row_names(["pretrained", "runs/b", "runs/c/"]) == ["heads", "heads:b", "heads:c"]
    assert heads_row_names(["x", "a/last", "b/last"]) == ["heads", "heads:last", "heads:b/last"]
    with pytest.raises(ValueError, match="same name"):
        heads_row_names(["x", "a/last", "a/last", "a/last"])
