"""Detokenising and stopping, token by token, against decoding the whole answer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infer.stopping import IncrementalDetokenizer, RowOutput
from tests.tiny_models import TURN_END, VOCAB_SIZE, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
MULTI_BYTE = "é你👍🏽 naïve — the cat"

any_tokens = st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=40)
texts = st.text(alphabet=st.sampled_from(list("abt he\n" + MULTI_BYTE)), max_size=30)


def decode(ids: list[int]) -> str:
    return str(TOKENIZER.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


@given(ids=any_tokens)
def test_pieces_of_any_tokens_join_to_the_whole_text(ids: list[int]) -> None:
    detokenizer = IncrementalDetokenizer(TOKENIZER)
    assert "".join([*map(detokenizer.push, ids), detokenizer.flush()]) == decode(ids)


@given(text=texts)
def test_pieces_of_real_text_hold_whole_characters(text: str) -> None:
    detokenizer = IncrementalDetokenizer(TOKENIZER)
    pieces = [detokenizer.push(token) for token in encode(text)]
    assert "".join(pieces) == text and detokenizer.flush() == ""
    assert not any("\ufffd" in piece for piece in pieces)


def test_an_unfinished_character_is_held_back_and_flushed() -> None:
    detokenizer, ids = IncrementalDetokenizer(TOKENIZER), encode("a👍")
    assert len(ids) == 5  # the thumb is four single bytes
    assert [detokenizer.push(token) for token in ids[:-1]] == ["a", "", "", ""]
    assert detokenizer.flush() == "\ufffd" and detokenizer.flush() == ""


def test_only_a_short_window_is_decoded() -> None:
    longest = 0

    class Counting:
        def decode(self, ids: list[int], **keywords: bool) -> str:
            nonlocal longest
            longest = max(longest, len(ids))
            return decode(ids)

    detokenizer = IncrementalDetokenizer(Counting())
    for token in encode("the cat sat on the mat " * 30):
        detokenizer.push(token)
    assert longest <= 3


def row(max_new_tokens: int = 100, eos_ids: tuple[int, ...] = (TURN_END,), stop: tuple[str, ...] = ()) -> RowOutput:
    return RowOutput(max_new_tokens=max_new_tokens, eos_ids=eos_ids, stop=stop, tokenizer=TOKENIZER)


def reference(ids: list[int], max_new_tokens: int, stop: str) -> tuple[list[int], str, str | None]:
    """Decodes the whole answer after every token."""
    for count in range(1, len(ids) + 1):
        ended = ids[count - 1] == TURN_END or count == max_new_tokens
        text = decode(ids[:count])
        complete = text if ended else text.rstrip("\ufffd")
        if stop in complete:
            return ids[:count], text[: text.find(stop)], "stop"
        if ended:
            return ids[:count], text, "eos" if ids[count - 1] == TURN_END else "length"
    return ids, decode(ids), None


@st.composite
def split_in_runs(draw: st.DrawFn, ids: list[int]) -> list[list[int]]:
    runs, start = [], 0
    while start < len(ids):
        size = draw(st.integers(1, 6))
        runs.append(ids[start : start + size])
        start += size
    return runs


@given(
    data=st.data(), text=texts, stop=st.text(alphabet="abt he", min_size=1, max_size=4), limit=st.integers(1, 30), end=st.integers(0, 40)
)
def test_rows_stop_where_the_reference_does_however_tokens_arrive(data: st.DataObject, text: str, stop: str, limit: int, end: int) -> None:
    ids = encode(text)
    ids.insert(min(end, len(ids)), TURN_END)
    found, taken = row(limit, stop=(stop,)), []
    for run in data.draw(split_in_runs(ids)):
        if found.finish_reason is None:
            taken += found.extend(run)
    expected_ids, expected_text, reason = reference(ids, limit, stop)
    assert (found.token_ids, found.text, found.finish_reason) == (expected_ids, expected_text, reason)
    assert taken == expected_ids


@given(text=texts, stops=st.lists(st.text(alphabet="abt he", min_size=1, max_size=5), max_size=3))
def test_streamed_text_is_never_taken_back(text: str, stops: list[str]) -> None:
    found = row(stop=tuple(stops))
    shown = ""
    for token in [*encode(text), TURN_END]:
        if found.finish_reason is None:
            found.extend([token])
            stable = found.stable_text()
            assert stable.startswith(shown)
            shown = stable
    assert shown == found.text and not any(stop in shown for stop in stops)


def test_what_may_begin_a_stop_string_is_held_and_no_more() -> None:
    found = row(stop=("the end",))
    found.extend(encode("at the e"))
    assert found.text == "at the e" and found.stable_text() == "at "
    found.extend(encode("gg"))
    assert found.stable_text() == "at the egg"


def test_a_stop_string_that_spans_tokens_and_runs() -> None:
    ids = encode("one two\n\nthree")
    found = row(stop=("o\n\nt",))
    for start in range(0, len(ids), 2):
        if found.finish_reason is None:
            found.extend(ids[start : start + 2])
    assert (found.text, found.finish_reason) == ("one tw", "stop")
    assert decode(found.token_ids).endswith("o\n\nt")


def test_tokens_after_the_end_are_not_taken() -> None:
    found = row()
    assert found.extend([70, 71, TURN_END, 72, 73]) == [70, 71, TURN_END]
    assert found.finish_reason == "eos" and found.text == decode([70, 71])


def test_the_limit_counts_tokens_inside_a_run() -> None:
    found = row(max_new_tokens=3)
    assert found.extend([70, 71]) == [70, 71] and found.finish_reason is None
    assert found.extend([72, 73, 74]) == [72] and found.finish_reason == "length"


def test_an_end_token_at_the_limit_is_an_end() -> None:
    found = row(max_new_tokens=2)
    found.extend([70, TURN_END])
    assert found.finish_reason == "eos"


def test_the_earliest_of_two_stop_strings_cuts() -> None:
    found = row(stop=("cd", "bcde"))
    found.extend(encode("ab"))
    found.extend(encode("cde"))
    assert found.text == "ab" and found.finish_reason == "stop"  # "cd" is complete first


def test_a_row_without_a_tokenizer_has_no_text() -> None:
    found = RowOutput(max_new_tokens=2, eos_ids=())
    found.extend([5, 6])
    assert (found.token_ids, found.text, found.finish_reason) == ([5, 6], "", "length")


def test_wrong_stop_strings_are_refused() -> None:
    with pytest.raises(ValueError, match="need a tokenizer"):
        RowOutput(max_new_tokens=2, eos_ids=(), stop=("x",))
    with pytest.raises(ValueError, match="empty"):
        row(stop=("x", ""))


def test_a_special_token_as_stop_string_ends_the_row_there() -> None:
    """The text shows none, but the row ends where it comes."""
    found = row(stop=("<|im_start|>", "x"))
    found.extend([*TOKENIZER.encode("sac"), 1, *TOKENIZER.encode("here")])
    assert (found.text, found.token_ids[-1], found.finish_reason) == ("sac", 1, "stop")
    with pytest.raises(ValueError, match=r"'<\|im_end\|> x' holds the special token <\|im_end\|>, which the text leaves out: stop at"):
        row(stop=("<|im_end|> x",))


@pytest.mark.parametrize("stop", [("c", "sac"), ("sac", "c")])
def test_of_stop_strings_that_end_together_the_earliest_start_cuts(stop: tuple[str, ...]) -> None:
    row = RowOutput(max_new_tokens=50, eos_ids=(), stop=stop, tokenizer=tiny_tokenizer())
    row.extend(tiny_tokenizer().encode("no sac here"))
    assert (row.text, row.finish_reason) == ("no ", "stop")
