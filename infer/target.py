"""The base model's logits at the nodes of a tree -> the tokens it emits: greedy, or by any GenerationConfig.

Greedy decoding takes the argmax. Otherwise transformers' own logits processors run at every visited
node on the node's own prefix, which gives the law p that a sampled verifier reads. Under sample-and-match
one uniform number belongs to each emitted token, so the text under a seed does not depend on what was
drafted: in float32 it is that of plain decoding, token for token.
"""

# B batch, N tree nodes including the root, V vocabulary, R rows

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, TemperatureLogitsWarper, TopPLogitsWarper

from infer.candidates import Candidates
from infer.drafters import Drafter, DraftSampling
from infer.draws import Draws, GeneratorDraws, MostLikely
from infer.stopping import RowOutput
from infer.verifiers import VerifierChoice, needs_drawn_drafts, resolve_verifier, verdict
from infer.verify import Verification, verify_greedy
from infer.verify_sampled import DraftTree, Laws
from medusa_heads import base_model

NUM_TOP = 256  # tokens looked at first for a top-p cut-off


class Target(Protocol):
    """What decides the tokens of a batch. draft_sampling: how drafts must be drawn for it; None where any will do."""

    draft_sampling: DraftSampling | None

    def first(self, logits_BV: Tensor, texts: Sequence[Sequence[int]], running: Sequence[bool] | None = None) -> Tensor:
        """The tokens [B] after the texts; any where a row is not `running`, as all are by default."""
        ...

    def verify(self, logits_BNV: Tensor, candidates: Candidates, texts: Sequence[Sequence[int]], running: Sequence[bool]) -> Verification:
        """The accepted path and the token after it. texts: prompt and answer so far, root included; rows
        that are not `running` get an empty path."""
        ...


class GreedyTarget:
    """The argmax at every node, lowest id on ties."""

    draft_sampling: DraftSampling | None = None

    def first(self, logits_BV: Tensor, texts: Sequence[Sequence[int]], running: Sequence[bool] | None = None) -> Tensor:
        return logits_BV.argmax(-1)

    def verify(self, logits_BNV: Tensor, candidates: Candidates, texts: Sequence[Sequence[int]], running: Sequence[bool]) -> Verification:
        return verify_greedy(logits_BNV.argmax(-1), candidates)


class ProcessedTarget:
    """The law of a GenerationConfig, read as transformers' `generate` reads it."""

    def __init__(
        self,
        model: PreTrainedModel,
        generation_config: GenerationConfig,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: Sequence[int],
        eos_ids: Sequence[int],
        seed: int,
        drafter: Drafter,
        verifier: VerifierChoice = "auto",
        answers: Sequence[RowOutput] = (),
    ) -> None:
        """answers: as they grow, which tells where they end; `verify` needs them. Raises ValueError naming a setting that tree
        decoding cannot honour, or why `verifier` cannot run with these settings and this drafter."""

        @functools.cache
        def processors(prompt_length: int, limit: int) -> tuple[LogitsProcessorList, bool]:
            return base_model.logits_processors(
                model, generation_config, prompt_length=prompt_length, max_new_tokens=limit, eos_ids=eos_ids
            )

        self.rows = []
        for row, (prompt, limit) in enumerate(zip(prompts, max_new_tokens, strict=True)):
            processing, sampled = processors(len(prompt), limit)
            self.rows.append(RowLaw(processing, seed=row_seed(seed, row) if sampled else None))
        self.answers = answers
        first = self.rows[0]
        self.verifier = resolve_verifier(
            verifier,
            drafter=drafter.name,
            sampled_shape=drafter.sampled_shape,
            draws_by_default=drafter.draws_by_default,
            temperature=0.0 if first.is_greedy else first.temperature,
            batch_size=len(self.rows),
        )
        self.draft_sampling: DraftSampling | None = None
        if needs_drawn_drafts(self.verifier):
            self.draft_sampling = DraftSampling(first.temperature, tuple(row_seed(seed, f"draft/{row}") for row in range(len(self.rows))))

    def first(self, logits_BV: Tensor, texts: Sequence[Sequence[int]], running: Sequence[bool] | None = None) -> Tensor:
        chosen = zip(self.rows, logits_BV, texts, running or [True] * len(texts), strict=True)
        tokens = [law.choose(logits_V, text) if runs else 0 for law, logits_V, text, runs in chosen]
        return torch.tensor(tokens, device=logits_BV.device)

    def verify(self, logits_BNV: Tensor, candidates: Candidates, texts: Sequence[Sequence[int]], running: Sequence[bool]) -> Verification:
        tokens, parents = candidates.tokens_BN.tolist(), candidates.parents_BN.expand_as(candidates.tokens_BN).tolist()
        drawn = candidates.draft_laws
        assert drawn is not None or self.draft_sampling is None or not candidates.num_nodes, "drafts that were to be drawn carry their laws"
        paths, bonus = [], []
        for row, law in enumerate(self.rows):
            path, token = [0], tokens[row][0]
            if running[row]:
                tree = DraftTree(tuple(tokens[row]), tuple(parents[row]))
                p = NodeLaws(law, tree, logits_BNV[row], texts[row], ends_after=self.answers[row].ends_after)
                q: Laws = drawn.row(row, vocab_size=logits_BNV.shape[-1]) if drawn is not None else []
                path, token = verdict(self.verifier, tree, p, q, law.draws, replace=drawn is not None and drawn.replace)
            paths.append(path)
            bonus.append(token)
        longest = max(map(len, paths))
        device = logits_BNV.device
        return Verification(
            torch.tensor([path + path[-1:] * (longest - len(path)) for path in paths], device=device),
            torch.tensor([len(path) - 1 for path in paths], device=device),
            torch.tensor(bonus, device=device),
        )


