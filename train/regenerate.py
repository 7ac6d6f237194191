"""Prompts -> the base model's own answers, with the exact tokens: the data that heads are trained on."""

from __future__ import annotations

import hashlib
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from infer.loading import pick_device
from infer.output_file import remove_leftovers
from infer.sampling import Sampling
from infer.static_generate import Answer, StaticGenerator, default_batch_size
from medusa_heads import base_model
from medusa_heads.fingerprint import fingerprint
from medusa_heads.versions import commit, versions
from train.answers_file import AnswersFile
from train.chat_turns import ChatTurns, join
from train.prompt_rows import PromptRow, load_prompt_rows
from train.self_prompts import write_self_prompts

SMALLEST_CAPACITY = 256


@dataclass(slots=True)
class Job:
    """One conversation to be answered. pieces: token ids before the first and between later answers."""

    id: str
    row: PromptRow
    pieces: list[list[int]]
    input_ids: list[int] = field(default_factory=list)
    spans: list[list[int]] = field(default_factory=list)
    finish_reasons: list[str] = field(default_factory=list)

    def next_prompt(self) -> list[int]:
        return join(self.input_ids, self.pieces[len(self.spans)])

    def take(self, answer: Answer) -> None:
        prompt = self.next_prompt()
        self.input_ids = prompt + answer.token_ids
        self.spans.append([len(prompt), len(self.input_ids)])
        self.finish_reasons.append(answer.finish_reason)

    def as_row(self, tokenizer: Any) -> dict[str, Any]:
        messages: list[dict[str, str]] = []
        for turn, (start, end) in zip(self.row.turns, self.spans, strict=False):
            messages.extend(turn)
            text = tokenizer.decode(self.input_ids[start:end], skip_special_tokens=True)
            messages.append({"role": "assistant", "content": text})
        return {
            "id": self.id,
            "source": self.row.source,
            "category": self.row.category,
            "messages": messages,
            "finish_reasons": self.finish_reasons,
            "input_ids": self.input_ids,
            "assistant_spans": self.spans,
        }


