"""A chat model and its template -> prompts of its own: what it expects a user to say."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm
from transformers import PreTrainedModel

from infer.output_file import write_text
from infer.sampling import Sampling
from infer.static_generate import default_batch_size, generate_many
from train.chat_turns import ChatTurns

MAX_TOKENS = 256
MIN_CHARACTERS = 8
SOURCE = "self-written"


def write_self_prompts(
    model: PreTrainedModel, chat: ChatTurns, path: Path, *, count: int, seed: int, eos_ids: Sequence[int], batch_size: int | None
) -> dict[str, int]:
    """Samples `count` user turns at temperature 1 and writes the usable ones to `path` as prompt rows.

    Returns the counts: kept, and dropped by reason. Raises ValueError when none is usable.
    """
    prefix, end_of_turn = chat.before_user_text()
    stops = [*eos_ids] + ([] if end_of_turn is None else [end_of_turn])
    batch = batch_size or default_batch_size(model, len(prefix) + MAX_TOKENS)
    answers = generate_many(
        model,
        [(f"self-prompt-{index}", prefix) for index in range(count)],
        max_new_tokens=MAX_TOKENS,
        eos_ids=stops,
        batch_size=batch,
        sampling=Sampling(temperature=1.0, seed=seed),
    )
    found = {str(answer.key): answer for answer in tqdm(answers, total=count, desc="self-prompts", unit="prompt")}
    counts: Counter[str] = Counter()
    rows: list[dict[str, Any]] = []
    seen: set[str] = set()
    for index in range(count):
        answer = found[f"self-prompt-{index}"]
        text = chat.tokenizer.decode(answer.token_ids[:-1] if answer.finish_reason == "eos" else answer.token_ids).strip()
        reason = "too_long" if answer.finish_reason != "eos" else _reason_to_drop(text, chat.tokenizer, seen)
        counts[reason or "kept"] += 1
        if reason is None:
            seen.add(_normalised(text))
            message = {"role": "user", "content": text}
            rows.append({"id": f"self-{seed}-{index:06d}", "source": SOURCE, "category": SOURCE, "messages": [message]})
    if not rows:
        raise ValueError(f"--self-prompts {count}: none of the model's own prompts is usable ({dict(counts)}); give --prompts instead")
    write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return dict(counts)


def _normalised(text: str) -> str:
    return " ".join(text.casefold().split())


def _reason_to_drop(text: str, tokenizer: Any, seen: set[str]) -> str | None:
    if not text:
        return "empty"
    if "\ufffd" in text or any(token.content in text for token in tokenizer.added_tokens_decoder.values()):
        return "broken"
    if len(text) < MIN_CHARACTERS:
        return "too_short"
    return "duplicate" if _normalised(text) in seen else None
