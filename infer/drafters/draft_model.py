"""A small draft model on the accepted text -> a chain: its most likely tokens, or drawn from its law (speculative sampling).

Leviathan et al. 2022, arXiv 2211.17192; Chen et al. 2023, arXiv 2302.01318.
"""

# B batch, C chain length, D hidden, V vocabulary

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from infer.candidates import Candidates, chain_candidates
from infer.draft_laws import finite
from infer.drafters import Drafter, DraftSampling
from infer.kv_cache import KVCache
from infer.tree_forward import forward_over_cache, prefill
from infer.tree_support import check_tree_support
from infer.verifiers import SampledShape
from medusa_heads import base_model

DRAFT_LENGTH = 4


class DraftModelDrafter(Drafter):
    """Drafts chains of `length` tokens with a model of its own over the base's vocabulary.

    The draft model has a key-value cache of its own. Between two proposals it holds what was fed last; a
    proposal first drops from it whatever did not become text, then reads the tokens it has not seen, so
    drafts always follow accepted tokens. Beyond the draft model's context nothing is drafted.
    """

    name = "draft_model"

    def __init__(self, model: PreTrainedModel, draft: PreTrainedModel, length: int = DRAFT_LENGTH) -> None:
        """Raises ValueError when `draft` cannot draft for `model`: a vocabulary of another size, another device, or a
        cache or attention that cannot follow a text whose last tokens change."""
        if length < 1:
            raise ValueError(f"length {length} must be at least 1")
        check_same_size(model, draft)
        if draft.device != model.device:
            raise ValueError(f"the draft model lies on {draft.device} and the base model on {model.device}: move one of them")
        self.model, self.length = draft, length
        self.layer_shapes = check_tree_support(draft)
        self.max_length = min(base_model.max_length(model), base_model.max_length(draft))
        self.cache: KVCache | None = None
        self.fed: list[list[int]] = []  # what was drafted and fed after the text of the last proposal
        self.fed_from: list[int] = []  # the length of that text
        self.temperature = 1.0
        self.generators: list[torch.Generator] = []  # one per row where drafts are drawn, else none
        self.running: list[bool] = []  # all rows, until some are known to have ended

    @property
    def max_nodes(self) -> int:
        return self.length

    @property
    def sampled_shape(self) -> SampledShape | None:
        return "chain"

    def resize(self, num_nodes: int) -> None:
        self.length = num_nodes

    @torch.inference_mode()
    def start(self, prompts: list[list[int]]) -> None:
        room = min(max(map(len, prompts)), self.max_length) + self.length + 1
        self.cache = KVCache(self.layer_shapes, len(prompts), room, dtype=self.model.dtype, device=self.model.device)
        self.fed, self.fed_from = [[] for _ in prompts], [0] * len(prompts)
        self.running = [True] * len(prompts)
        self.generators = []

    def sample(self, sampling: DraftSampling) -> None:
        self.temperature = sampling.temperature
        self.generators = [torch.Generator().manual_seed(seed) for seed in sampling.seeds]

    @torch.inference_mode()
    def propose(self, root_B: Tensor, hidden_BD: Tensor, texts: list[list[int]]) -> Candidates:
        assert self.cache is not None, "start comes first"
        texts = [text if runs else text[:1] for text, runs in zip(texts, self.running, strict=True)]  # ended rows are in nobody's way
        kept = [self._num_valid(row, text) for row, text in enumerate(texts)]
        unread = [text[count:] for text, count in zip(texts, kept, strict=True)]
        chain_length = min(self.length, self.max_length - max(map(len, texts)))
        if chain_length < 1 or max(kept) + max(map(len, unread)) > self.max_length:  # the last positions of the context
            return Candidates.root_only(root_B)
        self.cache.truncate(kept)
        drafted_BC, laws_BCV = self._draft(prefill(self.model, unread, self.cache), chain_length)
        self.fed, self.fed_from = drafted_BC[:, :-1].tolist(), [len(text) for text in texts]
        return chain_candidates(root_B, drafted_BC, laws_BCV=laws_BCV)

    def observe(self, lengths: list[int], running: list[bool]) -> None:
        self.running = running

    def _num_valid(self, row: int, text: list[int]) -> int:
        """How many of the row's cached tokens are text; never all of it, since its last token is read anew
        for its hidden state (a row that has ended brings nothing else)."""
        count = self.fed_from[row]
        for token, true in zip(self.fed[row], text[count:], strict=False):
            if token != true:
                break
            count += 1
        return min(count, len(text) - 1)

    def _draft(self, hidden_BD: Tensor, chain_length: int) -> tuple[Tensor, Tensor | None]:
        """The chain [B, C] after the cached text, and the laws [B, C, V] it was drawn from, if it was. Its last
        token is not fed."""
        assert self.cache is not None
        device = hidden_BD.device
        first_BN = torch.zeros(len(hidden_BD), 1, dtype=torch.long, device=device)
        alone_BNN = torch.ones(1, 1, 1, dtype=torch.bool, device=device)
        uniform_CB = self._uniform(chain_length, device)
        drafted: list[Tensor] = []
        laws: list[Tensor] = []
        for step in range(chain_length):
            if step:
                hidden_BD = forward_over_cache(self.model, drafted[-1][:, None], first_BN[:1], alone_BNN, self.cache)[:, 0]
                self.cache.keep(first_BN, [1] * len(hidden_BD))
            logits_BV = base_model.compute_logits(self.model, hidden_BD)
            if uniform_CB is None:
                drafted.append(logits_BV.argmax(-1))
            else:
                scores_BV = logits_BV.float() / self.temperature
                # Where a small temperature makes logits overflow, they share the draft: what is proposed is free to choose.
                laws.append(finite(scores_BV).softmax(-1))
                drafted.append(draw(laws[-1], uniform_CB[step]))
        return torch.stack(drafted, dim=1), torch.stack(laws, dim=1) if laws else None

    def _uniform(self, chain_length: int, device: torch.device) -> Tensor | None:
        """A number in [0, 1) for every token to be drawn, [C, B], from each row's own generator; None: nothing is drawn."""
        if not self.generators:
            return None
        rows = [torch.rand(chain_length, generator=generator, dtype=torch.float64) for generator in self.generators]
        return torch.stack(rows, dim=1).to(device)


