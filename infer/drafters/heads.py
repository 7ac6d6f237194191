"""Draft heads on the accepted node's hidden state -> candidates on a tree."""

# B batch, K heads, D hidden, V vocabulary

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from infer.candidates import Candidates, beam_candidates, static_candidates
from infer.drafters import Drafter, DraftSampling
from infer.engine.packed_linear import lm_head_rows
from infer.sampled_candidates import sampled_candidates
from infer.tree import Path_, Tree
from infer.tree_builders import static_tree
from infer.tree_spec import BeamTree
from infer.verifiers import SampledShape
from medusa_heads import base_model
from medusa_heads.checkpoint import HeadsCheckpoint
from medusa_heads.heads import DraftHeads


def drawn_shape(tree: Tree | BeamTree) -> SampledShape | None:
    """What drafts drawn over the tree form; None for a beam tree, whose shape depends on its tokens: there they cannot be drawn."""
    if isinstance(tree, BeamTree):
        return None
    return "chain" if tree.depth == tree.num_nodes else "tree"


class HeadsDrafter(Drafter):
    """Proposes from draft heads, over a static tree or the per-step beam tree.

    Over a static tree drafts can also be drawn: the children of a node at depth d from head d + 1's law at
    the request's temperature (see sampled_candidates.py). A beam tree's shape depends on its tokens, so there
    they cannot: where they are to be drawn, a static tree of as many nodes takes its place, if `static_nodes` are given.

    draft_vocabulary: the token ids [V'] that are proposed, None for all. Verification sees every token
    whatever is proposed; fewer rows of the LM head make drafting cheaper.
    static_nodes: rank paths in falling order (HeadsCheckpoint.static_nodes).
    """

    name = "heads"

    def __init__(
        self,
        model: PreTrainedModel,
        heads: DraftHeads,
        tree: Tree | BeamTree,
        *,
        draft_vocabulary: Tensor | None = None,
        static_nodes: Mapping[Path_, float] | None = None,
    ) -> None:
        """Raises ValueError when a static tree is deeper than the heads, or names a rank beyond what is proposed."""
        self.num_proposed = heads.config.vocab_size if draft_vocabulary is None else len(draft_vocabulary)
        if isinstance(tree, Tree):
            tree.check(num_heads=heads.config.num_heads, vocab_size=self.num_proposed)
        self.model, self.heads, self.tree, self.static_nodes = model, heads, tree, static_nodes
        self.static_trees: dict[int, Tree] = {}
        self.transform = base_model.logit_transform(model)
        self.vocabulary = draft_vocabulary.to(model.device) if draft_vocabulary is not None else None
        self.lm_head = base_model.lm_head(model)
        if self.vocabulary is not None:
            self.lm_head = lm_head_rows(self.lm_head, self.vocabulary)
        self.sampling: DraftSampling | None = None
        self.generators: list[torch.Generator] = []

    @classmethod
    def from_checkpoint(
        cls,
        model: PreTrainedModel,
        checkpoint: HeadsCheckpoint,
        tree: Tree | BeamTree,
        *,
        static_nodes: Mapping[Path_, float] | None = None,
    ) -> HeadsDrafter:
        """With the draft vocabulary that the heads were trained for. Raises ValueError as the constructor does."""
        return cls(model, checkpoint.heads, tree, draft_vocabulary=checkpoint.draft_vocabulary, static_nodes=static_nodes)

    def with_tree(self, tree: Tree | BeamTree) -> HeadsDrafter:
        """Another drafter over the same layers. Raises ValueError as the constructor does."""
        if isinstance(tree, Tree):
            tree.check(num_heads=self.heads.config.num_heads, vocab_size=self.num_proposed)
        other = copy.copy(self)
        other.tree, other.static_trees = tree, {}
        return other

    @property
    def max_nodes(self) -> int:
        return self.tree.num_nodes

    @property
    def sampled_shape(self) -> SampledShape | None:
        return "tree" if self.static_nodes else drawn_shape(self.tree)

    @property
    def draws_by_default(self) -> bool:
        """Not over a beam tree: its size may follow measured times, and texts that depend on it would differ under one seed."""
        return isinstance(self.tree, Tree)

    def resize(self, num_nodes: int) -> None:
        assert isinstance(self.tree, BeamTree), "static trees have one size"
        self.tree = replace(self.tree, num_nodes=num_nodes)

    def start(self, prompts: list[list[int]]) -> None:
        self.sampling = None

    def sample(self, sampling: DraftSampling) -> None:
        self.sampling, self.generators = sampling, [torch.Generator().manual_seed(seed) for seed in sampling.seeds]

    def propose(self, root_B: Tensor, hidden_BD: Tensor, texts: list[list[int]]) -> Candidates:
        tree = self.tree
        if not tree.num_nodes:
            return Candidates.root_only(root_B)
        if self.sampling is not None and isinstance(tree, BeamTree):
            tree = self.static_tree(tree.num_nodes)
        logits_BKV = self.draft_logits(hidden_BD, tree.depth if isinstance(tree, Tree) else tree.num_nodes)
        if isinstance(tree, BeamTree):
            return beam_candidates(root_B, logits_BKV, tree.num_nodes, tree.width, vocabulary=self.vocabulary)
        if self.sampling is None:
            return static_candidates(root_B, logits_BKV, tree, vocabulary=self.vocabulary)
        return sampled_candidates(
            root_B,
            logits_BKV,
            tree,
            temperature=self.sampling.temperature,
            generators=self.generators,
            vocabulary=self.vocabulary,
        )

    def static_tree(self, num_nodes: int) -> Tree:
        assert self.static_nodes, "who gave none is not asked to draw over a beam tree"
        size = min(num_nodes, len(self.static_nodes))
        if size not in self.static_trees:
            tree = static_tree(self.static_nodes, size)
            tree.check(num_heads=self.heads.config.num_heads, vocab_size=self.num_proposed)
            self.static_trees[size] = tree
        return self.static_trees[size]

    def draft_logits(self, hidden_BD: Tensor, reach: int | None = None) -> Tensor:
        """Logits [B, K', V'] over the draft vocabulary, through the shared LM head or the heads' own; K' slots
        are all that a tree `reach` deep needs, None all heads."""
        states_BKD = self.heads.draft_states(hidden_BD, reach)
        own = self.heads.own_logits(states_BKD)
        if own is not None:
            return own if self.vocabulary is None else own[..., self.vocabulary]
        return self.transform(self.lm_head(states_BKD))
