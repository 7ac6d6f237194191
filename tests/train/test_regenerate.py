"""The regenerate command on a tiny model: exact tokens, several turns, being killed and continued, refused input."""

from __future__ import annotations

import errno
import gzip
import hashlib
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from medusa_heads.lock import lock_output
from tests.tiny_models import TURN_END, VOCAB_SIZE, tiny_model, tiny_tokenizer
from train import regenerate
from train.answers_file import AnswersFile
from train.chat_turns import ChatTurns, join
from train.conversations import read_conversations
from train.jobs import Job
from train.regenerate import Regenerate
from train.tokenization import tokenize_conversation

PROMPTS: list[dict[str, Any]] = [
    {"id": "a", "source": "s", "category": "c", "messages": [{"role": "user", "content": "the cat sat"}]},
    {
        "id": "b",
        "messages": [
            {"role": "system", "content": "hello"},
            {"role": "user", "content": "what is it"},
            {"role": "assistant", "content": "an old answer"},
            {"role": "user", "content": "the dog ran"},
            {"role": "user", "content": "to the house"},
        ],
    },
    *({"id": f"n{i}", "messages": [{"role": "user", "content": "how are you " * (i + 1)}]} for i in range(5)),
]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Models this small only lose time to threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("base")
    tiny_model("llama").save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    return write(tmp_path / "prompts.jsonl", PROMPTS)


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def command(base: str, output: Path, *prompts: Path, **options: Any) -> Regenerate:
    defaults: dict[str, Any] = {"max_new_tokens": 12, "device": "cpu", "batch_size": 3}
    return Regenerate(base=base, output=output, prompts=tuple(map(str, prompts)), **(defaults | options))


def read(path: Path) -> list[dict[str, Any]]:
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return [json.loads(line) for line in data.splitlines()]


# ---------------------------------------------------------------- what is written


def test_answers_are_the_models_own_tokens_in_order(base: str, prompts: Path, tmp_path: Path) -> None:
    command(base, tmp_path / "out.jsonl", prompts).run()
    rows = read(tmp_path / "out.jsonl")
    assert [row["id"] for row in rows] == [prompt["id"] for prompt in PROMPTS]
    model: Any = tiny_model("llama")
    tokenizer: Any = tiny_tokenizer()
    for row in rows:
        for start, end in row["assistant_spans"]:
            prefix = torch.tensor([row["input_ids"][:start]])
            output = model.generate(prefix, attention_mask=torch.ones_like(prefix), max_new_tokens=12, do_sample=False)
            assert output[0, start:].tolist() == row["input_ids"][start:end]
    assert rows[0]["source"] == "s" and rows[0]["category"] == "c"
    first = tokenizer.apply_chat_template(PROMPTS[0]["messages"], add_generation_prompt=True)["input_ids"]
    assert rows[0]["input_ids"][: len(first)] == first and rows[0]["assistant_spans"][0][0] == len(first)


def test_every_user_turn_is_answered_and_old_answers_are_dropped(base: str, prompts: Path, tmp_path: Path) -> None:
    command(base, tmp_path / "out.jsonl", prompts).run()
    row = read(tmp_path / "out.jsonl")[1]
    assert [m["role"] for m in row["messages"]] == ["system", "user", "assistant", "user", "assistant", "user", "assistant"]
    assert "an old answer" not in json.dumps(row["messages"])
    assert len(row["assistant_spans"]) == len(row["finish_reasons"]) == 3
    # What the model saw is the template's text, with its own answers in between.
    tokenizer: Any = tiny_tokenizer()
    answers = iter(row["assistant_spans"])
    for message in row["messages"]:
        if message["role"] == "assistant":
            start, end = next(answers)
            message["content"] = tokenizer.decode(row["input_ids"][start:end]).removesuffix("<|im_end|>")
    text = tokenizer.apply_chat_template(row["messages"], tokenize=False)
    assert tokenizer.decode(row["input_ids"]) == text.removesuffix("<|im_end|>\n" if row["finish_reasons"][-1] == "length" else "\n")


