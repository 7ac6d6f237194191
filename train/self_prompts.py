"""A chat model and its template -> prompts of its own: what it expects a user to say, or how it would go on from a given beginning."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm
from transformers import PreTrainedModel

from infer.output_file import write_text
from infer.static.sampling import Sampling
from infer.static.static_generate import default_batch_size, generate_many
from train.chat_turns import ChatTurns
from train.jobs import normalised

MAX_TOKENS = 256
MIN_CHARACTERS = 8
SOURCE = "self-written"
BEGINNING = (0.2, 0.6)  # share of a given prompt's words that one of the model's own begins with


def write_self_prompts(
    model: PreTrainedModel,
    chat: ChatTurns,
    path: Path,
    *,
    indices: Sequence[int],
    seed: int,
    eos_ids: Sequence[int],
    batch_size: int | None,
    like: Sequence[str] = (),
) -> dict[str, int]:
    """Samples one user turn per index at temperature 1 and writes the usable ones to `path` as prompt rows.

    indices: a text depends on its own, the seed and the model, so that shards can write different ones.
    like: user turns, taken in order and again; each new one begins with the first words of one of these,
    a fifth to three fifths of them, so that a narrow domain can be asked for. Returns the counts: kept, and
    dropped by reason. Raises ValueError when none is usable.
    """
    prefix, end_of_turn = chat.before_user_text()
    stops = [*eos_ids] + ([] if end_of_turn is None else [end_of_turn])
    beginnings = [_beginning(like[index % len(like)], seed, index) if like else "" for index in indices]
    begun = [chat.tokenizer(text, add_special_tokens=False)["input_ids"] for text in beginnings]
    batch = batch_size or default_batch_size(model, len(prefix) + max(map(len, begun)) + MAX_TOKENS)
    answers = generate_many(
        model,
        [(f"self-prompt-{index}", prefix + ids) for index, ids in zip(indices, begun, strict=True)],
        max_new_tokens=MAX_TOKENS,
        eos_ids=stops,
        batch_size=batch,
        sampling=Sampling(temperature=1.0, seed=seed),
    )
    found = {str(answer.key): answer for answer in tqdm(answers, total=len(indices), desc="self-prompts", unit="prompt")}
    counts: Counter[str] = Counter()
    rows: list[dict[str, Any]] = []
    seen = {normalised(text) for text in like}
    for index, beginning, ids in zip(indices, beginnings, begun, strict=True):
        answer = found[f"self-prompt-{index}"]
        written = answer.token_ids[:-1] if answer.finish_reason == "eos" else answer.token_ids
        text = (beginning + _decode_after(ids, written, chat.tokenizer)).strip()
        reason = "too_long" if answer.finish_reason != "eos" else _reason_to_drop(text, chat.tokenizer, seen)
        counts[reason or "kept"] += 1
        if reason is None:
            seen.add(normalised(text))
            message = {"role": "user", "content": text}
            row_id = self_prompt_id(index, seed=seed, is_like=bool(like))
            rows.append({"id": row_id, "source": SOURCE, "category": SOURCE, "messages": [message]})
    if not rows:
        raise ValueError(
            f"--self-prompts {len(indices)}: none of the model's own prompts is usable ({dict(counts)}); give --prompts instead"
        )
    write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return dict(counts)


def self_prompt_id(index: int, *, seed: int, is_like: bool) -> str:
    return f"self-{'like-' if is_like else ''}{seed}-{index:06d}"


def _beginning(text: str, seed: int, index: int) -> str:
    """The first words of `text`, as they stand there; how many depends on the seed and the index."""
    ends = [match.end() for match in re.finditer(r"\S+", text)]
    share = random.Random(f"{seed}/{index}").uniform(*BEGINNING)
    return text[: ends[max(0, round(share * len(ends)) - 1)]] if ends else ""


def _decode_after(before: list[int], ids: list[int], tokenizer: Any) -> str:
    """The text of `ids` behind `before`: decoded alone, many tokenizers would drop a space at its start."""
    return tokenizer.decode(before + ids)[len(tokenizer.decode(before)) :]


def _reason_to_drop(text: str, tokenizer: Any, seen: set[str]) -> str | None:
    if not text:
        return "empty"
    if "\ufffd" in text or any(token.content in text for token in tokenizer.added_tokens_decoder.values()):
        return "broken"
    if len(text) < MIN_CHARACTERS:
        return "too_short"
    return "duplicate" if normalised(text) in seen else None
