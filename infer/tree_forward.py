"""Candidates + cache -> logits and hidden states at every tree node, in one base forward."""

# B batch, R rows of it that the cache holds, N new tokens (tree nodes), S key length, D hidden, V vocabulary

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from infer.candidates import Candidates
from infer.kv_cache import KVCache
from infer.stage_timer import NoTimer, StageTimer
from medusa_heads import base_model


def forward_over_cache(model: PreTrainedModel, tokens_BN: Tensor, depths_BN: Tensor, visible_BNN: Tensor, cache: KVCache) -> Tensor:
    """One forward of new tokens on top of the cache. Returns last hidden states [B, N, D].

    The batch is that of the rows the cache holds, in its order.
    depths_BN: position of each token after the row's cached prefix; visible_BNN: which of the new
    tokens each may attend to (itself included); structural tensors may have a batch of 1. Every
    token sees its row's whole prefix. The new keys and values lie in the cache until `keep`.
    """
    batch, num_new = tokens_BN.shape
    key_length = cache.begin(num_new)
    device = tokens_BN.device
    lengths_B = torch.tensor(cache.held_lengths, device=device)
    position_BN = lengths_B[:, None] + depths_BN
    key_index_S = torch.arange(key_length, device=device)
    offset_BS = key_index_S - lengths_B[:, None]  # of a key among the new tokens
    is_new_BS = (offset_BS >= 0) & (offset_BS < num_new)
    new_index_BS = offset_BS.clamp(0, num_new - 1)
    visible_new_BNS = visible_BNN.expand(batch, -1, -1).gather(2, new_index_BS[:, None].expand(-1, num_new, -1))
    allowed_BNS = (offset_BS < 0)[:, None] | (is_new_BS[:, None] & visible_new_BNS)
    key_position_BS = torch.where(is_new_BS, lengths_B[:, None] + depths_BN.expand(batch, -1).gather(1, new_index_BS), key_index_S)
    mask = base_model.additive_masks(model, allowed_BNS, position_BN, key_position_BS)
    return base_model.forward_hidden(model, tokens_BN, attention_mask=mask, position_ids=position_BN, cache=cache)


def tree_forward(
    model: PreTrainedModel, candidates: Candidates, cache: KVCache, *, timer: StageTimer | None = None
) -> tuple[Tensor, Tensor]:
    """Verifies a tree: returns logits [B, N, V] and last hidden states [B, N, D] at its nodes.

    Rows that the cache has let go of are left out of the forward; what is returned for them means nothing.
    """
    timer = timer or NoTimer()
    all_held = len(cache.rows) == len(cache.lengths)
    with timer.stage("forward"):
        structure = (candidates.tokens_BN, candidates.depths_BN, candidates.ancestors_BNN)
        tokens_RN, depths_RN, ancestors_RNN = (t if all_held or len(t) == 1 else t[cache.rows] for t in structure)
        hidden_RND = forward_over_cache(model, tokens_RN, depths_RN, ancestors_RNN, cache)
    with timer.stage("logits"):
        logits_RNV = base_model.compute_logits(model, hidden_RND)
    if all_held:
        return logits_RNV, hidden_RND
    places = [cache.rows.index(row) if row in cache.rows else 0 for row in range(len(cache.lengths))]
    return logits_RNV[places], hidden_RND[places]


def prefill(model: PreTrainedModel, rows: list[list[int]], cache: KVCache, chunk: int = 1024) -> Tensor:
    """Reads prompts (rows of token ids, ragged, none empty) into the cache, `chunk` tokens at a time.

    Returns the last hidden state of every prompt, [B, D].
    """
    device = model.device
    longest = max(map(len, rows))
    ids_BT = torch.tensor([row + [0] * (longest - len(row)) for row in rows], device=device)
    counts = [len(row) for row in rows]
    last: list[Tensor | None] = [None] * len(rows)
    for start in range(0, longest, chunk):
        piece_BN = ids_BT[:, start : start + chunk]
        steps = torch.arange(piece_BN.shape[1], device=device)
        causal = (steps[:, None] >= steps)[None]
        hidden_BND = forward_over_cache(model, piece_BN, steps[None], causal, cache)
        taken = [min(max(count - start, 0), piece_BN.shape[1]) for count in counts]
        for row, count in enumerate(counts):
            if start < count <= start + chunk:
                last[row] = hidden_BND[row, count - start - 1]
        cache.keep(steps.expand(len(rows), -1), taken)
    return torch.stack([hidden for hidden in last if hidden is not None])
