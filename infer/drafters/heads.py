"""Draft heads on the accepted node's hidden state -> candidates on a tree."""

# B batch, K heads, D hidden, V vocabulary

from __future__ import annotations

from torch import Tensor
from transformers import PreTrainedModel

from infer.candidates import Candidates, beam_candidates, static_candidates
from infer.tree import Tree
from infer.tree_spec import BeamTree
from medusa_heads import base_model
from medusa_heads.heads import DraftHeads


class HeadsDrafter:
    """Proposes from draft heads, over a static tree or the per-step beam tree."""

    name = "heads"

    def __init__(self, model: PreTrainedModel, heads: DraftHeads, tree: Tree | BeamTree) -> None:
        if isinstance(tree, Tree):
            tree.check(num_heads=heads.config.num_heads, vocab_size=heads.config.vocab_size)
        self.model, self.heads, self.tree = model, heads, tree

    @property
    def max_nodes(self) -> int:
        return self.tree.num_nodes

    def start(self, prompts: list[list[int]]) -> None:
        pass

    def propose(self, root_B: Tensor, hidden_BD: Tensor, texts: list[list[int]]) -> Candidates:
        if not self.tree.num_nodes:
            return Candidates.root_only(root_B)
        logits_BKV = self.draft_logits(hidden_BD)
        if isinstance(self.tree, Tree):
            return static_candidates(root_B, logits_BKV, self.tree)
        return beam_candidates(root_B, logits_BKV, self.tree.num_nodes, self.tree.width)

    def draft_logits(self, hidden_BD: Tensor) -> Tensor:
        """Logits [B, K, V] of every head, through the shared LM head or their own."""
        states_BKD = self.heads.draft_states(hidden_BD)
        own = self.heads.own_logits(states_BKD)
        return own if own is not None else base_model.compute_logits(self.model, states_BKD)
