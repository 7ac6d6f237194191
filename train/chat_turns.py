"""A chat template -> the token ids that precede each answer of a conversation, and those that precede a user's own words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError

from train.tokenization import check_template, unused_character

Message = dict[str, str]
MARKER = "\ue000"  # a private-use character: stands for text that the template only copies, beside messages that do not hold it
USER: Message = {"role": "user", "content": "a"}


@dataclass(frozen=True, slots=True)
class ChatTurns:
    """Renders conversations piece by piece, so that answers keep the very tokens the model produced.

    Raises ValueError when the tokenizer has no chat template or it has no generation prompt.
    """

    tokenizer: Any

    def __post_init__(self) -> None:
        check_template(self.tokenizer)

    def pieces(self, turns: Sequence[Sequence[Message]]) -> list[list[int]]:
        """turns: the messages before each answer (system and user). Returns the token ids before the first
        answer, then those between each answer and the next, the end of the answer's turn included.

        Raises ValueError when the template refuses the messages.
        """
        marker = unused_character("".join(message["content"] for turn in turns for message in turn))
        messages: list[Message] = []
        texts: list[str] = []
        for turn in turns:
            if messages:
                messages.append({"role": "assistant", "content": marker})
            messages.extend(turn)
            text = self._render(messages)
            texts.append(_after_last_answer(text.split(marker), len(texts)) if texts else text)
        return [self._encode(text) for text in texts]

    def before_user_text(self) -> tuple[list[int], int | None]:
        """The token ids after which a user speaks, and the token that ends the user's turn (None if it is no token of its own)."""
        before, found, after = self._render([{"role": "user", "content": MARKER}]).partition(MARKER)
        if not found:
            raise ValueError("the chat template does not print a user's message: the model cannot write prompts from it")
        end = self._encode(after)[:1]
        is_special = bool(end) and end[0] in self.tokenizer.added_tokens_decoder
        return self._encode(before), end[0] if is_special else None

    def text_answer(self, text: str, *, is_ended: bool) -> list[int]:
        """The token ids of an answer known as text alone; one that ended by itself gets the token that ends a turn, if there is one."""
        after = self.tokenizer.apply_chat_template([USER, {"role": "assistant", "content": MARKER}], tokenize=False).partition(MARKER)[2]
        end = self._encode(after)[:1] if is_ended else []
        return self._encode(text) + [token for token in end if token in self.tokenizer.added_tokens_decoder]

    def _render(self, messages: list[Message]) -> str:
        try:
            return self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except TemplateError as error:
            raise ValueError(f"the chat template refuses these messages: {error}") from None

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]


def _after_last_answer(parts: list[str], num_answers: int) -> str:
    if len(parts) != num_answers + 1:
        raise ValueError("the chat template does not print every earlier answer exactly once: only single-turn prompts can be answered")
    return parts[-1]


def join(ids: list[int], piece: list[int]) -> list[int]:
    """Appends a piece to a conversation; an end-of-turn token that the model produced itself is not doubled."""
    return ids + (piece[1:] if ids and piece and ids[-1] == piece[0] else piece)
