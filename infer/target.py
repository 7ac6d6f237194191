"""The base model's logits at the nodes of a tree -> the tokens it emits: greedy, or by any GenerationConfig.

Greedy decoding takes the argmax. Otherwise transformers' own logits processors run at every visited
node on the node's own prefix, and the node draws one token (sample-and-match: go to the child that
holds it, else emit it and stop). One uniform number belongs to each emitted token, so the text under
a seed does not depend on what was drafted: in float32 it is that of plain decoding, token for token.
"""

# B batch, N tree nodes including the root, V vocabulary

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, TopPLogitsWarper

from infer.candidates import Candidates
from infer.draws import Draws, GeneratorDraws, MostLikely
from infer.verify import Verification, verify_greedy
from infer.verify_sampled import DraftTree, sample_and_match
from medusa_heads import base_model

NUM_TOP = 256  # candidates looked at before a top-p cut-off is searched in the whole vocabulary


class Target(Protocol):
    """What decides the tokens of a batch; drafts only decide how many of them one forward yields."""

    def first(self, logits_BV: Tensor, texts: Sequence[Sequence[int]]) -> Tensor:
        """The tokens [B] after the prompts."""
        ...

    def verify(self, logits_BNV: Tensor, candidates: Candidates, texts: Sequence[Sequence[int]], running: Sequence[bool]) -> Verification:
        """The accepted path and the token after it. texts: prompt and answer so far, root included; rows
        that are not `running` get an empty path."""
        ...


class GreedyTarget:
    """The argmax at every node, lowest id on ties."""

    def first(self, logits_BV: Tensor, texts: Sequence[Sequence[int]]) -> Tensor:
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
    ) -> None:
        """Raises ValueError naming a setting that tree decoding cannot honour."""
        self.rows = []
        for index, (prompt, limit) in enumerate(zip(prompts, max_new_tokens, strict=True)):
            processors, sampled = base_model.logits_processors(
                model, generation_config, prompt_length=len(prompt), max_new_tokens=limit, eos_ids=eos_ids
            )
            self.rows.append(RowLaw(processors, seed=row_seed(seed, index) if sampled else None))

    def first(self, logits_BV: Tensor, texts: Sequence[Sequence[int]]) -> Tensor:
        tokens = [law.choose(logits_V, text) for law, logits_V, text in zip(self.rows, logits_BV, texts, strict=True)]
        return torch.tensor(tokens, device=logits_BV.device)

    def verify(self, logits_BNV: Tensor, candidates: Candidates, texts: Sequence[Sequence[int]], running: Sequence[bool]) -> Verification:
        parents_BN = candidates.parents_BN.expand_as(candidates.tokens_BN)
        paths, bonus = [], []
        for row, law in enumerate(self.rows):
            tree = DraftTree(tuple(candidates.tokens_BN[row].tolist()), tuple(parents_BN[row].tolist()))
            path, token = [0], tree.tokens[0]
            if running[row]:
                path, token = sample_and_match(tree, NodeLaws(law, tree, logits_BNV[row], texts[row]), law.draws)
            paths.append(path)
            bonus.append(token)
        longest = max(map(len, paths))
        device = logits_BNV.device
        return Verification(
            torch.tensor([path + path[-1:] * (longest - len(path)) for path in paths], device=device),
            torch.tensor([len(path) - 1 for path in paths], device=device),
            torch.tensor(bonus, device=device),
        )


class RowLaw:
    """The next-token law of one answer, and what draws from it. seed: None takes the most likely token."""

    def __init__(self, processors: LogitsProcessorList, *, seed: int | None) -> None:
        self.processors, self.is_greedy = processors, seed is None
        self.draws: Draws = MostLikely() if seed is None else GeneratorDraws(torch.Generator().manual_seed(seed))

    def scores(self, logits_V: Tensor, prefix: Sequence[int]) -> Tensor:
        """Processed logits, float32 [V]. Raises ValueError when the settings leave no token."""
        scores_1V = logits_V.float()[None]
        ids_1T = torch.tensor([list(prefix)], device=logits_V.device) if len(self.processors) else None
        for processor in self.processors:
            if type(processor) is TopPLogitsWarper and processor.filter_value == -torch.inf:
                scores_1V = top_p_cut(scores_1V, processor.top_p, processor.min_tokens_to_keep)
            else:
                scores_1V = processor(ids_1T, scores_1V)
        if not bool(torch.isfinite(scores_1V.max())):
            raise ValueError("the generation settings leave no token to choose from (all logits are masked): loosen them")
        return scores_1V[0]

    def weights(self, logits_V: Tensor, prefix: Sequence[int]) -> Tensor:
        """What `draws` chooses by: processed logits when greedy (a softmax could tie them), else unnormalised probabilities."""
        scores_V = self.scores(logits_V, prefix)
        return scores_V if self.is_greedy else (scores_V - scores_V.max()).exp()

    def choose(self, logits_V: Tensor, prefix: Sequence[int]) -> int:
        """The next token after `prefix`."""
        return self.draws.index(self.weights(logits_V, prefix))


class NodeLaws:
    """The law after each node of one row's tree, on the node's own prefix, computed when a node is visited."""

    def __init__(self, law: RowLaw, tree: DraftTree, logits_NV: Tensor, text: Sequence[int]) -> None:
        self.law, self.tree, self.logits_NV, self.text = law, tree, logits_NV, text

    def __getitem__(self, node: int, /) -> Tensor:
        below_root = [self.tree.tokens[ancestor] for ancestor in self.tree.path_to(node)[1:]]
        return self.law.weights(self.logits_NV[node], [*self.text, *below_root])


def top_p_cut(scores_RV: Tensor, top_p: float, min_tokens_to_keep: int = 1) -> Tensor:
    """Masks all but the most likely tokens that together reach top_p, without sorting the vocabulary where
    its NUM_TOP most likely tokens reach it. Ties at the cut-off keep the lower rank of torch.topk."""
    size = min(NUM_TOP, scores_RV.shape[-1])
    log_total_R1 = scores_RV.logsumexp(-1, keepdim=True)
    top_RW, order_RW = scores_RV.topk(size, -1)
    if bool(((top_RW - log_total_R1).exp().sum(-1) < top_p).any()):
        top_RW, order_RW = scores_RV.sort(-1, descending=True)
    share_RW = (top_RW - log_total_R1).exp()
    kept_RW = share_RW.cumsum(-1) - share_RW < top_p  # the mass of better tokens
    kept_RW[..., :min_tokens_to_keep] = True
    return torch.full_like(scores_RV, -torch.inf).scatter(-1, order_RW, top_RW.masked_fill(~kept_RW, -torch.inf))


def row_seed(seed: int, row: int) -> int:
    """A seed of its own for every row of a batch."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{row}".encode()).digest()[:8], "big") >> 1
