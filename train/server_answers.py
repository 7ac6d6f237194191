"""Conversations -> the same, answered turn by turn by a server, many at once; what it cannot answer is marked."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

from train.chat_turns import ChatTurns, Message
from train.jobs import Job
from train.server import ChatServer, ServedAnswer, Unanswered

FAILURES_IN_A_ROW = 16


@dataclass(slots=True)
class ServerAnswers:
    """Answers of a server: its exact tokens where it returns them, else its text in the tokens of the chat template."""

    server: ChatServer
    chat: ChatTurns
    max_new_tokens: int
    tokenizer_lock: threading.Lock = field(default_factory=threading.Lock)

    def answers(self, jobs: Sequence[Job]) -> Iterator[Job]:
        """Every job, as it finishes: answered; with `failure`, to be set aside; or without an answer, as longer than the context.

        Raises ValueError when the server fails again and again: then the fault is not with single conversations.
        """
        in_a_row, limit = 0, max(FAILURES_IN_A_ROW, 2 * self.server.concurrency)
        for job in in_parallel(self._converse, jobs, num_threads=self.server.concurrency):
            in_a_row = 0 if job.failure is None else in_a_row + 1
            if in_a_row >= limit:
                raise ValueError(
                    f"--server {self.server.url}: no usable answer to the last {in_a_row} conversations; the last one: {job.failure}. "
                    "Once it works, the same command continues"
                )
            yield job

    def facts(self) -> dict[str, Any]:
        return {"concurrency": self.server.concurrency, "server_context": self.server.context}

    def _converse(self, job: Job) -> Job:
        """All turns in order; a conversation that fills the context ends there."""
        messages: list[Message] = []
        for number, turn in enumerate(job.row.turns):
            messages.extend(turn)
            room = self.max_new_tokens if self.server.context is None else self.server.context - len(job.next_prompt())
            if room < 1:
                break
            seed = int.from_bytes(hashlib.sha256(f"{job.sampling.seed}:{job.id}:{number}".encode()).digest()[:4], "big") >> 1
            try:
                answer = self.server.answer(messages, sampling=job.sampling, max_tokens=min(room, self.max_new_tokens), seed=seed)
            except Unanswered as error:
                job.failure = None if error.is_too_long else str(error)
                break
            self._take(job, answer)
            messages.append({"role": "assistant", "content": answer.text})
        return job

    def _take(self, job: Job, answer: ServedAnswer) -> None:
        """Keeps the tokens of the server where they go on from those before: an earlier answer may come back in other tokens,
        or without its thinking. Then the prompt is rendered here, and the turn counted."""
        ids, prompt = answer.token_ids, answer.prompt_ids
        job.notes["tokens_from"] = "template" if ids is None else job.notes.get("tokens_from", "server")
        if prompt is not None and not job.spans:
            job.notes["other_template"] = prompt != job.next_prompt()
        if prompt is not None and prompt[: len(job.input_ids)] != job.input_ids:
            job.notes["rewritten_turns"] = job.notes.get("rewritten_turns", 0) + 1
            prompt = None
        if ids is None:
            with self.tokenizer_lock:
                ids = self.chat.text_answer(answer.text, is_ended=answer.finish_reason == "eos")
        job.take(ids, answer.finish_reason, prompt=prompt)


def in_parallel(work: Callable[[Job], Job], jobs: Sequence[Job], *, num_threads: int) -> Iterator[Job]:
    """The results in the order they come, the first error of a thread included. The threads end with the process."""
    todo: SimpleQueue[Job | None] = SimpleQueue()
    done: SimpleQueue[Job | BaseException] = SimpleQueue()
    is_over = threading.Event()

    def run() -> None:
        while (job := todo.get()) is not None and not is_over.is_set():
            try:
                done.put(work(job))
            except BaseException as error:
                done.put(error)

    num_threads = min(num_threads, len(jobs))
    for job in [*jobs, *[None] * num_threads]:
        todo.put(job)
    for _ in range(num_threads):
        threading.Thread(target=run, daemon=True).start()
    try:
        for _ in jobs:
            result = done.get()
            if isinstance(result, BaseException):
                raise result
            yield result
    finally:
        is_over.set()
