"""The map over whole sources: what is kept, cut and skipped, and the cache of the result."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from tests.train.chat_templates import (
    CHATML,
    CHATML_PROMPT,
    LLAMA3,
    MARKED,
    MULTI,
    QWEN3,
    SINGLE,
    Messages,
    make_tokenizer,
    turns,
)
from train import tokenized_data
from train.conversations import Conversation
from train.packing import num_supervised_slots
from train.tokenization import tokenize_conversation
from train.tokenized_data import DataCounts, tokenize_dataset


def write(path: Path, *conversations: Messages | dict[str, Any]) -> Path:
    rows = [{"messages": c} if isinstance(c, list) else c for c in conversations]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    lost = turns("Hi " * 200, "Hello")
    exact = {"id": "exact", "input_ids": [40, 41, 42], "assistant_spans": [[1, 3]]}
    return write(tmp_path / "a.jsonl", SINGLE, turns("Hi", "Hello " * 200), lost, exact, MULTI)


def test_counts_cuts_and_skipped_rows(file: Path) -> None:
    tokenizer = make_tokenizer(CHATML)
    rows, counts = tokenize_dataset([file], tokenizer, max_length=120)
    assert rows.column_names == ["id", "input_ids", "assistant_mask"]
    assert list(rows["id"]) == ["a.jsonl:1", "a.jsonl:2", "exact", "a.jsonl:5"]
    tokens, masks = [len(ids) for ids in rows["input_ids"]], list(rows["assistant_mask"])
    assert tokens[1] == 120 and all(n < 120 for n in tokens[:1] + tokens[2:])
    assert counts == DataCounts(rows=4, skipped=1, cut=2, circles=1, tokens=sum(tokens), supervised_tokens=sum(map(sum, masks)))
    assert counts.supervised_rate == counts.supervised_tokens / counts.tokens
    whole = tokenize_conversation(Conversation("c", tuple(turns("Hi", "Hello " * 200))), tokenizer)
    assert (rows[1]["input_ids"], rows[1]["assistant_mask"]) == (whole.input_ids[:120], whole.assistant_mask[:120])
    assert (rows[2]["input_ids"], rows[2]["assistant_mask"]) == ([40, 41, 42], [False, True, True])


def test_cut_circles_ends_a_conversation_where_an_answer_has_said_the_same_twice(tmp_path: Path) -> None:
    block = list(range(40, 70))
    asked, circling = [1, 2, *block, *block, *block], [3, *block, *block, *block[:9]]
    conversations = {
        "in the question": {"input_ids": [*asked, 7, 8, 9], "assistant_spans": [[len(asked), len(asked) + 3]]},
        "in the first answer": {"input_ids": [1, 2, *circling, 5, 6, 7], "assistant_spans": [[2, 2 + len(circling)], [72, 75]]},
        "in the last answer": {"input_ids": [1, 8, 9, 2, *circling], "assistant_spans": [[1, 3], [4, 4 + len(circling)]]},
    }
    data = write(tmp_path / "a.jsonl", *({"id": name} | row for name, row in conversations.items()))
    rows, counts = tokenize_dataset([data], make_tokenizer(None), max_length=100, cut_circles=True)
    assert list(rows["input_ids"]) == [[*asked, 7, 8, 9], [1, 2, 3, *block, *block], [1, 8, 9, 2, 3, *block, *block]]
    assert [sum(mask) for mask in rows["assistant_mask"]] == [3, 61, 63]
    assert (counts.circles, counts.cut) == (2, 0)
    whole, counts = tokenize_dataset([data], make_tokenizer(None), max_length=70)
    assert [len(ids) for ids in whole["input_ids"]] == [70, 70] and (counts.circles, counts.cut) == (2, 3)
    rows, counts = tokenize_dataset([data], make_tokenizer(None), max_length=64, cut_circles=True)
    assert (counts.circles, counts.cut) == (2, 2), "cut at max_length before it is cut for its circles"


def test_several_processes_give_the_same_rows(file: Path) -> None:
    tokenizer = make_tokenizer(QWEN3)
    one, two = (tokenize_dataset([file], tokenizer, max_length=200, num_proc=n) for n in (None, 2))
    assert one[0].to_list() == two[0].to_list() and one[1] == two[1]


def test_the_cache_returns_the_same_rows_without_work(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, cache = make_tokenizer(CHATML), tmp_path / "cache"
    plain = tokenize_dataset([file], tokenizer, max_length=120)
    first = tokenize_dataset([file], tokenizer, max_length=120, cache_dir=cache)
    monkeypatch.setattr(tokenized_data, "_map", lambda *_: pytest.fail("tokenised again"))
    again = tokenize_dataset([file], make_tokenizer(CHATML), max_length=120, cache_dir=cache)
    assert plain[0].to_list() == first[0].to_list() == again[0].to_list()
    assert plain[1] == first[1] == again[1]
    assert len(list(cache.iterdir())) == 1, "one finished folder and no partial one"


@pytest.mark.parametrize("name", ["counts.json", "rows/state.json", "rows/dataset_info.json", "rows/data-00000-of-00001.arrow"])
@pytest.mark.parametrize("left", [None, 0.0, 0.5], ids=["absent", "empty", "cut"])
def test_a_damaged_cache_is_made_anew(file: Path, tmp_path: Path, name: str, left: float | None) -> None:
    tokenizer, cache = make_tokenizer(CHATML), tmp_path / "cache"
    rows, counts = tokenize_dataset([file], tokenizer, max_length=120, cache_dir=cache)
    expected = rows.to_list()
    [damaged] = cache.glob(f"*/{name}")
    whole = damaged.read_bytes()
    damaged.unlink()
    if left is not None:
        damaged.write_bytes(whole[: int(left * len(whole))])
    again = tokenize_dataset([file], tokenizer, max_length=120, cache_dir=cache)
    assert again[0].to_list() == expected and again[1] == counts


def test_data_that_change_while_they_are_read_are_not_kept(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They would stand under the key of the earlier content."""
    tokenizer, cache, before = make_tokenizer(CHATML), tmp_path / "cache", file.read_text()
    real = tokenized_data._map

    def during(*arguments: Any, **options: Any) -> Any:
        write(file, SINGLE)
        return real(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(tokenized_data, "_map", during)
        with pytest.raises(ValueError, match=r"data: .*a\.jsonl changed while it was read: start again"):
            tokenize_dataset([file], tokenizer, max_length=120, cache_dir=cache)
    assert not list(cache.iterdir())
    file.write_text(before)
    assert len(tokenize_dataset([file], tokenizer, max_length=120, cache_dir=cache)[0]) == 4


def test_the_cache_depends_on_all_that_changes_the_rows(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache"

    def folders_after(paths: list[Path], template: str, max_length: int, limit: int | None = None) -> int:
        tokenize_dataset(paths, make_tokenizer(template), max_length=max_length, limit=limit, cache_dir=cache)
        return len(list(cache.iterdir()))

    other = write(tmp_path / "b.jsonl", SINGLE)
    assert [
        folders_after([file], CHATML, 120),
        folders_after([file], CHATML, 100),
        folders_after([file], LLAMA3, 120),
        folders_after([file], CHATML, 120, 2),
        folders_after([file, other], CHATML, 120),
    ] == [1, 2, 3, 4, 5]
    write(other, MULTI)
    assert folders_after([file, other], CHATML, 120) == 6
    tokenize_dataset([file], make_tokenizer(CHATML), max_length=120, data_format="messages", cache_dir=cache)
    assert len(list(cache.iterdir())) == 7
    monkeypatch.setattr(tokenized_data, "CACHE_VERSION", 0)
    assert folders_after([file], CHATML, 120) == 8
    assert folders_after([file], CHATML, 120) == 8
    grown = make_tokenizer(CHATML)
    grown.add_tokens(["the answer"])
    tokenize_dataset([file], grown, max_length=120, cache_dir=cache)
    assert len(list(cache.iterdir())) == 9
    tokenize_dataset([file], grown, max_length=120, cut_circles=True, cache_dir=cache)
    assert len(list(cache.iterdir())) == 10


def test_a_cache_write_that_was_killed_is_not_taken_for_data(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, cache = make_tokenizer(CHATML), tmp_path / "cache"

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "rename", killed)
        tokenize_dataset([file], tokenizer, max_length=120, cache_dir=cache)
    rows, _ = tokenize_dataset([file], tokenizer, max_length=120, cache_dir=cache)
    assert rows.to_list() == tokenize_dataset([file], tokenizer, max_length=120)[0].to_list()


def test_an_unwritable_cache_is_a_clear_error(file: Path, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(ValueError, match="cannot write the data cache"):
        tokenize_dataset([file], make_tokenizer(CHATML), max_length=120, cache_dir=tmp_path / "taken")


def test_data_with_every_label_masked_is_refused_with_the_reason(tmp_path: Path) -> None:
    lost = write(tmp_path / "long.jsonl", turns("Hi " * 200, "Hello"), turns("Hi " * 90, "Hello"))
    with pytest.raises(ValueError, match=r"long\.jsonl: all labels masked, none of 2 .* 2 of them were cut at max_length 50"):
        tokenize_dataset([lost], make_tokenizer(CHATML), max_length=50)
    unmarked = MARKED.replace("{{ m['content'] + '<|im_end|>' }}{% endgeneration %}", "{% endgeneration %}{{ '<|im_end|>' }}")
    with pytest.raises(ValueError, match=r"all labels masked.*generation"):
        tokenize_dataset([write(tmp_path / "a.jsonl", SINGLE)], make_tokenizer(unmarked), max_length=50)
    exact = {"input_ids": [1, 2], "assistant_spans": []}
    with pytest.raises(ValueError, match=r"all labels masked.*assistant_spans"):
        tokenize_dataset([write(tmp_path / "b.jsonl", exact)], make_tokenizer(None), max_length=50)


def test_rows_without_a_supervised_slot_are_skipped_and_nothing_else_is_refused(tmp_path: Path) -> None:
    """Slot 1 of position t needs tokens t + 1 and t + 2 of one answer: single tokens, and a first token, train nothing."""
    useless: list[dict[str, Any]] = [
        {"id": "single", "input_ids": [1, 2, 3, 4], "assistant_spans": [[1, 2], [3, 4]]},
        {"id": "no position before", "input_ids": [1, 2, 3], "assistant_spans": [[0, 2]]},
    ]
    good = {"id": "good", "input_ids": [1, 2, 3], "assistant_spans": [[1, 3]]}
    rows, counts = tokenize_dataset([write(tmp_path / "a.jsonl", *useless, good)], make_tokenizer(None), max_length=50)
    assert list(rows["id"]) == ["good"] and counts == DataCounts(rows=1, skipped=2, cut=0, circles=0, tokens=3, supervised_tokens=2)
    assert "2 skipped without a supervised slot" in str(counts)
    [row] = rows.to_list()
    assert int(num_supervised_slots(row["assistant_mask"], 4).sum()) == 1
    for row in useless:
        mask = [any(a <= i < b for a, b in row["assistant_spans"]) for i in range(len(row["input_ids"]))]
        assert int(num_supervised_slots(mask, 4).sum()) == 0
    with pytest.raises(ValueError, match=r"none of 2 conversations has a supervised slot.*two in a row"):
        tokenize_dataset([write(tmp_path / "b.jsonl", *useless)], make_tokenizer(None), max_length=50)


def test_every_shape_and_kind_of_file_gives_the_same_tokens(tmp_path: Path) -> None:
    user, assistant = SINGLE[-2]["content"], SINGLE[-1]["content"]
    plain = [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]
    alpaca = {"id": "x", "instruction": user, "output": assistant}
    sharegpt = {"id": "x", "conversations": [{"from": "human", "value": user}, {"from": "gpt", "value": assistant}]}
    parquet = tmp_path / "c.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([sharegpt]), parquet)
    files = [write(tmp_path / "m.jsonl", {"id": "x", "messages": plain}), write(tmp_path / "a.jsonl", alpaca), parquet]
    one, *others = (tokenize_dataset([file], make_tokenizer(CHATML), max_length=200)[0].to_list() for file in files)
    assert others == [one, one]


def test_data_does_not_pass_through_memory_with_a_cache(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both Arrow files lie on the disk while it is prepared, and what is returned is read from there."""
    seen: list[str] = []
    map_rows = tokenized_data._map

    def noted(rows: Any, *rest: Any, **options: Any) -> Any:
        mapped = map_rows(rows, *rest, **options)
        seen.extend(Path(entry["filename"]).name for entry in rows.cache_files + mapped.cache_files)
        return mapped

    monkeypatch.setattr(tokenized_data, "_map", noted)
    rows, _ = tokenize_dataset([file], make_tokenizer(CHATML), max_length=120, cache_dir=tmp_path / "cache")
    assert seen == ["conversations.arrow", "all.arrow"] and rows.cache_files
    assert not tokenize_dataset([file], make_tokenizer(CHATML), max_length=120)[0].cache_files


def test_many_rows_are_tokenised_by_several_processes(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenized_data.os, "sched_getaffinity", lambda _: range(8), raising=False)
    assert [tokenized_data._num_processes(n) for n in (0, 9_999, 10_000, 20_000, 10**7)] == [None, None, 2, 4, 8]


def test_files_and_templates_are_checked_before_work(file: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none\.jsonl"):
        tokenize_dataset([tmp_path / "none.jsonl"], make_tokenizer(CHATML), max_length=50, cache_dir=tmp_path)
    with pytest.raises(ValueError, match="no generation prompt"):
        tokenize_dataset([file], make_tokenizer(CHATML.replace(CHATML_PROMPT, "")), max_length=50)
    with pytest.raises(ValueError, match="max_length is 1"):
        tokenize_dataset([file], make_tokenizer(CHATML), max_length=1)