def test_end_of_turn_is_never_doubled(base: str) -> None:
    chat = ChatTurns(tiny_tokenizer())
    pieces = chat.pieces([[{"role": "user", "content": "a"}], [{"role": "user", "content": "b"}]])
    assert pieces[1][0] == TURN_END
    closed, open_ended = [*pieces[0], 50, TURN_END], [*pieces[0], 50]
    assert join(closed, pieces[1]) == join(open_ended, pieces[1])


def test_private_use_characters_in_a_prompt_are_text_like_any() -> None:
    """Icons of a font, say: earlier answers are found in the rendering by a character that no message holds."""
    chat, icons = ChatTurns(tiny_tokenizer()), "icon \ue000 and \ue001"
    turns = [[{"role": "system", "content": "\ue002"}, {"role": "user", "content": icons}], [{"role": "user", "content": f"{icons} again"}]]
    plain = chat.pieces([[{"role": "system", "content": "s"}, {"role": "user", "content": "a"}], [{"role": "user", "content": "b"}]])
    text = [chat.tokenizer.decode(piece) for piece in plain]
    expected = [text[0].replace("\ns<", "\n\ue002<").replace("\na<", f"\n{icons}<"), text[1].replace("\nb<", f"\n{icons} again<")]
    assert [chat.tokenizer.decode(piece) for piece in chat.pieces(turns)] == expected


def test_the_output_is_training_data(base: str, prompts: Path, tmp_path: Path) -> None:
    command(base, tmp_path / "out.jsonl", prompts).run()
    for conversation, row in zip(read_conversations([tmp_path / "out.jsonl"]), read(tmp_path / "out.jsonl"), strict=True):
        tokens = tokenize_conversation(conversation, tiny_tokenizer())
        assert tokens.input_ids == row["input_ids"]
        assert sum(tokens.assistant_mask) == sum(end - start for start, end in row["assistant_spans"])


def test_meta_records_what_the_answers_depend_on(base: str, prompts: Path, tmp_path: Path) -> None:
    command(base, tmp_path / "out.jsonl", prompts, limit=3).run()
    meta = json.loads((tmp_path / "out.jsonl.meta.json").read_text())
    assert meta["settings"]["dtype"] == "float32" and len(meta["settings"]["fingerprint"]) == 64
    assert meta["counts"]["conversations"] == 3 and meta["counts"]["answers"] == 5
    assert meta["counts"]["answer_tokens"] == sum(e - s for row in read(tmp_path / "out.jsonl") for s, e in row["assistant_spans"])
    assert meta["tokens_per_second"] > 0 and meta["attention"] == "grouped_sdpa" and "transformers" in meta["versions"]


def test_gz_in_and_out_equals_plain(base: str, prompts: Path, tmp_path: Path) -> None:
    packed = tmp_path / "prompts.jsonl.gz"
    packed.write_bytes(gzip.compress(prompts.read_bytes()))
    command(base, tmp_path / "plain.jsonl", prompts).run()
    command(base, tmp_path / "packed.jsonl.gz", packed).run()
    assert read(tmp_path / "packed.jsonl.gz") == read(tmp_path / "plain.jsonl")


def test_batch_size_changes_nothing_and_samples_are_numbered(base: str, prompts: Path, tmp_path: Path) -> None:
    options = {"temperature": 1.0, "samples": 2, "seed": 4}
    command(base, tmp_path / "one.jsonl", prompts, **options, batch_size=1).run()
    command(base, tmp_path / "many.jsonl", prompts, **options, batch_size=16).run()
    rows = read(tmp_path / "one.jsonl")
    assert rows == read(tmp_path / "many.jsonl")
    assert [row["id"] for row in rows][:4] == ["a#0", "a#1", "b#0", "b#1"]
    assert rows[0]["input_ids"] != rows[1]["input_ids"]


