"""Prompts -> answers: prefill, then propose, verify, keep, until every row has ended."""

# B batch, N tree nodes including the root, D hidden, V vocabulary

from __future__ import annotations

import operator
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from infer.acceptance_stats import AcceptanceStats
from infer.candidates import Candidates
from infer.drafters import Drafter, NoDrafter
from infer.kv_cache import KVCache
from infer.stage_timer import NoTimer, StageTimer
from infer.stopping import RowOutput
from infer.target import GreedyTarget, ProcessedTarget, Target
from infer.tree_forward import prefill, tree_forward
from infer.tree_support import check_tree_support
from infer.verifiers import VerifierChoice, check_verifier, is_lossless
from infer.verify import Verification
from medusa_heads import base_model

MAX_NEW_TOKENS = 128


@dataclass(frozen=True, slots=True)
class Generation:
    """One answer. token_ids: new tokens, the end token included; finish_reason: `eos`, `stop` or
    `length`; runs: how many tokens each base forward emitted, in order (the first is the prefill); lossless:
    whether the text has the base model's own law (all verifiers but `typical`)."""

    token_ids: list[int]
    text: str
    finish_reason: str
    runs: list[int]
    stats: AcceptanceStats
    lossless: bool = True


@dataclass(frozen=True, slots=True)
class Step:
    """What one base forward added: new tokens per row (empty where a row has ended)."""

    new_tokens: list[list[int]]
    rows: list[RowOutput]


@dataclass(frozen=True, slots=True)
class Request:
    """A checked batch. texts: its prompts; limits: the most new tokens of each row; rows: the answers, still empty."""

    texts: list[list[int]]
    limits: list[int]
    rows: list[RowOutput]
    target: Target