@dataclass(frozen=True, slots=True)
class Regenerate:
    """Let the base model answer prompts, or write its own prompts first and answer those."""

    base: str
    """The base model: `embedded`, a local folder, or a hub id."""
    output: Path
    """Where the conversations go: JSONL, gzipped if the name ends in .gz."""
    prompts: tuple[Path, ...] = ()
    """Prompt files, JSONL or .gz: rows {"id", "source", "category", "messages"}; every user turn is answered."""
    self_prompts: int = 0
    """How many prompts the model writes itself, sampled from its chat template; unusable ones are dropped."""
    self_prompts_like: tuple[Path, ...] = ()
    """Prompt files whose first words its own prompts begin with, for more text of a kind; these prompts themselves are not answered."""
    max_new_tokens: int = 512
    """The most tokens of one answer."""
    temperature: float = 0.0
    """0 is greedy."""
    top_p: float = 1.0
    """Keeps the smallest set of tokens with this much probability."""
    top_k: int = 0
    """Keeps the k most probable tokens; 0 keeps all."""
    samples: int = 1
    """Answers per prompt, when sampling."""
    batch_size: int | None = None
    """Conversations answered at once; by default what the device holds, at most 1024 (32 on a CPU)."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """auto: bfloat16 on a GPU, float32 on a CPU."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    seed: int = 0
    """Answers depend on the seed and the row's id, not on what shares the batch."""
    limit: int | None = None
    """Only the first N prompts of the files."""
    revision: str | None = None
    """The hub revision of the base model."""

    def run(self) -> None:
        """Writes the output and its .meta.json; continues where an earlier run was interrupted."""
        self._check_options()
        rows = load_prompt_rows(self.prompts, limit=self.limit)
        if self.prompts and not rows:
            raise ValueError(f"{', '.join(map(str, self.prompts))}: no prompts in there")
        device = pick_device(self.device)
        dtype = ("bfloat16" if device.type == "cuda" else "float32") if self.dtype == "auto" else self.dtype
        model, tokenizer = base_model.load_base(self.base, dtype=base_model.parse_dtype(dtype), device=device, revision=self.revision)
        chat = ChatTurns(tokenizer)
        with AnswersFile(self.output, self._settings(model, tokenizer, dtype)) as answers:
            if answers.is_finished:
                print(f"{self.output} is already complete with these settings; nothing to do", file=sys.stderr)
                return
            eos_ids = base_model.end_of_sequence_ids(model, tokenizer)
            rows, dropped = self._with_self_prompts(rows, model, chat, answers, eos_ids)
            self._answer(rows, model, chat, answers, eos_ids, {"device": _device_name(device), "self_prompts": dropped})

    def _check_options(self) -> None:
        if self.self_prompts < 0:
            raise ValueError(f"--self-prompts {self.self_prompts}: it must be 0 or more")
        if self.self_prompts_like and not self.self_prompts:
            raise ValueError("--self-prompts-like names examples, but --self-prompts is 0: say how many prompts to write")
        if not self.prompts and self.self_prompts < 1:
            raise ValueError("nothing to answer: give --prompts FILE, or --self-prompts N to let the model write its own")
        for name, value in (("--limit", self.limit), ("--samples", self.samples), ("--max-new-tokens", self.max_new_tokens)):
            if value is not None and value < 1:
                raise ValueError(f"{name} {value}: it must be at least 1")
        if self.batch_size is not None and self.batch_size < 1:
            raise ValueError(f"--batch-size {self.batch_size}: it must be at least 1")
        if self.samples > 1 and not self.temperature:
            raise ValueError(f"--samples {self.samples} with --temperature 0 gives the same answer {self.samples} times; set a temperature")
        self._sampling()

    def _sampling(self) -> Sampling:
        return Sampling(temperature=self.temperature, top_p=self.top_p, top_k=self.top_k, seed=self.seed)

    def _settings(self, model: PreTrainedModel, tokenizer: Any, dtype: str) -> dict[str, Any]:
        """All that the answers depend on; an interrupted run continues only under equal settings."""
        return {
            "base": self.base,
            "revision": self.revision,
            "fingerprint": fingerprint(model),
            "tokenizer_sha256": _sha256(tokenizer.backend_tokenizer.to_str()),
            "chat_template_sha256": _sha256(tokenizer.get_chat_template()),
            "prompts": _file_records(self.prompts),
            "limit": self.limit,
            "self_prompts": self.self_prompts,
            "self_prompts_like": _file_records(self.self_prompts_like),
            "max_new_tokens": self.max_new_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "samples": self.samples,
            "seed": self.seed,
            "dtype": dtype,
        }

    def _with_self_prompts(
        self, rows: list[PromptRow], model: PreTrainedModel, chat: ChatTurns, answers: AnswersFile, eos_ids: Sequence[int]
    ) -> tuple[list[PromptRow], dict[str, int]]:
        """Adds the model's own prompts; those of an interrupted run are read back from beside the output."""
        if not self.self_prompts:
            return rows, {}
        like = [turn[-1]["content"] for row in load_prompt_rows(self.self_prompts_like) for turn in row.turns[:1]]
        if self.self_prompts_like and not like:
            raise ValueError(f"--self-prompts-like {', '.join(map(str, self.self_prompts_like))}: no prompts in there")
        kind = f"-like{_sha256(repr(like))[:8]}" if like else ""
        made_from = f"{fingerprint(model)[:8]}-{self.self_prompts}-seed{self.seed}{kind}"
        path = self.output.with_name(f"{self.output.name}.self-prompts-{made_from}.jsonl")
        counts: dict[str, int] = {}
        remove_leftovers(path)
        if not (answers.resumed and path.exists()):
            counts = write_self_prompts(
                model, chat, path, count=self.self_prompts, seed=self.seed, eos_ids=eos_ids, batch_size=self.batch_size, like=like
            )
            print(f"self-prompts: {', '.join(f'{count} {name}' for name, count in sorted(counts.items()))}", file=sys.stderr)
        own = load_prompt_rows([path])
        return rows + own, counts or {"kept": len(own)}

    def _answer(
        self,
        rows: list[PromptRow],
        model: PreTrainedModel,
        chat: ChatTurns,
        answers: AnswersFile,
        eos_ids: Sequence[int],
        facts: dict[str, Any],
    ) -> None:
        jobs = list(self._jobs(rows, chat))
        context = base_model.max_length(model)
        skipped = [job.id for job in jobs if len(job.pieces[0]) >= context]
        left = [job for job in jobs if job.id not in answers.done and len(job.pieces[0]) < context]
        groups = _by_capacity(left, self.max_new_tokens, context)
        start, num_tokens = time.perf_counter(), 0
        with tqdm(total=len(jobs) - len(skipped), initial=len(answers.done), desc="regenerate", unit="conversation") as progress:
            for capacity, group in groups:
                batch_size = self.batch_size or default_batch_size(model, capacity)
                generator = StaticGenerator(
                    model,
                    max_new_tokens=self.max_new_tokens,
                    eos_ids=eos_ids,
                    batch_size=batch_size,
                    capacity=capacity,
                    sampling=self._sampling(),
                )
                for job in _finished_jobs(generator, group):
                    answers.append(job.as_row(chat.tokenizer))
                    rate = (num_tokens + generator.num_tokens) / (time.perf_counter() - start)
                    progress.set_postfix_str(f"{rate:,.0f} tokens/s", refresh=False)
                    progress.update()
                num_tokens += generator.num_tokens
                facts |= {"attention": generator.attention, "batch_size": batch_size}
        seconds = time.perf_counter() - start
        facts |= {"seconds": round(seconds, 3), "tokens_per_second": round(num_tokens / seconds, 1) if num_tokens else None}
        self._finish(answers, jobs, skipped, facts)

    def _jobs(self, rows: Sequence[PromptRow], chat: ChatTurns) -> Iterator[Job]:
        for row in rows:
            try:
                pieces = chat.pieces(row.turns)
            except ValueError as error:
                raise ValueError(f"{row.where}: {error}") from None
            for sample in range(self.samples):
                yield Job(row.id if self.samples == 1 else f"{row.id}#{sample}", row, pieces)

    def _finish(self, answers: AnswersFile, jobs: Sequence[Job], skipped: list[str], facts: dict[str, Any]) -> None:
        by_id = {row["id"]: row for row in answers.rows()}
        ordered = [by_id[job.id] for job in jobs if job.id in by_id]
        turns = {job.id: len(job.pieces) for job in jobs}
        counts = {
            "conversations": len(ordered),
            "answers": sum(len(row["assistant_spans"]) for row in ordered),
            "answer_tokens": sum(end - start for row in ordered for start, end in row["assistant_spans"]),
            "finish_reasons": dict(Counter(reason for row in ordered for reason in row["finish_reasons"])),
            "skipped_too_long": skipped,
            "cut_short_by_context": sum(len(row["assistant_spans"]) < turns[row["id"]] for row in ordered),
        }
        answers.finish(ordered, {"counts": counts, **facts, "versions": versions(), "commit": commit(), "command": sys.argv})
        rate = f"{facts['tokens_per_second']:,.0f} tokens/s" if facts["tokens_per_second"] else "nothing was left to generate"
        print(
            f"{self.output}: {counts['conversations']} conversations, {counts['answers']} answers, {counts['answer_tokens']:,} answer "
            f"tokens ({counts['finish_reasons']}); {facts['seconds']:.1f} s, {rate}; skipped as longer than the context: {len(skipped)}"
        )


