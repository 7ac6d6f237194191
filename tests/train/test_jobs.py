"""Which conversations are answered: each once, by which shard, greedy or sampled."""

from __future__ import annotations

from pathlib import Path

import pytest

from infer.static.sampling import Sampling
from tests.tiny_models import tiny_tokenizer
from train.chat_turns import ChatTurns
from train.jobs import Shard, check_ids, make_jobs, pick_shard, without_duplicates
from train.prompt_rows import PromptRow


def row(row_id: str, *turns: str, system: str = "") -> PromptRow:
    first = [{"role": "system", "content": system}] if system else []
    messages = [[*(first if index == 0 else []), {"role": "user", "content": text}] for index, text in enumerate(turns)]
    return PromptRow(row_id, "s", "c", tuple(map(tuple, messages)), row_id)


def test_the_same_prompt_is_kept_once_whatever_its_case_and_spaces() -> None:
    rows = [
        *(row("a", "The cat"), row("b", " the\n CAT "), row("c", "the cat", "and?"), row("d", "the cat", system="x"), row("e", "thecat")),
        *(row("f", "the", "cat"), row("g", "THE CAT", "and?")),
    ]
    assert [kept.id for kept in without_duplicates(rows)] == ["a", "c", "d", "e", "f"]


def test_every_row_belongs_to_one_shard_for_good() -> None:
    ids = [f"row {i}" for i in range(2000)]
    shards = [Shard(i, 4) for i in range(4)]
    held = [[row_id for row_id in ids if shard.holds(row_id)] for shard in shards]
    assert sorted(row_id for part in held for row_id in part) == sorted(ids) and all(400 < len(part) < 600 for part in held)
    assert [row_id for row_id in ids if Shard().holds(row_id)] == ids
    assert shards[0].file(Path("d/a.jsonl.gz")) == Path("d/a-00000-of-00004.jsonl.gz") and Shard().file(Path("a")) == Path("a")


def test_the_shard_is_named_or_that_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    assert pick_shard(None) == Shard(0, 1) and pick_shard("2/8") == Shard(2, 8)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert pick_shard(None) == Shard(1, 3) and pick_shard("0/2") == Shard(0, 2)
    for bad in ("3/3", "1", "/", "-1/2", "a/2", "1/0", "1/2/3"):
        with pytest.raises(ValueError, match=f"--shard {bad}: write I/N"):
            pick_shard(bad)


def test_a_share_is_sampled_and_the_rest_greedy() -> None:
    rows = [row(str(i), f"the cat {i}") for i in range(300)]
    chat, sampling = ChatTurns(tiny_tokenizer()), Sampling(temperature=0.7, seed=3)
    jobs = list(make_jobs(rows, chat, sampling=sampling, samples=2, sampled_share=0.3))
    sampled, greedy = [job for job in jobs if job.sampling == sampling], [job for job in jobs if job.sampling == Sampling(seed=3)]
    assert len(sampled) + len(greedy) == len(jobs) and 130 < len(sampled) < 230
    assert all(job.id == job.row.id for job in greedy) and all("#" in job.id for job in sampled)
    assert [job.id for job in jobs] == [job.id for job in make_jobs(rows, chat, sampling=sampling, samples=2, sampled_share=0.3)]
    one = list(make_jobs(rows, chat, sampling=sampling, samples=1, sampled_share=0.3))
    assert [job.id for job in one] == [row.id for row in rows]
    assert {job.id for job in one if job.sampling.temperature} == {job.row.id for job in sampled}
    assert all(job.sampling == sampling for job in make_jobs(rows, chat, sampling=sampling, samples=1, sampled_share=1.0))


def test_two_answers_of_one_id_are_refused() -> None:
    rows = [("x", "p.jsonl:1"), ("x#0", "p.jsonl:2"), ("y", "p.jsonl:3")]
    message = r"p.jsonl:2: the id 'x#0' of its answer is also that of an answer to p.jsonl:1; .* give it another id"
    for given in (rows[:2], rows):
        with pytest.raises(ValueError, match=message):
            check_ids(given, samples=2, sampled_share=0.1)  # x is sampled, x#0 is not
    check_ids(rows, samples=1, sampled_share=0.1)
    check_ids(rows, samples=2, sampled_share=0.01)
    check_ids(rows, samples=2, sampled_share=1.0)
