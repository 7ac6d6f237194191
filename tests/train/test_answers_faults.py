"""Data, what could be lost or miscounted in silence: errors inside a worker's thread, and conversations as long as the limit."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_models import tiny_tokenizer
from tests.train.fake_server import Body, Reply, completion, serving
from train.regenerate import Regenerate
from train.server_answers import in_parallel
from train.tokenized_data import tokenize_dataset


def test_an_error_no_request_can_mend_ends_the_run_and_loses_no_conversation(tmp_path: Path) -> None:
    """The key expires in the middle: the run ends with the option to mend, and the same command answers what is left."""
    tiny_tokenizer().save_pretrained(tmp_path / "base")
    rows = [{"id": str(i), "messages": [{"role": "user", "content": f"the cat {i}"}]} for i in range(9)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    output, expired = tmp_path / "answers.jsonl", [True]

    def respond(body: Body, before: int) -> Reply:
        is_late = body["messages"][-1]["content"] >= "the cat 4"
        return Reply({"error": "expired"}, 401) if expired[0] and is_late else completion("the dog")

    with serving(respond) as fake:
        given = {"server": fake.url, "server_model": "m", "concurrency": 2, "max_new_tokens": 8}
        command = Regenerate(base=str(tmp_path / "base"), output=output, prompts=(str(tmp_path / "prompts.jsonl"),), **given)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"refuses the key .*--server-key-env"):
            command.run()
        assert not output.exists()
        expired[0] = False
        command.run()
    assert [json.loads(line)["id"] for line in output.read_text().splitlines()] == [str(i) for i in range(9)]


def test_no_more_threads_are_started_than_there_are_conversations(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[threading.Thread] = []
    start = threading.Thread.start

    def counted(thread: threading.Thread) -> None:
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", counted)
    jobs: list[Any] = ["a", "b", "c"]
    found: list[Any] = list(in_parallel(lambda job: job, jobs, num_threads=1_000))
    assert sorted(found) == jobs and len(started) == 3


@pytest.mark.parametrize(("max_length", "cut", "kept"), [(5, 0, [5, 4]), (4, 1, [4, 4]), (3, 2, [3, 3])])
def test_only_what_is_longer_than_max_length_counts_as_cut(tmp_path: Path, max_length: int, cut: int, kept: list[int]) -> None:
    rows = [{"id": str(n), "input_ids": list(range(3, 3 + n)), "assistant_spans": [[1, n]]} for n in (5, 4)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found, counts = tokenize_dataset([tmp_path / "data.jsonl"], tiny_tokenizer(), max_length=max_length)
    assert counts.cut == cut and [len(ids) for ids in found["input_ids"]] == kept