def draw(law_BV: Tensor, uniform_B: Tensor) -> Tensor:
    """A token [B] of each law, by inversion: uniform numbers in [0, 1) in, never a token of probability 0 out."""
    cumulative_BV = law_BV.cumsum(-1, dtype=torch.float64)
    return torch.searchsorted(cumulative_BV, uniform_B[:, None] * cumulative_BV[:, -1:], right=True)[:, 0]


def load_draft_model(path: str | Path, base: PreTrainedModel, tokenizer: Any) -> PreTrainedModel:
    """A draft model for `base` from a local folder or a hub id, in the base's type and on its device.

    Raises ValueError naming --draft-model when it cannot be loaded, or when its tokenizer or its
    vocabulary is not that of the base, whose tokenizer is `tokenizer`.
    """
    option = f"--draft-model {path}"
    try:
        draft, draft_tokenizer = base_model.load_base(str(path), dtype=base.dtype, device=base.device)
    except ValueError as error:
        raise ValueError(str(error).replace("--base", "--draft-model")) from error
    try:
        check_same_vocabulary(tokenizer, draft_tokenizer)
        check_same_size(base, draft)
    except ValueError as error:
        raise ValueError(f"{option}: {error}") from error
    return draft


def check_same_size(base: PreTrainedModel, draft: PreTrainedModel) -> None:
    """Raises ValueError when the two models have logits for different numbers of tokens."""
    ours, theirs = base_model.vocab_size(base), base_model.vocab_size(draft)
    if ours != theirs:
        raise ValueError(
            f"the draft model has a vocabulary of {theirs} tokens and the base model one of {ours}: take a draft model of the same "
            "family, or make one with `accelerate launch -m train.draft_model`"
        )


def check_same_vocabulary(tokenizer: Any, draft_tokenizer: Any) -> None:
    """Raises ValueError when a token id stands for different text in the two tokenizers."""
    ours, theirs = (
        {index: token for token, index in vocabulary.items()} for vocabulary in (tokenizer.get_vocab(), draft_tokenizer.get_vocab())
    )
    differing = sorted(index for index in ours.keys() | theirs.keys() if ours.get(index) != theirs.get(index))
    if differing:
        raise ValueError(
            f"the draft model's tokenizer is another one ({len(differing)} ids stand for other tokens, the first: {differing[0]} is "
            f"{ours.get(differing[0])!r} in the base and {theirs.get(differing[0])!r} in the draft): take a draft model of the same family"
        )