def test_long_prompts_are_skipped_and_long_conversations_cut_short(base: str, tmp_path: Path) -> None:
    turn = {"role": "user", "content": "x" * 230}
    rows = [{"id": "long", "messages": [{"role": "user", "content": "x" * 600}]}, {"id": "turns", "messages": [turn] * 4}]
    command(base, tmp_path / "out.jsonl", write(tmp_path / "p.jsonl", rows)).run()
    [row] = read(tmp_path / "out.jsonl")
    counts = json.loads((tmp_path / "out.jsonl.meta.json").read_text())["counts"]
    assert row["id"] == "turns" and 1 <= len(row["assistant_spans"]) < 4 and len(row["input_ids"]) <= 512
    assert counts["skipped_too_long"] == ["long"] and counts["cut_short_by_context"] == 1


# ---------------------------------------------------------------- killed and continued


class Killed(BaseException):
    pass


def kill_after(count: int, monkeypatch: pytest.MonkeyPatch, torn: bytes = b"") -> None:
    """Stops the command after `count` rows as kill -9 would: nothing that is still to be written gets written."""
    append = AnswersFile.append

    def append_then_die(self: AnswersFile, row: dict[str, Any]) -> None:
        append(self, row)
        if len(self.done) == count:
            self.flush()
            assert self._file is not None
            self._file.write(torn)
            raise Killed

    monkeypatch.setattr(AnswersFile, "append", append_then_die)


