"""Conversations -> token ids and the mask of the tokens the assistant produces, through the chat template.

A template with `{% generation %}` marks the assistant's tokens itself. Any other is asked by template
diff: a turn starts where its generation prompt ends, and ends where a second rendering, with the turn's
content replaced by one unused character, agrees with the first again. The end-of-turn token that the
template puts behind the content belongs to the turn, a newline after it does not.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from jinja2 import TemplateError

from train.conversations import Conversation

GENERATION_BLOCK = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


@dataclass(frozen=True, slots=True)
class TokenizedRow:
    """input_ids and assistant_mask, of one length; the mask is True on tokens the assistant produces."""

    input_ids: list[int]
    assistant_mask: list[bool]


def tokenize_conversation(conversation: Conversation, tokenizer: Any) -> TokenizedRow:
    """Token ids and assistant mask of a conversation; exact tokens, where given, are used as they are.

    Raises ValueError when the chat template cannot render the conversation or its spans cannot be found.
    """
    if conversation.input_ids is not None:
        return _exact_row(conversation)
    try:
        if GENERATION_BLOCK.search(_template(tokenizer)):
            return _row_by_generation_block(conversation, tokenizer)
        return _row_by_template_diff(conversation, tokenizer)
    except TemplateError as error:
        raise ValueError(f"conversation {conversation.id}: the chat template refuses it: {error}") from None


def check_template(tokenizer: Any) -> None:
    """Raises ValueError unless the tokenizer is fast and its chat template has a generation prompt."""
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError("the base model's tokenizer is a slow one, without character offsets: a fast tokenizer (tokenizer.json) is needed")
    _template(tokenizer)
    user = [{"role": "user", "content": "a"}]
    try:
        changed = _render(tokenizer, user, prompt=True) != _render(tokenizer, user)
    except TemplateError as error:
        raise ValueError(f"the chat template cannot render one user message: {error}") from None
    if not changed:
        raise ValueError(
            "the chat template has no generation prompt (add_generation_prompt changes nothing), so where an answer starts "
            "is undefined: add `{% if add_generation_prompt %}..{% endif %}` with the assistant's header to chat_template"
        )


def _template(tokenizer: Any) -> str:
    try:
        return tokenizer.get_chat_template()
    except ValueError as error:
        reason = str(error).split(".")[0]
        raise ValueError(f"the base model's tokenizer has no usable chat template ({reason}): use an instruction-tuned base") from None


def _exact_row(conversation: Conversation) -> TokenizedRow:
    assert conversation.input_ids is not None
    mask = [False] * len(conversation.input_ids)
    for start, end in conversation.assistant_spans or ():
        mask[start:end] = [True] * (end - start)
    return TokenizedRow(list(conversation.input_ids), mask)


def _row_by_generation_block(conversation: Conversation, tokenizer: Any) -> TokenizedRow:
    encoding = tokenizer.apply_chat_template(
        list(conversation.messages), return_dict=True, return_assistant_tokens_mask=True, tokenizer_kwargs={"verbose": False}
    )
    return TokenizedRow(list(encoding["input_ids"]), [bool(marked) for marked in encoding["assistant_masks"]])


def _row_by_template_diff(conversation: Conversation, tokenizer: Any) -> TokenizedRow:
    text, spans = assistant_character_spans(conversation, tokenizer)
    encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    mask, remaining = [], list(reversed(spans))
    for start, end in encoding["offset_mapping"]:
        while remaining and start >= remaining[-1][1]:
            remaining.pop()
        # A token that straddles an edge of the span is one the model would not produce there.
        mask.append(bool(remaining) and start >= remaining[-1][0] and end <= remaining[-1][1])
    return TokenizedRow(list(encoding["input_ids"]), mask)


# ---------------------------------------------------------------- template diff


def assistant_character_spans(conversation: Conversation, tokenizer: Any) -> tuple[str, list[tuple[int, int]]]:
    """The rendered conversation and the [start, end) characters of every assistant turn in it.

    Works on templates that rewrite earlier turns (strip their thinking, say): what stands in the full
    rendering is supervised, from behind the generation prompt where that is a prefix of the rendering,
    else from the turn's first character of content.
    """
    messages = list(conversation.messages)
    text = _render(tokenizer, messages)
    marker = unused_character(text + "".join(message["content"] for message in messages))
    end_of_turn = _end_of_turn(tokenizer, marker)
    spans = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        start, end = _content_span(tokenizer, messages, index, text=text, marker=marker, where=f"conversation {conversation.id}")
        # No template is asked for a prompt without messages: many fail on it.
        prompt = _render(tokenizer, messages[:index], prompt=True) if index else None
        if prompt is not None and len(prompt) <= end and text.startswith(prompt):
            start = len(prompt)
        spans.append((start, end + len(end_of_turn) if text.startswith(end_of_turn, end) else end))
    assert all(a[1] <= b[0] for a, b in pairwise(spans)), "assistant spans overlap"
    return text, spans


def _content_span(tokenizer: Any, messages: list[dict[str, str]], index: int, *, text: str, marker: str, where: str) -> tuple[int, int]:
    """Characters of one turn's content in `text`: where a rendering with the marker as content differs."""
    marked = _render(tokenizer, [*messages[:index], {"role": "assistant", "content": marker}, *messages[index + 1 :]])
    before, found, after = marked.partition(marker)
    if not found or marker in after:
        raise ValueError(f"{where}: the chat template does not print the content of assistant message {index + 1} exactly once")
    if not text.endswith(after):
        raise ValueError(
            f"{where}: the chat template changes the text after assistant message {index + 1} with its content, so the end of the "
            "turn cannot be found; mark assistant turns in the template with {% generation %}"
        )
    start = next((i for i, (a, b) in enumerate(zip(text, before, strict=False)) if a != b), min(len(text), len(before)))
    return start, max(start, len(text) - len(after))


def _end_of_turn(tokenizer: Any, marker: str) -> str:
    """What the template writes between an answer and the end-of-turn token, that token included; may be empty."""
    rendered = _render(tokenizer, [{"role": "user", "content": "a"}, {"role": "assistant", "content": marker}])
    after = rendered.partition(marker)[2]
    ends = [after.index(token.content) + len(token.content) for token in tokenizer.added_tokens_decoder.values() if token.content in after]
    return after[: min(ends)] if ends else after.rstrip()


def _render(tokenizer: Any, messages: list[dict[str, str]], *, prompt: bool = False) -> str:
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)


def unused_character(text: str) -> str:
    """A private-use character that `text` does not hold."""
    return next(character for character in map(chr, range(0xE000, 0xF8FF)) if character not in text)
