"""Assistant masks per chat template, exact to the character."""

from __future__ import annotations

from itertools import groupby

import pytest

from tests.train.chat_templates import (
    CHATML,
    CHATML_PROMPT,
    CHATML_TURN,
    EOS_AFTER_ALL,
    GEMMA,
    LLAMA3,
    MARKED,
    MULTI,
    NO_END_OF_TURN,
    PROMPT_WITH_THINK,
    QWEN3,
    SINGLE,
    THINKING,
    WITH_SYSTEM,
    Messages,
    make_tokenizer,
    turns,
)
from train.conversations import Conversation
from train.tokenization import check_template, tokenize_conversation


def supervised(template: str, messages: Messages) -> list[str]:
    """The decoded text of every run of supervised tokens, after checking that the row is the rendering."""
    tokenizer = make_tokenizer(template)
    row = tokenize_conversation(Conversation("c", tuple(messages)), tokenizer)
    assert len(row.input_ids) == len(row.assistant_mask)
    assert tokenizer.decode(row.input_ids) == tokenizer.apply_chat_template(messages, tokenize=False)
    pairs = groupby(zip(row.input_ids, row.assistant_mask, strict=True), key=lambda pair: pair[1])
    return [str(tokenizer.decode([token for token, _ in run])) for marked, run in pairs if marked]


MASKS: dict[str, tuple[str, Messages, list[str]]] = {
    "chatml single": (CHATML, SINGLE, ["Hello there<|im_end|>"]),
    "chatml multi": (CHATML, MULTI, ["Hello there<|im_end|>", "I am 🙂 the answer<|im_end|>", "Bye<|im_end|>"]),
    "chatml system": (CHATML, WITH_SYSTEM, ["Hello<|im_end|>", "Yes\n<|im_end|>"]),
    "chatml open end": (CHATML, MULTI[:3], ["Hello there<|im_end|>"]),
    "chatml answer first": (CHATML, MULTI[1:], ["Hello there<|im_end|>", "I am 🙂 the answer<|im_end|>", "Bye<|im_end|>"]),
    "chatml empty answer": (CHATML, turns("Hi", "", "Bye", "Bye"), ["<|im_end|>", "Bye<|im_end|>"]),
    "chatml answer repeats the prompt": (CHATML, turns("a", "a", "a", "a"), ["a<|im_end|>"] * 2),
    "llama3 single": (LLAMA3, SINGLE, ["Hello there<|eot_id|>"]),
    "llama3 multi, trimmed": (LLAMA3, WITH_SYSTEM, ["Hello<|eot_id|>", "Yes<|eot_id|>"]),
    "gemma single": (GEMMA, SINGLE, ["Hello there<end_of_turn>"]),
    "gemma multi": (GEMMA, MULTI, ["Hello there<end_of_turn>", "I am 🙂 the answer<end_of_turn>", "Bye<end_of_turn>"]),
    "qwen3 single": (QWEN3, SINGLE, ["<think>\n\n</think>\n\nHello there<|im_end|>"]),
    "qwen3 strips earlier thinking": (QWEN3, THINKING, ["Hello<|im_end|>", "<think>\neasy\n</think>\n\n4<|im_end|>"]),
    "prompt that history does not show": (PROMPT_WITH_THINK, THINKING, ["\n\nHello</s>", "\n\n4</s>"]),
    "eos after all": (EOS_AFTER_ALL, MULTI[:4], ["Hello there<|end|>", "I am 🙂 the answer<|end|>"]),
    "no end of turn": (NO_END_OF_TURN, MULTI[:4], [" Hello there", " I am 🙂 the answer"]),
    "generation block single": (MARKED, SINGLE, ["Hello there<|im_end|>"]),
    "generation block multi": (MARKED, MULTI[:4], ["Hello there<|im_end|>", "I am 🙂 the answer<|im_end|>"]),
}


@pytest.mark.compat
@pytest.mark.parametrize("case", MASKS)
def test_supervised_text_per_template(case: str) -> None:
    template, messages, expected = MASKS[case]
    assert supervised(template, messages) == expected


def test_a_token_that_straddles_the_start_of_an_answer_is_not_supervised() -> None:
    ids = make_tokenizer(LLAMA3)("\n\n\n", add_special_tokens=False)["input_ids"]
    assert len(ids) == 1, "the control: prompt and answer share a token"
    assert supervised(LLAMA3.replace(" | trim", ""), turns("Hi", "\n Hello")) == [" Hello<|eot_id|>"]


def test_exact_tokens_are_used_verbatim_without_any_template() -> None:
    row = tokenize_conversation(Conversation("c", (), (9, 8, 7, 6, 5), ((1, 2), (3, 5))), make_tokenizer(None))
    assert row.input_ids == [9, 8, 7, 6, 5]
    assert row.assistant_mask == [False, True, False, True, True]


# ---------------------------------------------------------------- what cannot work


def test_a_template_without_generation_prompt_is_refused() -> None:
    check_template(make_tokenizer(CHATML))
    with pytest.raises(ValueError, match="no generation prompt"):
        check_template(make_tokenizer(CHATML.replace(CHATML_PROMPT, "")))


def test_no_template_and_a_slow_tokenizer_are_refused() -> None:
    with pytest.raises(ValueError, match="no usable chat template"):
        check_template(make_tokenizer(None))
    with pytest.raises(ValueError, match="fast tokenizer"):
        check_template(object())


def test_a_conversation_that_the_template_refuses_is_named() -> None:
    with pytest.raises(ValueError, match="conversation c: the chat template refuses it: System role not supported"):
        supervised(GEMMA, WITH_SYSTEM)


@pytest.mark.parametrize(
    ("turn", "reason"),
    [
        ("{{ '<|im_start|>' + m['role'] + '<|im_end|>' }}", "does not print the content of assistant message 2 exactly once"),
        ("{{ m['content'] + m['content'] }}", "exactly once"),
        ("{{ m['content'] }} ({{ m['content'] | length }})", "changes the text after assistant message 2"),
    ],
)
def test_spans_that_cannot_be_found_are_an_error(turn: str, reason: str) -> None:
    with pytest.raises(ValueError, match=f"conversation c: .*{reason}"):
        supervised(CHATML.replace(CHATML_TURN, turn), SINGLE)