class NoTokenLeft(ValueError):
    """The settings leave no token to choose from."""


class RowLaw:
    """The next-token law of one answer, and what draws from it. seed: None takes the most likely token."""

    def __init__(self, processors: LogitsProcessorList, *, seed: int | None) -> None:
        self.processors, self.is_greedy = processors, seed is None
        self.draws: Draws = MostLikely() if seed is None else GeneratorDraws(torch.Generator().manual_seed(seed))

    @property
    def temperature(self) -> float:
        """What the settings divide logits by."""
        return next((float(p.temperature) for p in self.processors if isinstance(p, TemperatureLogitsWarper)), 1.0)

    def scores(self, logits_V: Tensor, prefix: Sequence[int]) -> Tensor:
        """Processed logits, float32 [V]. Raises NoTokenLeft when the settings leave none."""
        scores_1V = logits_V.float()[None]
        ids_1T = torch.tensor([list(prefix)], device=logits_V.device) if len(self.processors) else None
        for processor in self.processors:
            if type(processor) is TopPLogitsWarper and processor.filter_value == -torch.inf:
                scores_1V = top_p_cut(scores_1V, processor.top_p, processor.min_tokens_to_keep)
            else:
                scores_1V = processor(ids_1T, scores_1V)
        most = float(scores_1V.max())
        if most == torch.inf or most != most:
            raise ValueError(
                f"the logits overflow at temperature {self.temperature:g}: raise it, or take the most likely token (temperature 0)"
            )
        if most == -torch.inf:
            raise NoTokenLeft("the generation settings leave no token to choose from (all logits are masked): loosen them")
        return scores_1V[0]

    def weights(self, logits_V: Tensor, prefix: Sequence[int]) -> Tensor:
        """What `draws` chooses by: processed logits when greedy (a softmax could tie them), else probabilities."""
        scores_V = self.scores(logits_V, prefix)
        return scores_V if self.is_greedy else scores_V.softmax(-1)

    def choose(self, logits_V: Tensor, prefix: Sequence[int]) -> int:
        """The next token after `prefix`."""
        return self.draws.index(self.weights(logits_V, prefix))


class NodeLaws:
    """The law after each node of one row's tree, on the node's own prefix, computed when a node is first visited.

    Verifiers look behind the end of an answer, and at drafts that the model would never write. Settings may leave no token there, which is
    no error of the answer: such a node gets an arbitrary law, none of which is emitted.
    """

    def __init__(
        self,
        law: RowLaw,
        tree: DraftTree,
        logits_NV: Tensor,
        text: Sequence[int],
        *,
        ends_after: Callable[[Sequence[int]], bool],
    ) -> None:
        """ends_after: whether the answer is over within further tokens."""
        self.law, self.tree, self.logits_NV, self.text = law, tree, logits_NV, text
        self.ends_after = ends_after
        self.known: dict[int, Tensor] = {}

    def __getitem__(self, node: int, /) -> Tensor:
        if node not in self.known:
            path = self.tree.path_to(node)
            below_root = [self.tree.tokens[ancestor] for ancestor in path[1:]]
            try:
                self.known[node] = self.law.weights(self.logits_NV[node], [*self.text, *below_root])
            except NoTokenLeft:
                if not self.ends_after(below_root) and not self._is_never_written(path):
                    raise
                self.known[node] = torch.eye(1, self.logits_NV.shape[-1], device=self.logits_NV.device)[0]
        return self.known[node]

    def _is_never_written(self, path: Sequence[int]) -> bool:
        """Whether a token of the path has no probability after those above it."""
        pairs = itertools.pairwise(path)
        return not self.law.is_greedy and any(float(self[parent][self.tree.tokens[node]]) <= 0 for parent, node in pairs)


def top_p_cut(scores_RV: Tensor, top_p: float, min_tokens_to_keep: int = 1) -> Tensor:
    """Masks all but the most likely tokens that together reach top_p. The vocabulary is not sorted: NUM_TOP tokens
    are looked at, and four times as many until they reach it. Ties at the cut-off keep the lower rank of torch.topk."""
    vocab_size, size = scores_RV.shape[-1], NUM_TOP
    log_total_R1 = scores_RV.logsumexp(-1, keepdim=True)
    while True:
        top_RW, order_RW = scores_RV.topk(min(size, vocab_size), -1)
        share_RW = (top_RW - log_total_R1).exp()
        if size >= vocab_size or bool((share_RW.sum(-1) >= top_p).all()):
            break
        size *= 4
    kept_RW = share_RW.cumsum(-1) - share_RW < top_p  # the mass of better tokens
    kept_RW[..., :min_tokens_to_keep] = True
    return torch.full_like(scores_RV, -torch.inf).scatter(-1, order_RW, top_RW.masked_fill(~kept_RW, -torch.inf))


def row_seed(seed: int, row: int | str) -> int:
    """A seed of its own for every row of a batch, and for every use that it is put to."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{row}".encode()).digest()[:8], "big") >> 1