class Generator:
    """Decoding of a base model with a drafter, greedy or sampled; the text has exactly the base model's own law.

    Hangs no state on the model, so several generators may share one; between calls only an adaptive drafter keeps what it has learnt.
    The drafter knows one batch: a generator decodes one at a time.
    """

    def __init__(self, model: PreTrainedModel, drafter: Drafter | None = None, *, tokenizer: Any | None = None) -> None:
        """Raises ValueError with the reason when the model cannot verify a tree of candidates."""
        base_model.check_base(model)
        self.model, self.drafter, self.tokenizer = model, drafter or NoDrafter(), tokenizer
        self.layer_shapes = check_tree_support(model)
        self.max_length = base_model.max_length(model)
        self.num_tokens = len(cast(Tensor, model.get_input_embeddings().weight))
        self.decoding = threading.Lock()  # held while a batch is decoded

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int | None = None,
        eos_ids: Sequence[int] | None = None,
        stop: Sequence[str] = (),
        generation_config: GenerationConfig | None = None,
        seed: int = 0,
        verifier: VerifierChoice = "auto",
    ) -> list[Generation]:
        """Answers a batch of prompts (token ids), ragged lengths allowed.

        eos_ids: None takes the settings' or the model's own. generation_config: None is greedy; else the
        settings of transformers' `generate`, and `seed` fixes what is drawn. max_new_tokens: None takes
        the settings', else 128. verifier: how sampled drafts are verified (infer/verifiers.py); all but
        `typical` give the law of the settings. Raises ValueError on an empty prompt, one that fills the
        context, a max_new_tokens below 1, or a setting or verifier that cannot be honoured.
        """
        runs: list[list[int]] = [[] for _ in prompts]
        stats = [AcceptanceStats() for _ in prompts]
        rows: list[RowOutput] = []
        for step in self.steps(
            prompts,
            max_new_tokens=max_new_tokens,
            eos_ids=eos_ids,
            stop=stop,
            generation_config=generation_config,
            seed=seed,
            verifier=verifier,
            stats=stats,
        ):
            rows = step.rows
            for run, new in zip(runs, step.new_tokens, strict=True):
                if new:
                    run.append(len(new))
        return [
            Generation(row.token_ids, row.text, row.finish_reason or "length", run, stat, is_lossless(verifier))
            for row, run, stat in zip(rows, runs, stats, strict=True)
        ]

    def prepare(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int | None = None,
        eos_ids: Sequence[int] | None = None,
        stop: Sequence[str] = (),
        generation_config: GenerationConfig | None = None,
        seed: int = 0,
        verifier: VerifierChoice = "auto",
    ) -> Request:
        """Checks what `generate` takes, before any forward. Raises ValueError as it does."""
        texts = self._checked(prompts)
        if max_new_tokens is not None and type(max_new_tokens) is not int:
            raise ValueError(f"max_new_tokens is {max_new_tokens!r}; give a whole number")
        eos_ids, stop = [eos_ids] if isinstance(eos_ids, int) else eos_ids, [stop] if isinstance(stop, str) else stop
        limits = self._limits(texts, max_new_tokens, generation_config)
        eos = self._end_tokens(generation_config) if eos_ids is None else eos_ids
        stop = [*stop, *stop_strings(generation_config)]
        rows = [RowOutput(max_new_tokens=limit, eos_ids=eos, stop=stop, tokenizer=self.tokenizer) for limit in limits]
        target = self._target(generation_config, texts, limits=limits, eos_ids=eos, seed=seed, verifier=verifier, answers=rows)
        return Request(texts, limits, rows, target)

    @torch.inference_mode()
    def steps(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int | None = None,
        eos_ids: Sequence[int] | None = None,
        stop: Sequence[str] = (),
        generation_config: GenerationConfig | None = None,
        seed: int = 0,
        verifier: VerifierChoice = "auto",
        stats: list[AcceptanceStats] | None = None,
        timer: StageTimer | None = None,
    ) -> Iterator[Step]:
        """Decodes as `generate` does, one Step per base forward (the first is the prefill, which `timer` leaves out).

        Raises ValueError as `generate` does, and while another iterator of this generator is neither at its end nor closed.
        """
        request = self.prepare(
            prompts,
            max_new_tokens=max_new_tokens,
            eos_ids=eos_ids,
            stop=stop,
            generation_config=generation_config,
            seed=seed,
            verifier=verifier,
        )
        stats = stats if stats is not None else [AcceptanceStats() for _ in request.rows]
        if not self.decoding.acquire(blocking=False):
            raise ValueError(
                "this Generator is still decoding another batch: go to the end of its steps() or close() them first, "
                "or make a second Generator, with a drafter of its own, on the same model"
            )
        try:
            yield from self._decode(request, stats, timer or NoTimer())
        finally:
            self.decoding.release()

    def _decode(self, request: Request, stats: list[AcceptanceStats], timer: StageTimer) -> Iterator[Step]:
        """The decoding loop."""
        texts, rows, target = request.texts, request.rows, request.target
        cache = self._new_cache(texts, max(request.limits))
        self.drafter.start(texts)
        if target.draft_sampling is not None:
            self.drafter.sample(target.draft_sampling)
        hidden_BD = prefill(self.model, texts, cache)
        root_B = target.first(base_model.compute_logits(self.model, hidden_BD), texts)
        emitted = [[token] for token in root_B.tolist()]
        while True:
            with timer.stage("other"):
                new_tokens = [row.extend(tokens) if row.finish_reason is None else [] for row, tokens in zip(rows, emitted, strict=True)]
                for text, tokens in zip(texts, emitted, strict=True):
                    text.extend(tokens)
            yield Step(new_tokens, rows)
            running = [row.finish_reason is None for row in rows]
            if not any(running):
                return
            cache.let_go(running)
            with timer.stage("draft"):
                proposed = self.drafter.propose(root_B, hidden_BD, texts)
                fits = max(cache.held_lengths) + proposed.max_depth < self.max_length  # not in the last positions of the context
                candidates = proposed if fits else Candidates.root_only(root_B)
            logits_BNV, hidden_BND = tree_forward(self.model, candidates, cache, timer=timer)
            with timer.stage("verify"):
                accepted = target.verify(logits_BNV, candidates, texts, running)
                lengths = accepted.length_B.tolist()
            with timer.stage("compact"):
                cache.keep(accepted.path_BP, [length + 1 if runs else 0 for length, runs in zip(lengths, running, strict=True)])
            with timer.stage("other"):
                if fits:
                    self.drafter.observe(lengths, running)
                for stat, drafted, length, runs in zip(stats, candidates.num_drafted, lengths, running, strict=True):
                    if runs:
                        stat.record(max(drafted, length), length)  # a filler may come true
                emitted = emitted_tokens(candidates, accepted, lengths, running)
                last_B = accepted.path_BP.gather(1, accepted.length_B[:, None])[:, 0]
                hidden_BD = hidden_BND[torch.arange(len(rows), device=last_B.device), last_B]
                root_B = accepted.bonus_B

    def _end_tokens(self, generation_config: GenerationConfig | None) -> Sequence[int]:
        own = generation_config.eos_token_id if generation_config is not None else None
        if own is None:
            return base_model.end_of_sequence_ids(self.model, self.tokenizer)
        return [own] if isinstance(own, int) else list(own)

    def _target(
        self,
        generation_config: GenerationConfig | None,
        texts: list[list[int]],
        *,
        limits: list[int],
        eos_ids: Sequence[int],
        seed: int,
        verifier: VerifierChoice,
        answers: Sequence[RowOutput],
    ) -> Target:
        if generation_config is None:
            check_verifier(verifier, greedy=True)
            return GreedyTarget()
        return ProcessedTarget(
            self.model,
            generation_config,
            texts,
            max_new_tokens=limits,
            eos_ids=eos_ids,
            seed=seed,
            drafter=self.drafter,
            verifier=verifier,
            answers=answers,
        )

    def _limits(self, texts: list[list[int]], max_new_tokens: int | None, generation_config: GenerationConfig | None) -> list[int]:
        """The most new tokens of each row: the argument, else the settings' max_new_tokens, else what their max_length leaves."""
        total = None
        if max_new_tokens is None and generation_config is not None:
            max_new_tokens = generation_config.max_new_tokens
            total = generation_config.max_length if max_new_tokens is None else None
        if total is not None and total <= max(map(len, texts)):
            raise ValueError(f"max_length is {total} and a prompt has {max(map(len, texts))} tokens; ask for more")
        if max_new_tokens is not None and max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {max_new_tokens}; ask for at least 1")
        wanted = [total - len(text) if total is not None else max_new_tokens or MAX_NEW_TOKENS for text in texts]
        return [min(limit, self.max_length - len(text)) for limit, text in zip(wanted, texts, strict=True)]

    def _checked(self, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        if len(prompts) == 0:
            raise ValueError("no prompts were given")
        if any(isinstance(prompt, (int, str)) for prompt in prompts):
            raise ValueError("prompts is a list of prompts, each a list of token ids: put a single one into a list")
        try:
            texts = [[operator.index(token) for token in prompt] for prompt in prompts]
        except TypeError:
            raise ValueError("a prompt holds other things than token ids: encode it with the base's own tokenizer") from None
        for index, text in enumerate(texts):
            if not text:
                raise ValueError(f"prompt {index} has no tokens")
            if not 0 <= min(text) <= max(text) < self.num_tokens:
                raise ValueError(
                    f"prompt {index} has token ids outside 0 .. {self.num_tokens - 1}: encode it with the base's own tokenizer"
                )
            if len(text) >= self.max_length:
                raise ValueError(
                    f"prompt {index} has {len(text)} tokens and the model's context ends at {self.max_length}: shorten the prompt"
                )
        return texts

    def _new_cache(self, texts: list[list[int]], max_new_tokens: int) -> KVCache:
        room = max(map(len, texts)) + max_new_tokens + self.drafter.max_nodes + 1
        return KVCache(self.layer_shapes, len(texts), room, dtype=self.model.dtype, device=self.model.device)


def emitted_tokens(candidates: Candidates, accepted: Verification, lengths: Sequence[int], running: Sequence[bool]) -> list[list[int]]:
    """The accepted path below the root, of `lengths` tokens, and the bonus token; nothing for rows that have ended."""
    path_tokens = candidates.tokens_BN.gather(1, accepted.path_BP).tolist()
    return [
        [*tokens[1 : length + 1], bonus] if runs else []
        for tokens, length, bonus, runs in zip(path_tokens, lengths, accepted.bonus_B.tolist(), running, strict=True)
    ]


def stop_strings(generation_config: GenerationConfig | None) -> list[str]:
    found = generation_config.stop_strings if generation_config is not None else None
    return [found] if isinstance(found, str) else list(found or ())