@pytest.mark.parametrize("torn", [b"", b'{"id": "n4", "mess'])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_killed_and_continued_equals_uninterrupted(
    base: str, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, torn: bytes, temperature: float
) -> None:
    options = {"temperature": temperature}
    command(base, tmp_path / "whole.jsonl", prompts, **options).run()
    with monkeypatch.context() as patch, pytest.raises(Killed):
        kill_after(3, patch, torn)
        command(base, tmp_path / "out.jsonl", prompts, **options).run()
    assert not (tmp_path / "out.jsonl").exists()
    kept = (tmp_path / "out.jsonl.partial").read_bytes()
    assert kept.endswith(torn) and kept.count(b"\n") == 4

    answered: list[str] = []
    take = Job.take

    def take_noted(self: Job, *arguments: Any) -> None:
        answered.append(self.id)
        take(self, *arguments)

    monkeypatch.setattr(Job, "take", take_noted)
    command(base, tmp_path / "out.jsonl", prompts, **options).run()
    assert (tmp_path / "out.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert not (tmp_path / "out.jsonl.partial").exists()
    already = {json.loads(line)["id"] for line in kept.splitlines()[1:4]}
    assert len(already) == 3 and not already & set(answered) and len(set(answered)) == 4


def test_killed_before_the_first_line_is_whole(base: str, prompts: Path, tmp_path: Path) -> None:
    (tmp_path / "out.jsonl.partial").write_text('{"settings": {"ba')
    command(base, tmp_path / "out.jsonl", prompts).run()
    assert len(read(tmp_path / "out.jsonl")) == len(PROMPTS)


def test_temporary_files_of_a_killed_run_are_removed(talkative: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"self_prompts": 20, "batch_size": 8}
    command(talkative, tmp_path / "whole.jsonl", **options).run()
    own = next(path.name for path in tmp_path.glob("whole.jsonl.self-prompts-*")).replace("whole", "out")
    left = [tmp_path / name for name in (".out.jsonl-7.jsonl", ".out.jsonl.meta.json-7.json", f".{own}-7.jsonl")]
    others = [tmp_path / name for name in (".out.jsonl-7.jsonl-7.jsonl", ".other.jsonl-7.jsonl", "out.jsonl-7.jsonl")]
    for path in left + others:
        path.write_text("half")
    command(talkative, tmp_path / "out.jsonl", **options).run()
    assert not any(path.exists() for path in left) and all(path.exists() for path in others)


def test_a_run_that_is_refused_removes_nothing(base: str, prompts: Path, tmp_path: Path) -> None:
    lock = lock_output(tmp_path / "out.jsonl", "--output")
    (tmp_path / ".out.jsonl-7.jsonl").write_text("being written")
    with pytest.raises(ValueError, match="another run is writing there"):
        command(base, tmp_path / "out.jsonl", prompts).run()
    lock.release()
    assert (tmp_path / ".out.jsonl-7.jsonl").exists()


def test_finished_work_is_not_repeated(base: str, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command(base, tmp_path / "out.jsonl", prompts).run()
    monkeypatch.setattr(Regenerate, "_answer", lambda *args: pytest.fail("answered again"))
    command(base, tmp_path / "out.jsonl", prompts, batch_size=2).run()
    with pytest.raises(ValueError, match="max_new_tokens was 12, is now 13"):
        command(base, tmp_path / "out.jsonl", prompts, max_new_tokens=13).run()


def test_a_partial_with_other_settings_is_refused(base: str, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch, pytest.raises(Killed):
        kill_after(2, patch)
        command(base, tmp_path / "out.jsonl", prompts).run()
    before = (tmp_path / "out.jsonl.partial").read_bytes()
    with pytest.raises(ValueError, match=r"seed was 0, is now 1"):
        command(base, tmp_path / "out.jsonl", prompts, seed=1).run()
    write(prompts, PROMPTS[:-1])
    with pytest.raises(ValueError, match="prompts was"):
        command(base, tmp_path / "out.jsonl", prompts).run()
    assert (tmp_path / "out.jsonl.partial").read_bytes() == before


def test_a_foreign_output_is_not_overwritten(base: str, prompts: Path, tmp_path: Path) -> None:
    (tmp_path / "out.jsonl").write_text("mine")
    with pytest.raises(ValueError, match="not made here"):
        command(base, tmp_path / "out.jsonl", prompts).run()
    assert (tmp_path / "out.jsonl").read_text() == "mine"


# ---------------------------------------------------------------- parts, duplicates, mixtures


def test_shards_together_are_the_whole_and_resume_alone(base: str, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command(base, tmp_path / "whole.jsonl.gz", prompts).run()
    with monkeypatch.context() as patch, pytest.raises(Killed):
        kill_after(1, patch)
        command(base, tmp_path / "out.jsonl.gz", prompts, shard="0/2").run()
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in "01":
        monkeypatch.setenv("RANK", rank)
        command(base, tmp_path / "out.jsonl.gz", prompts).run()
    parts = sorted(tmp_path.glob("out-0*.gz"))
    assert [part.name for part in parts] == ["out-00000-of-00002.jsonl.gz", "out-00001-of-00002.jsonl.gz"]
    rows = [read(part) for part in parts]
    whole = read(tmp_path / "whole.jsonl.gz")
    assert all(rows) and sorted(rows[0] + rows[1], key=lambda row: row["id"]) == sorted(whole, key=lambda row: row["id"])
    assert sorted(c.id for c in read_conversations(parts)) == sorted(row["id"] for row in whole)
    with pytest.raises(ValueError, match="shard 0 of 99 holds none of the 7 prompts"):
        command(base, tmp_path / "out.jsonl.gz", prompts, shard="0/99").run()


def test_own_prompts_are_shared_out_too(talkative: str, tmp_path: Path) -> None:
    for shard in ("0/1", "0/2", "1/2"):
        command(talkative, tmp_path / "out.jsonl", self_prompts=30, batch_size=8, shard=shard).run()
    parts = [read(path) for path in sorted(tmp_path.glob("out-0000?-of-00002.jsonl"))]
    ids = [row["id"] for part in parts for row in part]
    assert len(parts) == 2 and all(parts) and len(set(ids)) == len(ids)
    assert {row["id"] for row in read(tmp_path / "out.jsonl")} <= set(ids), "what is new within a shard may be old in the whole"


def test_the_same_prompt_is_answered_once_and_counted(base: str, prompts: Path, tmp_path: Path) -> None:
    again = write(tmp_path / "again.jsonl", [{"id": "z", "messages": [{"role": "user", "content": " The CAT  sat"}]}])
    command(base, tmp_path / "out.jsonl", prompts, again).run()
    assert [row["id"] for row in read(tmp_path / "out.jsonl")] == [prompt["id"] for prompt in PROMPTS]
    assert json.loads((tmp_path / "out.jsonl.meta.json").read_text())["duplicates"] == 1


def test_greedy_and_sampled_answers_in_one_file(base: str, prompts: Path, tmp_path: Path) -> None:
    command(base, tmp_path / "greedy.jsonl", prompts).run()
    command(base, tmp_path / "sampled.jsonl", prompts, temperature=1.0).run()
    command(base, tmp_path / "mixed.jsonl", prompts, temperature=1.0, sampled_share=0.5).run()
    greedy, sampled, mixed = (read(tmp_path / f"{name}.jsonl") for name in ("greedy", "sampled", "mixed"))
    assert {row["temperature"] for row in mixed} == {0.0, 1.0}
    assert mixed == [s if row["temperature"] else g for g, s, row in zip(greedy, sampled, mixed, strict=True)]


def test_the_manifest_tells_the_file_and_its_contents(base: str, prompts: Path, tmp_path: Path) -> None:
    command(base, tmp_path / "out.jsonl.gz", prompts).run()
    manifest, rows = json.loads((tmp_path / "out.jsonl.gz.meta.json").read_text()), read(tmp_path / "out.jsonl.gz")
    assert manifest["file"] == "out.jsonl.gz" and manifest["sha256"] == hashlib.sha256((tmp_path / "out.jsonl.gz").read_bytes()).hexdigest()
    assert manifest["counts"]["conversations"] == len(rows) and manifest["counts"]["tokens"] == sum(len(row["input_ids"]) for row in rows)
    assert manifest["counts"]["tokens_from"] == {"model": len(rows)} and manifest["settings"]["shard"] == "0/1"


def test_a_full_disk_is_explained_and_leaves_what_was_finished(
    base: str, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command(base, tmp_path / "whole.jsonl", prompts).run()
    write_row = AnswersFile._write

    class FullDisk(io.BytesIO):
        def write(self, data: Any) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    def write_to_full_disk(self: AnswersFile, row: dict[str, Any]) -> None:
        if len(self.done) == 3:
            self._file = FullDisk()
        write_row(self, row)

    with (
        monkeypatch.context() as patch,
        pytest.raises(ValueError, match=r"--output .*No space left.*make room; the same command continues"),
    ):
        patch.setattr(AnswersFile, "_write", write_to_full_disk)
        command(base, tmp_path / "out.jsonl", prompts).run()
    assert not (tmp_path / "out.jsonl").exists()
    command(base, tmp_path / "out.jsonl", prompts).run()
    assert (tmp_path / "out.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


# ---------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"messages": [', "p.jsonl:3: broken JSON"),
        ("[1]", "p.jsonl:3: expected"),
        ('{"messages": []}', "p.jsonl:3: empty conversation"),
        ('{"messages": [{"role": "system", "content": "x"}]}', "p.jsonl:3: no user turn"),
        ('{"messages": [{"role": "user", "content": " "}]}', "p.jsonl:3: message 1: the user says nothing"),
        ('{"messages": [{"role": "robot", "content": "x"}]}', "p.jsonl:3: message 1 is not"),
        ('{"messages": [{"role": "user", "content": 3}]}', "p.jsonl:3: message 1 has a content of type int"),
        ('{"messages": [{"role": "user", "content": "\\ud800"}]}', "p.jsonl:3: message 1 holds half"),
        ('{"category": "\\udfff", "messages": [{"role": "user", "content": "x"}]}', "p.jsonl:3: category holds half"),
        ('{"id": "a", "messages": [{"role": "user", "content": "x"}]}', "p.jsonl:3: id 'a' is already"),
    ],
)
def test_broken_lines_are_named(base: str, tmp_path: Path, line: str, message: str) -> None:
    path = write(tmp_path / "p.jsonl", [PROMPTS[0], "", line, PROMPTS[1]])
    with pytest.raises(ValueError) as error:
        command(base, tmp_path / "out.jsonl", path).run()
    assert message in str(error.value)
    assert not list(tmp_path.glob("out*"))


def test_a_template_without_generation_prompt_is_refused(prompts: Path, tmp_path: Path) -> None:
    folder, tokenizer = tmp_path / "base", tiny_tokenizer()
    tiny_model("llama").save_pretrained(folder)
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    tokenizer.save_pretrained(folder)
    with pytest.raises(ValueError, match="no generation prompt"):
        command(str(folder), tmp_path / "out.jsonl", prompts).run()


def test_a_turn_the_template_refuses_is_named(prompts: Path, tmp_path: Path) -> None:
    folder, tokenizer = tmp_path / "base", tiny_tokenizer()
    tiny_model("llama").save_pretrained(folder)
    no_system = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    tokenizer.chat_template = no_system + tokenizer.chat_template
    tokenizer.save_pretrained(folder)
    with pytest.raises(ValueError, match=r"prompts.jsonl:2: .*no system role"):
        command(str(folder), tmp_path / "out.jsonl", prompts).run()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"samples": 2}, "--samples 2"),
        ({"samples": 0}, "--samples 0"),
        ({"sampled_share": 0.5}, "--sampled-share with --temperature 0"),
        ({"sampled_share": 0.0, "temperature": 1.0}, r"--sampled-share 0.0 is not in \(0, 1\]"),
        ({"shard": "2/2"}, "--shard 2/2: write I/N"),
        ({"batch_size": 0}, "--batch-size 0"),
        ({"max_new_tokens": 0}, "--max-new-tokens 0"),
        ({"limit": 0}, "--limit 0"),
        ({"self_prompts": -1}, "--self-prompts -1: it must be 0 or more"),
        ({"self_prompts_like": ("like.jsonl",)}, "--self-prompts is 0"),
        ({"top_p": 0.0}, "--top-p"),
        ({"device": "tpu?"}, "--device"),
    ],
)
def test_impossible_options_are_refused(base: str, prompts: Path, tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        command(base, tmp_path / "out.jsonl", prompts, **options).run()


def test_an_output_that_would_be_read_as_parquet_is_refused(base: str, prompts: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--output .*answers\.parquet: answers are written as JSONL: name it \.jsonl or \.jsonl\.gz"):
        command(base, tmp_path / "answers.parquet", prompts).run()


def test_missing_or_empty_prompts_are_refused(base: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="give --prompts"):
        command(base, tmp_path / "out.jsonl").run()
    with pytest.raises(ValueError, match=r"gone.jsonl"):
        command(base, tmp_path / "out.jsonl", tmp_path / "gone.jsonl").run()
    with pytest.raises(ValueError, match="no prompts"):
        command(base, tmp_path / "out.jsonl", write(tmp_path / "empty.jsonl", [])).run()


def test_an_unwritable_output_is_refused(base: str, prompts: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="--output"):
        command(base, tmp_path / "file" / "out.jsonl", prompts).run()


# ---------------------------------------------------------------- prompts of its own


@pytest.fixture(scope="module")
def talkative(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model that mostly writes plain text and ends its turns after some tokens."""
    folder = tmp_path_factory.mktemp("talkative")
    model, tokenizer = tiny_model("llama"), tiny_tokenizer()  # type: Any, Any
    scale = torch.tensor([1.0 if tokenizer.decode([t]).isascii() and t > TURN_END else 0.0 for t in range(VOCAB_SIZE)])
    scale[TURN_END] = 2.0
    weight = torch.nn.functional.normalize(model.lm_head.weight.data, dim=1)
    model.lm_head.weight.data = weight * scale[:, None] * 3
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


def test_self_prompts_come_from_the_template_and_are_answered(talkative: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "out.jsonl"
    command(talkative, output, self_prompts=40, batch_size=16).run()
    rows, meta = read(output), json.loads((tmp_path / "out.jsonl.meta.json").read_text())
    texts = [row["messages"][0]["content"] for row in rows]
    assert len(rows) == meta["self_prompts"]["kept"] > 3 and sum(meta["self_prompts"].values()) == 40
    assert len(set(texts)) == len(texts) and all(len(text) >= 8 and "<|" not in text for text in texts)
    assert all(row["source"] == "self-written" and row["assistant_spans"] for row in rows)
    prefix, end = ChatTurns(tiny_tokenizer()).before_user_text()
    assert end == TURN_END and tiny_tokenizer().decode(prefix) == "<|im_start|>user\n"
    assert "kept" in capsys.readouterr().err


def test_self_prompts_like_given_ones(talkative: str, tmp_path: Path) -> None:
    """Each begins with some of the first words of its example, which is itself neither answered nor repeated."""
    examples = ["one two three four five six seven eight nine ten", "the cat sat on the mat and the dog ran to the house"]
    like = write(tmp_path / "like.jsonl", [{"messages": [{"role": "user", "content": text}]} for text in examples])
    output = tmp_path / "o.jsonl"
    command(talkative, output, self_prompts=40, batch_size=16, self_prompts_like=(str(like),)).run()
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    beginnings = set()
    for row in rows:
        text, example = row["messages"][0]["content"], examples[int(row["id"].split("-")[-1]) % 2]
        words = example.split()
        shared = max(n for n in range(len(words) + 1) if text.startswith(" ".join(words[:n])))
        assert shared >= 2 and text != example
        beginnings.add(shared)
    assert len(rows) > 3 and len(beginnings) > 1, "the lengths of the beginnings vary"


def test_self_prompts_beside_files_and_after_a_kill(talkative: str, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"self_prompts": 20, "batch_size": 8}
    command(talkative, tmp_path / "whole.jsonl", prompts, **options).run()
    with monkeypatch.context() as patch, pytest.raises(Killed):
        kill_after(4, patch)
        command(talkative, tmp_path / "out.jsonl", prompts, **options).run()
    monkeypatch.setattr(regenerate, "write_self_prompts", lambda *args, **kwargs: pytest.fail("written again"))
    command(talkative, tmp_path / "out.jsonl", prompts, **options).run()
    assert (tmp_path / "out.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert {row["source"] for row in read(tmp_path / "out.jsonl")} >= {"s", "self-written"}


@pytest.mark.parametrize(("suffix", "options"), [("", {}), ("#1", {"samples": 2, "temperature": 1.0, "sampled_share": 0.8})])
def test_earlier_prompts_of_its_own_beside_new_ones_need_another_seed(
    talkative: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str, options: dict[str, Any]
) -> None:
    """Both would have one id, and answers are kept by id. It is told before the model is loaded."""
    earlier = [
        {"id": f"self-0-00000{i}{suffix}", "messages": [{"role": "user", "content": f"the earlier prompt number {i}"}]} for i in (7, 3)
    ]
    options = {"self_prompts": 4, "batch_size": 8} | options
    with monkeypatch.context() as patch:
        patch.setattr(Regenerate, "_load", lambda *_: pytest.fail("loaded"))
        with pytest.raises(ValueError, match=rf"p.jsonl:2: the id 'self-0-000003{suffix}' .* that the model writes .* another --seed"):
            command(talkative, tmp_path / "o.jsonl", write(tmp_path / "p.jsonl", earlier), **options).run()
    command(talkative, tmp_path / "o.jsonl", tmp_path / "p.jsonl", **(options | {"self_prompts": 40, "seed": 1})).run()
    ids = [row["id"] for row in read(tmp_path / "o.jsonl")]
    assert len(set(ids)) == len(ids) and any(row_id.startswith("self-0") for row_id in ids) and any("self-1" in row_id for row_id in ids)


def test_a_run_that_answered_nothing_blocks_no_other_settings(
    base: str, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "o.jsonl"
    with monkeypatch.context() as patch:
        patch.setattr(Regenerate, "_answer", lambda *_: (_ for _ in ()).throw(ValueError("no answer")))
        with pytest.raises(ValueError, match="no answer"):
            command(base, output, prompts).run()
    assert (tmp_path / "o.jsonl.partial").exists()
    command(base, output, prompts, max_new_tokens=5).run()
    assert len(output.read_text().splitlines()) == len(PROMPTS)
