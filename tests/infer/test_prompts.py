"""Prompt files and chat templates: what is read, and what is refused by line number or by reason."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from infer.prompts import Prompt, encode_chat, load_prompts
from tests.tiny_models import tiny_tokenizer

MESSAGES = [{"role": "user", "content": "hi\u2028there"}]
GOOD = json.dumps({"id": "a", "source": "s", "category": "c", "messages": MESSAGES}, ensure_ascii=False)


def test_prompts_keep_the_first_user_turn(tmp_path: Path) -> None:
    turns = [("system", "be kind"), ("user", "one"), ("user", "two")]
    messages = [{"role": role, "content": text} for role, text in turns]
    row = {"id": "m", "category": "c", "messages": messages}
    path = tmp_path / "p.jsonl.gz"
    path.write_bytes(gzip.compress((GOOD + "\n\n" + json.dumps(row) + "\n").encode()))
    prompts = load_prompts(path)
    assert prompts == [Prompt("a", "c", MESSAGES), Prompt("m", "c", messages[:2])]
    assert load_prompts(path, 1) == prompts[:1]


def test_broken_lines_are_named(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    lines = [GOOD, "{", '{"messages": []}', '{"messages": [{"role": "system", "content": "x"}]}', '{"messages": [{"role": "user"}]}', "[]"]
    path.write_text("\n".join(lines))
    with pytest.raises(ValueError) as raised:
        load_prompts(path, 1)
    reasons = ["is not valid JSON", "has no messages", "has no user turn", "has a message without", "has no messages"]
    for number, reason in enumerate(reasons, start=2):
        assert f"line {number} {reason}" in str(raised.value)
    assert "line 1 " not in str(raised.value)


@pytest.mark.parametrize("part", ["id", "category", "role", "content"])
def test_half_a_surrogate_pair_is_named(tmp_path: Path, part: str) -> None:
    row = {"id": "a", "category": "c", "messages": [{"role": "user", "content": "x"}]}
    cut = {part: "cut \ud800"}
    row = row | ({"messages": [{"role": "system", "content": "x"} | cut, *MESSAGES]} if part in ("role", "content") else cut)
    (tmp_path / "p.jsonl").write_text(GOOD + "\n" + json.dumps(row))
    with pytest.raises(ValueError, match=f"line 2 {part} holds half a surrogate pair"):
        load_prompts(tmp_path / "p.jsonl")
    with pytest.raises(ValueError, match="the user's message holds half a surrogate pair"):
        encode_chat(tiny_tokenizer(), [{"role": "user", "content": "\udcff"}])


def test_empty_and_truncated_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(GOOD.encode() * 50)[:-9])
    with pytest.raises(ValueError, match="holds no prompts"):
        load_prompts(tmp_path / "empty.jsonl")
    with pytest.raises(ValueError, match="cannot be read"):
        load_prompts(tmp_path / "cut.jsonl.gz")


def test_chat_prompt_opens_the_answer() -> None:
    tokenizer = tiny_tokenizer()
    ids = encode_chat(tokenizer, [{"role": "user", "content": "hi"}])
    assert tokenizer.decode(ids) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_templates_that_cannot_be_answered_are_refused() -> None:
    tokenizer = tiny_tokenizer()
    message = [{"role": "user", "content": "hi"}]
    template = tokenizer.chat_template
    assert isinstance(template, str)
    tokenizer.chat_template = template.replace("{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}", "")
    with pytest.raises(ValueError, match="no generation prompt"):
        encode_chat(tokenizer, message)
    # The user's turn may itself open the answer: then nothing is missing.
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'user' %}[Q]{{ m.content }}[A]{% else %} {{ m.content }}{% endif %}{% endfor %}"
    )
    assert tokenizer.decode(encode_chat(tokenizer, message)) == "[Q]hi[A]"
    tokenizer.chat_template = "{{ raise_exception('no system turns') }}"
    with pytest.raises(ValueError, match="no system turns"):
        encode_chat(tokenizer, message)
    for broken in ("{{ 1 / 0 }}", "{{ messages[7].content }}", "{{ messages + 1 }}"):
        tokenizer.chat_template = broken
        with pytest.raises(ValueError, match="chat template refuses these messages"):
            encode_chat(tokenizer, message)
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="no chat template"):
        encode_chat(tokenizer, message)
