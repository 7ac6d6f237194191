"""The data of a run -> tokenised rows to train on and rows held out, checked, and the tokens worth proposing."""

from __future__ import annotations

import hashlib
import re
from typing import Any

from filelock import FileLock

from medusa_heads import base_model
from medusa_heads.embedded import cache_dir
from train.run_config import RunConfig


def prepare_data(config: RunConfig) -> tuple[Any, Any, Any]:
    """Tokenised training rows, validation rows (or None) and the counts of the former.

    Every process comes here; one prepares under a file lock, the others read its cache.
    """
    from datasets import concatenate_datasets

    from train.tokenized_data import tokenize_dataset

    cache = cache_dir() / "tokenized"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        lock = FileLock(cache / "prepare.lock").acquire()
    except OSError as error:
        raise ValueError(
            f"cannot write the data cache {cache} ({error.strerror}): set MEDUSA_HEADS_CACHE to a folder that can be written"
        ) from None
    with lock:
        tokenizer = base_model.load_tokenizer(config.base, revision=config.revision)
        options = dict[str, Any](max_length=config.max_length, cut_circles=config.cut_circles, cache_dir=cache)
        rows, counts = tokenize_dataset(config.data, tokenizer, limit=config.limit, data_format=config.data_format, **options)
        validation = []
        if config.validation:
            validation.append(tokenize_dataset(config.validation, tokenizer, **options)[0])
    if config.held_out:
        rows, held_out = split_by_id(rows, config.held_out)
        validation.append(held_out)
    return rows, concatenate_datasets(validation) if validation else None, counts


def split_by_id(rows: Any, num_held_out: int) -> tuple[Any, Any]:
    """Rows -> (training rows, held-out rows): those whose id has the lowest SHA-256 are held out, so
    that the choice depends on nothing but the ids. Several samples of one prompt (`id#0`, `id#1`) are never in both."""
    if num_held_out >= len(rows):
        raise ValueError(f"held_out: {num_held_out} of {len(rows)} conversations leaves none to train on: lower --held-out")
    prompts = [re.sub(r"#\d+$", "", row_id) for row_id in rows["id"]]
    hashes = [hashlib.sha256(prompt.encode()).hexdigest() for prompt in prompts]
    order = sorted(range(len(rows)), key=hashes.__getitem__)
    held_out, last = order[:num_held_out], hashes[order[num_held_out - 1]] if num_held_out else ""
    training = [index for index in order[num_held_out:] if hashes[index] != last]
    if not training:
        raise ValueError(f"held_out: {num_held_out} conversations leave none of another prompt to train on: lower --held-out")
    return rows.select(sorted(training)), rows.select(sorted(held_out))


def check_fits_base(model: Any, *all_rows: Any | None, max_length: int) -> None:
    """Raises ValueError where rows of max_length tokens are too long for the base, or hold tokens that it does not have."""
    if max_length > (context := base_model.max_length(model)):
        raise ValueError(f"max_length: {max_length} is beyond the base model's context of {context} tokens; lower it")
    for rows in all_rows:
        check_token_ids(rows, base_model.vocab_size(model))


def check_token_ids(rows: Any | None, vocab_size: int) -> None:
    """Raises ValueError naming the first row, if any, whose token ids, stored with it, are another model's."""
    for batch in () if rows is None else rows.select_columns(["id", "input_ids"]).with_format("numpy").iter(1000):
        for row_id, ids in zip(batch["id"], batch["input_ids"], strict=True):
            if len(ids) and ids.max() >= vocab_size:
                raise ValueError(
                    f"data: conversation {row_id} holds token id {ids.max()}, and the base has {vocab_size} tokens: it was answered by "
                    "another model; answer the prompts anew with `medusa-heads regenerate`"
                )


def frequent_tokens(rows: Any, size: int) -> Any:
    """The `size` most frequent supervised tokens, ascending; fewer where the text has fewer."""
    import numpy as np
    import torch

    counts = np.zeros(1, dtype=np.int64)
    for batch in rows.select_columns(["input_ids", "assistant_mask"]).with_format("numpy").iter(1000):
        ids = np.concatenate([row[mask.astype(bool)] for row, mask in zip(batch["input_ids"], batch["assistant_mask"], strict=True)])
        found = np.bincount(ids, minlength=len(counts))
        found[: len(counts)] += counts
        counts = found
    order = np.argsort(-counts, kind="stable")[:size]
    return torch.from_numpy(np.sort(order[counts[order] > 0]))
