"""Emitted tokens of one row -> text as it grows, and the reason to stop.

An answer ends inside an accepted path as exactly as between steps: at the first end token (kept),
at the first stop string (cut off the text; one that is a special token ends it there), or at the limit of new tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any


class IncrementalDetokenizer:
    """Token ids one by one -> text pieces, without decoding the whole answer again.

    Decodes a window that starts a few tokens back, so that pieces which depend on their left
    neighbour (spaces, bytes of one character) come out right; holds back an unfinished character.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.ids: list[int] = []
        self.window_start = 0  # tokens from here are decoded for context
        self.window_done = 0  # tokens up to here have been turned into text

    def push(self, token_id: int) -> str:
        """The text that this token completes; empty while a character is unfinished."""
        self.ids.append(token_id)
        before = self._decode(self.ids[self.window_start : self.window_done])
        now = self._decode(self.ids[self.window_start :])
        if now.endswith("\ufffd") or len(now) <= len(before):
            return ""
        self.window_start, self.window_done = self.window_done, len(self.ids)
        return now[len(before) :]

    def flush(self) -> str:
        """What is left at the end, an unfinished character as the tokenizer renders it."""
        before = self._decode(self.ids[self.window_start : self.window_done])
        now = self._decode(self.ids[self.window_start :])
        self.window_start = self.window_done = len(self.ids)
        return now[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def _special_stop_tokens(stop: Sequence[str], tokenizer: Any) -> list[int]:
    """Of stop strings that are special tokens, which no text shows. Raises ValueError for one that is so in part."""
    names = getattr(tokenizer, "all_special_tokens", ()) if stop else ()
    special = {name: tokenizer.convert_tokens_to_ids(name) for name in names}
    for string in stop:
        if string not in special and (inside := next((token for token in special if token and token in string), None)):
            raise ValueError(
                f"the stop string {string!r} holds the special token {inside}, which the text leaves out: stop at {inside} itself"
            )
    return [special[string] for string in stop if string in special]


class RowOutput:
    """The growing answer of one row.

    token_ids: what is kept; text: decoded, when a tokenizer is given; finish_reason: None while it
    runs, then `eos`, `stop` or `length`.
    """

    def __init__(self, *, max_new_tokens: int, eos_ids: Sequence[int], stop: Sequence[str] = (), tokenizer: Any | None = None) -> None:
        if stop and tokenizer is None:
            raise ValueError("stop strings need a tokenizer: pass tokenizer= to the generator")
        if any(not s for s in stop):
            raise ValueError("a stop string is empty: it would end every answer at once")
        self.max_new_tokens, self.eos_ids, self.stop = max_new_tokens, frozenset(eos_ids), tuple(stop)
        self.stop_ids = frozenset(_special_stop_tokens(stop, tokenizer))
        self.detokenizer = IncrementalDetokenizer(tokenizer) if tokenizer is not None else None
        self.token_ids: list[int] = []
        self.text = ""
        self.finish_reason: str | None = None

    def extend(self, token_ids: Sequence[int]) -> list[int]:
        """Takes tokens until the answer ends; returns those taken."""
        taken: list[int] = []
        for token in token_ids:
            if self.finish_reason is not None:
                break
            taken.append(token)
            self._take(token)
        return taken

    def ends_after(self, token_ids: Sequence[int]) -> bool:
        """Whether the answer would be over within these further tokens."""
        ahead = copy.copy(self)
        ahead.token_ids = [*self.token_ids]
        if self.detokenizer is not None:
            ahead.detokenizer = copy.copy(self.detokenizer)
            ahead.detokenizer.ids = [*self.detokenizer.ids]
        ahead.extend(token_ids)
        return ahead.finish_reason is not None

    def _take(self, token: int) -> None:
        self.token_ids.append(token)
        if token in self.eos_ids:
            self.finish_reason = "eos"
        elif token in self.stop_ids:
            self.finish_reason = "stop"
        elif len(self.token_ids) >= self.max_new_tokens:
            self.finish_reason = "length"
        if self.detokenizer is None:
            return
        piece = self.detokenizer.push(token)
        if self.finish_reason is not None:
            piece += self.detokenizer.flush()
        searched_from = len(self.text)
        self.text += piece
        # The stop string that is complete first ends the text; of two that end together, the longer.
        starts = [(self.text.find(stop, max(0, searched_from - len(stop) + 1)), stop) for stop in self.stop]
        if found := [(at + len(stop), at) for at, stop in starts if at >= 0]:
            self.text, self.finish_reason = self.text[: min(found)[1]], "stop"

    def stable_text(self) -> str:
        """The text that no later token can take back: what could begin a stop string is held."""
        if self.finish_reason is not None:
            return self.text
        held = 0
        for stop in self.stop:
            for size in range(min(len(stop) - 1, len(self.text)), held, -1):
                if self.text.endswith(stop[:size]):
                    held = size
                    break
        return self.text[: len(self.text) - held]