def _finished_jobs(generator: StaticGenerator, jobs: Sequence[Job]) -> Iterator[Job]:
    """Runs conversations turn by turn; one whose next turn no longer fits ends there."""
    by_key = {(job.id, 0): job for job in jobs}
    for key, job in by_key.items():
        generator.add(key, job.next_prompt())
    for answer in generator.run():
        job = by_key.pop(answer.key)  # type: ignore[call-overload]
        job.take(answer)
        answered = len(job.spans)
        if answered < len(job.pieces) and len(prompt := job.next_prompt()) < generator.room:
            by_key[(job.id, answered)] = job
            generator.add((job.id, answered), prompt)
        else:
            yield job


def _by_capacity(jobs: Sequence[Job], max_new_tokens: int, context: int) -> list[tuple[int, list[Job]]]:
    """Groups conversations by the room they may need, in powers of two, the largest first: a few long ones
    must not make every slot large."""

    def need(job: Job) -> int:
        return sum(map(len, job.pieces)) + max_new_tokens * len(job.pieces)

    groups: dict[int, list[Job]] = defaultdict(list)
    for job in jobs:
        capacity = SMALLEST_CAPACITY
        while capacity < need(job):
            capacity *= 2
        groups[capacity].append(job)
    return [(min(max(map(need, group)), context), group) for _, group in sorted(groups.items(), reverse=True)]


def _file_records(paths: Sequence[Path]) -> list[dict[str, str]]:
    return [{"file": path.name, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()} for path in paths]


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
