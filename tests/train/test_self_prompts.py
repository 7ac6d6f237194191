"""Prompts that go on from a given beginning: their text is the beginning and what the model wrote, with the space between them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from infer.static.static_generate import Answer
from tests.tiny_models import TURN_END, tiny_model, tiny_tokenizer
from train import self_prompts
from train.chat_turns import ChatTurns
from train.self_prompts import write_self_prompts

EXAMPLE = "the cat sat on the mat and the dog ran"
WHOLE = f"{EXAMPLE} to the house"


def tokenizer_of_leading_spaces() -> PreTrainedTokenizerFast:
    """As those of Llama 2, Mistral and Phi-3: a space stands before the first word, and decoding strips the first one."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    strip = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]  # type: ignore[list-item]
    core.decoder = decoders.Sequence(strip)
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    core.train_from_iterator([WHOLE] * 9, trainers.BpeTrainer(vocab_size=200, special_tokens=special, show_progress=False))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>")
    tokenizer.chat_template = tiny_tokenizer().chat_template
    return tokenizer


@pytest.mark.parametrize("make_tokenizer", [tiny_tokenizer, tokenizer_of_leading_spaces])
def test_words_are_not_glued(make_tokenizer: Callable[[], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = make_tokenizer()
    goal = tokenizer(WHOLE, add_special_tokens=False)["input_ids"]
    prefix, _ = ChatTurns(tokenizer).before_user_text()

    def write_the_rest(model: Any, prompts: Sequence[tuple[str, list[int]]], **_: Any) -> Iterator[Answer]:
        for key, ids in prompts:
            begun = len(ids) - len(prefix)
            assert 0 < begun < len(goal) and ids == prefix + goal[:begun]
            yield Answer(key, [*goal[begun:], TURN_END], "eos")

    monkeypatch.setattr(self_prompts, "generate_many", write_the_rest)
    for seed in range(4):  # beginnings of several lengths
        options: dict[str, Any] = {"indices": [0], "seed": seed, "eos_ids": [TURN_END], "batch_size": 1}
        write_self_prompts(tiny_model("llama"), ChatTurns(tokenizer), tmp_path / "own.jsonl", like=[EXAMPLE], **options)
        [row] = map(json.loads, (tmp_path / "own.jsonl").read_text().splitlines())
        assert row["messages"][0]["content"] == WHOLE
