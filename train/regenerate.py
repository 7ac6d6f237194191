"""Prompts -> the base model's own answers, with the exact tokens: the data that heads are trained on."""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

import torch
from tqdm import tqdm

from infer.loading import pick_device
from infer.output_file import remove_leftovers
from infer.static.sampling import Sampling
from medusa_heads import base_model
from medusa_heads.arguments import OPTIONAL
from medusa_heads.fingerprint import fingerprint
from medusa_heads.quantization import Quantization
from medusa_heads.versions import commit, versions
from train.answers_file import AnswersFile, count_rows
from train.chat_turns import ChatTurns
from train.jobs import Job, Shard, check_ids, make_jobs, pick_shard, without_duplicates
from train.own_answers import OwnAnswers
from train.prompt_rows import PromptRow, load_prompt_rows
from train.row_shapes import DataFormat
from train.row_source import content_sha256, short_name
from train.self_prompts import self_prompt_id, write_self_prompts
from train.server import ChatServer, api_key_from
from train.server_answers import ServerAnswers


class Answerer(Protocol):
    """Yields every job as it finishes: with answers; with `failure`; or with neither, as longer than the context."""

    def answers(self, jobs: Sequence[Job]) -> Iterator[Job]: ...

    def facts(self) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Regenerate:
    """Let the base model answer prompts, or write its own prompts first and answer those."""

    base: str = "embedded"
    """The base model: `embedded`, a local folder, or a hub id. With --server only its tokenizer and chat template are read."""
    output: Path
    """Where the conversations go: JSONL, gzipped if the name ends in .gz. A manifest (.meta.json) is written beside it."""
    prompts: Annotated[tuple[str, ...], OPTIONAL] = ()
    """Prompts: JSONL, JSON (each also gzipped) or Parquet files, or data sets of the hub as hf:owner/name[/config][:split].
    Every user turn is answered, old answers are dropped; the same prompt twice is answered once."""
    data_format: DataFormat = "auto"
    """Shape of the rows: messages, sharegpt (`conversations`) or alpaca (`instruction`); auto goes by a file's first row."""
    self_prompts: int = 0
    """How many prompts the model writes itself, sampled from its chat template; unusable ones are dropped."""
    self_prompts_like: Annotated[tuple[str, ...], OPTIONAL] = ()
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
    sampled_share: float = 1.0
    """Share of the prompts that is sampled at --temperature; the others are answered once, greedily."""
    server: str | None = None
    """An OpenAI-compatible server that answers, instead of this machine: http://host:8000/v1. For vLLM: `vllm serve BASE
    --generation-config vllm`, so that nothing but the settings here shapes the answers. Its token ids are kept where it returns them."""
    server_model: str | None = None
    """The name the server knows the base model by; by default that of --base."""
    server_key_env: str | None = None
    """The environment variable that holds the server's key; the key itself is written nowhere."""
    concurrency: int = 64
    """Requests to the server at once."""
    shard: str | None = None
    """I/N: answer only part I (from 0) of N, chosen by the ids, into a file of its own: answers.jsonl.gz becomes
    answers-00000-of-00004.jsonl.gz. By default each process of `accelerate launch -m medusa_heads.cli regenerate` takes one part.
    Train on all of them: --data answers-*-of-00004.jsonl.gz."""
    batch_size: int | None = None
    """Conversations answered at once on this machine; by default what the device holds, at most 1024 (32 on a CPU)."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """auto: bfloat16 on a GPU, float32 on a CPU."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    seed: int = 0
    """Answers depend on the seed and the row's id, not on what shares the batch."""
    limit: int | None = None
    """Only the first N prompts of the files."""
    base_quantization: Quantization = "none"
    """Packs the base's weights into 8bit or 4bit (nf4), by bitsandbytes, as `base_quantization` of training does: heads learn from the
    answers of the very form that they will serve."""
    revision: str | None = None
    """The hub revision of the base model."""

    def run(self) -> None:
        """Writes the output and its .meta.json; continues where an earlier run was interrupted."""
        self._check_options()
        shard = pick_shard(self.shard)
        output = shard.file(self.output)
        rows = load_prompt_rows(self.prompts, limit=self.limit, data_format=self.data_format)
        if self.prompts and not rows:
            raise ValueError(f"--prompts {', '.join(map(str, self.prompts))}: no prompts in there; give rows with `messages`")
        if not self.self_prompts and not any(shard.holds(row.id) for row in rows):
            raise ValueError(f"shard {shard.index} of {shard.count} holds none of the {len(rows)} prompts: use fewer shards or processes")
        self._check_ids(rows)
        model, chat, settings = self._load(shard)
        with AnswersFile(output, settings) as answers:
            if answers.is_finished:
                print(f"{output} is already complete with these settings; nothing to do", file=sys.stderr)
                return
            answerer: Answerer
            own: list[PromptRow] = []
            facts: dict[str, Any] = {}
            if model is None:
                answerer = ServerAnswers(self._server(chat.tokenizer), chat, self.max_new_tokens)
            else:
                eos_ids = base_model.end_of_sequence_ids(model, chat.tokenizer)
                answerer = OwnAnswers(model, eos_ids, self.max_new_tokens, self.batch_size)
                own, dropped = self._self_prompts(model, chat, answers, eos_ids, shard)
                facts = {"device": _device_name(model.device), "self_prompts": dropped}
            unique = without_duplicates(rows + own)
            facts["duplicates"] = len(rows) + len(own) - len(unique)
            own_ids = {row.id for row in own}
            mine = [row for row in unique if row.id in own_ids or shard.holds(row.id)]
            self._answer(mine, chat, answers, answerer, facts)

    def _check_options(self) -> None:
        if self.output.suffix == ".parquet":
            raise ValueError(f"--output {self.output}: answers are written as JSONL: name it .jsonl or .jsonl.gz")
        if self.self_prompts < 0:
            raise ValueError(f"--self-prompts {self.self_prompts}: it must be 0 or more")
        if self.self_prompts_like and not self.self_prompts:
            raise ValueError("--self-prompts-like names examples, but --self-prompts is 0: say how many prompts to write")
        if not self.prompts and self.self_prompts < 1:
            raise ValueError("nothing to answer: give --prompts FILE, or --self-prompts N to let the model write its own")
        numbers = {"--limit": self.limit, "--samples": self.samples, "--max-new-tokens": self.max_new_tokens}
        for name, value in (numbers | {"--batch-size": self.batch_size, "--concurrency": self.concurrency}).items():
            if value is not None and value < 1:
                raise ValueError(f"{name} {value}: it must be at least 1")
        if not 0 < self.sampled_share <= 1:
            raise ValueError(f"--sampled-share {self.sampled_share} is not in (0, 1]; for greedy answers alone set --temperature 0")
        for name, is_set in ((f"--samples {self.samples}", self.samples > 1), ("--sampled-share", self.sampled_share < 1)):
            if is_set and not self.temperature:
                raise ValueError(f"{name} with --temperature 0, where every answer is the greedy one: set a temperature")
        for name, is_set in ((f"--top-p {self.top_p}", self.top_p != 1), (f"--top-k {self.top_k}", self.top_k != 0)):
            if is_set and not self.temperature:
                raise ValueError(f"{name} has no effect at --temperature 0: set a temperature, or leave it out")
        if self.server is None and (self.server_model or self.server_key_env):
            raise ValueError("--server-model and --server-key-env belong to --server URL, which is missing")
        if self.server is not None and self.base_quantization != "none":
            raise ValueError(
                "--base-quantization is for a model on this machine: leave it out with --server, which answers as it was started"
            )
        if self.server is not None and self.self_prompts:
            raise ValueError("--self-prompts needs the model on this machine: run it without --server, or give --prompts")
        self._sampling()

    def _check_ids(self, rows: Sequence[PromptRow]) -> None:
        """Of all shards, and of the prompts that the model has yet to write. Of equal prompts only the first is answered."""
        is_like, whose = bool(self.self_prompts_like), "a prompt that the model writes (those of another --seed have other ids)"
        own = ((self_prompt_id(index, seed=self.seed, is_like=is_like), whose) for index in range(self.self_prompts))
        given = ((row.id, row.where) for row in without_duplicates(rows))
        check_ids(chain(own, given), samples=self.samples, sampled_share=self.sampled_share)

    def _sampling(self) -> Sampling:
        return Sampling(temperature=self.temperature, top_p=self.top_p, top_k=self.top_k, seed=self.seed)

    def _load(self, shard: Shard) -> tuple[Any, ChatTurns, dict[str, Any]]:
        """The model (None where a server answers), the template, and all that the answers depend on: an interrupted run
        continues only under equal settings."""
        if self.server is not None:
            model, tokenizer = None, base_model.load_tokenizer(self.base, revision=self.revision)
            answered_by = {"server_model": self._server_model()}
        else:
            device = pick_device(self._device())
            dtype = ("bfloat16" if device.type == "cuda" else "float32") if self.dtype == "auto" else self.dtype
            model, tokenizer = base_model.load_base(
                self.base,
                dtype=base_model.parse_dtype(dtype),
                device=device,
                revision=self.revision,
                quantization=self.base_quantization,
            )
            answered_by = {"fingerprint": fingerprint(model), "dtype": dtype}
        chat = ChatTurns(tokenizer)
        names = "base revision data_format limit self_prompts max_new_tokens temperature top_p top_k samples sampled_share seed"
        return (
            model,
            chat,
            {
                "tokenizer_sha256": _sha256(tokenizer.backend_tokenizer.to_str()),
                "chat_template_sha256": _sha256(tokenizer.get_chat_template()),
                "prompts": _source_records(self.prompts),
                "self_prompts_like": _source_records(self.self_prompts_like),
                "shard": f"{shard.index}/{shard.count}",
                **{name: getattr(self, name) for name in names.split()},
                **answered_by,
            },
        )

    def _device(self) -> str:
        """Under a launcher every process of a machine takes its own GPU."""
        local_rank = os.environ.get("LOCAL_RANK")
        return f"cuda:{local_rank}" if self.device == "auto" and local_rank and torch.cuda.is_available() else self.device

    def _server_model(self) -> str:
        return self.server_model or self.base

    def _server(self, tokenizer: Any) -> ChatServer:
        assert self.server is not None
        key = api_key_from(self.server_key_env)
        return ChatServer(self.server, self._server_model(), num_tokens=len(tokenizer), api_key=key, concurrency=self.concurrency)

    def _self_prompts(
        self, model: Any, chat: ChatTurns, answers: AnswersFile, eos_ids: Sequence[int], shard: Shard
    ) -> tuple[list[PromptRow], dict[str, int]]:
        """The model's own prompts, this shard's share of them; those of an interrupted run are read back from beside the output."""
        if not self.self_prompts:
            return [], {}
        examples = load_prompt_rows(self.self_prompts_like, data_format=self.data_format)
        like = [turn[-1]["content"] for row in examples for turn in row.turns[:1]]
        if self.self_prompts_like and not like:
            raise ValueError(f"--self-prompts-like {', '.join(map(str, self.self_prompts_like))}: no prompts in there")
        kind = f"-like{_sha256(repr(like))[:8]}" if like else ""
        made_from = f"{fingerprint(model)[:8]}-{self.self_prompts}-seed{self.seed}{kind}"
        path = answers.output.with_name(f"{answers.output.name}.self-prompts-{made_from}.jsonl")
        counts: dict[str, int] = {}
        remove_leftovers(path)
        if not (answers.resumed and path.exists()):
            indices = range(shard.index, self.self_prompts, shard.count)
            counts = write_self_prompts(
                model, chat, path, indices=indices, seed=self.seed, eos_ids=eos_ids, batch_size=self.batch_size, like=like
            )
            print(f"self-prompts: {', '.join(f'{count} {name}' for name, count in sorted(counts.items()))}", file=sys.stderr)
        own = load_prompt_rows([path])
        return own, counts or {"kept": len(own)}

    def _answer(self, rows: Sequence[PromptRow], chat: ChatTurns, answers: AnswersFile, answerer: Answerer, facts: dict[str, Any]) -> None:
        jobs = list(make_jobs(rows, chat, sampling=self._sampling(), samples=self.samples, sampled_share=self.sampled_share))
        left = [job for job in jobs if job.id not in answers.done]
        skipped: list[str] = []
        set_aside: list[Job] = []
        start, num_tokens = time.perf_counter(), 0
        with tqdm(
            total=len(jobs), initial=len(jobs) - len(left), desc=f"regenerate {answers.output.name}", unit="conversation"
        ) as progress:
            for job in answerer.answers(left):
                if job.failure is not None:
                    set_aside.append(job)
                elif not job.spans:
                    skipped.append(job.id)
                else:
                    num_tokens += sum(end - start for start, end in job.spans)
                    answers.append(job.as_row(chat.tokenizer))
                    job.input_ids = []  # it is on the disk; a long run must not hold all
                progress.set_postfix_str(f"{num_tokens / (time.perf_counter() - start):,.0f} tokens/s", refresh=False)
                progress.update()
        if set_aside and not answers.done:
            raise ValueError(f"none of {len(set_aside)} conversations got a usable answer; the last one: {set_aside[-1].failure}")
        seconds = time.perf_counter() - start
        facts |= {"seconds": round(seconds, 3), "tokens_per_second": round(num_tokens / seconds, 1) if num_tokens else None}
        self._finish(answers, jobs, sorted(skipped), set_aside, facts | answerer.facts())

    def _finish(
        self, answers: AnswersFile, jobs: Sequence[Job], skipped: list[str], set_aside: Sequence[Job], facts: dict[str, Any]
    ) -> None:
        ids = [job.id for job in jobs]
        counts = count_rows(answers.rows(ids), num_turns={job.id: len(job.row.turns) for job in jobs})
        counts |= {"skipped_too_long": skipped, "set_aside": len(set_aside)}
        meta = {"counts": counts, **facts, "versions": versions(), "commit": commit(), "command": sys.argv}
        answers.finish(ids, meta, set_aside=[job.as_prompt_row() for job in set_aside])
        rate = f"{facts['tokens_per_second']:,.0f} tokens/s" if facts["tokens_per_second"] else "nothing was left to generate"
        print(
            f"{answers.output}: {counts['conversations']} conversations, {counts['answers']} answers, {counts['answer_tokens']:,} answer "
            f"tokens ({counts['finish_reasons']}); {facts['seconds']:.1f} s, {rate}; skipped as longer than the context: {len(skipped)}; "
            f"duplicates: {facts['duplicates']}"
        )
        if set_aside:
            print(
                f"warning: {len(set_aside)} conversations got no usable answer and stand in {answers.set_aside_path} with the reasons; "
                "to try them again, give that file to --prompts, with another --output",
                file=sys.stderr,
            )
        if lacking := counts["tokens_from"].get("template"):
            print(
                f"warning: the server returned no token ids for answers of {lacking} of {counts['conversations']} conversations. Their "
                "text was tokenized here, which may not give the very tokens of the model; vLLM 0.10.2 and newer returns them",
                file=sys.stderr,
            )
        if other := counts.get("other_template"):
            print(
                f"warning: the server rendered {other} conversations otherwise than the chat template of --base (a mode of thinking, "
                "a date, another template?). Its tokens were kept; serve with the same settings, or heads will see other text than here",
                file=sys.stderr,
            )


def _source_records(sources: Sequence[str]) -> list[dict[str, str]]:
    return [{"file": short_name(source), "sha256": content_sha256(source)} for source in sources]


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
