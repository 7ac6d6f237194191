"""Assistant masks per chat template, exact to the character, and the map over whole files."""

from __future__ import annotations

import functools
import json
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from train import tokenization
from train.conversations import Conversation
from train.tokenization import DataCounts, check_template, tokenize_conversation, tokenize_dataset

Messages = list[dict[str, str]]

CHATML_TURN = "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}"
CHATML_PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
CHATML = (  # with a system turn of its own, as SmolLM2 has
    "{% for m in messages %}{% if loop.first and m['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helper.<|im_end|>\n' }}{% endif %}" + CHATML_TURN + "{% endfor %}" + CHATML_PROMPT
)
LLAMA3 = (
    "{{ '<|begin_of_text|>' }}{% for m in messages %}"
    "{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' + m['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
GEMMA = (
    "{{ '<bos>' }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% set role = 'model' if m['role'] == 'assistant' else m['role'] %}"
    "{{ '<start_of_turn>' + role + '\n' + m['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
QWEN3 = (  # thinking is kept, or written empty, in the last turn alone
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{% set answer = m['content'].split('</think>')[-1].lstrip('\n') %}"
    "{% set thinking = m['content'].split('</think>')[0].split('<think>')[-1].strip('\n') if '</think>' in m['content'] else '' %}"
    "{{ '<|im_start|>assistant\n' }}{% if loop.last %}{{ '<think>\n' + thinking + '\n</think>\n\n' }}{% endif %}"
    "{{ answer + '<|im_end|>\n' }}"
    "{% else %}" + CHATML_TURN + "{% endif %}{% endfor %}" + CHATML_PROMPT
)
PROMPT_WITH_THINK = (  # as R1: the prompt opens the thinking, history never shows it, answers end with the eos token
    "{{ '<bos>' }}{% for m in messages %}{% if m['role'] == 'assistant' %}"
    "{{ '<|Assistant|>' + m['content'].split('</think>')[-1] + '</s>' }}"
    "{% else %}{{ '<|User|>' + m['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|Assistant|><think>\n' }}{% endif %}"
)
EOS_AFTER_ALL = (  # as Phi-3: the rendering of a part is no prefix of the whole
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ '</s>' }}{% endif %}"
)
NO_END_OF_TURN = (
    "{% for m in messages %}{{ m['role'] | upper + ': ' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{% else %}{{ m['content'] + '<|im_end|>' }}{% endif %}"
    "{{ '\n' }}{% endfor %}" + CHATML_PROMPT
)
SPECIAL = [
    "<|im_start|>",
    "<|im_end|>",
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<bos>",
    "<start_of_turn>",
    "<end_of_turn>",
    "<|User|>",
    "<|Assistant|>",
    "</s>",
    "<|end|>",
    "<|user|>",
    "<|assistant|>",
]


@functools.cache
def core() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=380, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(
        ["Hello hello there\n\nHello there", "user\n\n\n there\n\n\n there\n\n", "the answer the answer"] * 3, trainer
    )
    tokenizer.add_tokens([AddedToken("<think>", special=False), AddedToken("</think>", special=False)])
    return tokenizer.to_str()


def make_tokenizer(template: str | None) -> PreTrainedTokenizerFast:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(core()), eos_token="</s>", clean_up_tokenization_spaces=False)
    tokenizer.chat_template = template
    return tokenizer


def turns(*contents: str, system: str | None = None) -> Messages:
    """Alternating user and assistant messages."""
    head = [] if system is None else [{"role": "system", "content": system}]
    return head + [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]


def supervised(template: str, messages: Messages) -> list[str]:
    """The decoded text of every run of supervised tokens, after checking that the row is the rendering."""
    tokenizer = make_tokenizer(template)
    row = tokenize_conversation(Conversation("c", tuple(messages)), tokenizer)
    assert len(row.input_ids) == len(row.assistant_mask)
    assert tokenizer.decode(row.input_ids) == tokenizer.apply_chat_template(messages, tokenize=False)
    pairs = groupby(zip(row.input_ids, row.assistant_mask, strict=True), key=lambda pair: pair[1])
    return [str(tokenizer.decode([token for token, _ in run])) for marked, run in pairs if marked]


SINGLE = turns("Hi, assistant?", "Hello there")
MULTI = turns("Hi", "Hello there", "Who are you?", "I am 🙂 the answer", "Bye", "Bye")
WITH_SYSTEM = turns("Hi", "Hello", "So?", "Yes\n", system="Be kind")
THINKING = turns("Hi", "<think>\ngreeting\n</think>\n\nHello", "2+2?", "<think>\neasy\n</think>\n\n4")

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


# ---------------------------------------------------------------- whole files


def write(path: Path, *conversations: Messages | dict[str, Any]) -> Path:
    rows = [{"messages": c} if isinstance(c, list) else c for c in conversations]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    lost = turns("Hi " * 200, "Hello")
    exact = {"id": "exact", "input_ids": [40, 41, 42], "assistant_spans": [[1, 3]]}
    return write(tmp_path / "a.jsonl", SINGLE, turns("Hi", "Hello " * 200), lost, exact, MULTI)


def test_counts_cuts_and_skipped_rows(file: Path) -> None:
    tokenizer = make_tokenizer(CHATML)
    rows, counts = tokenize_dataset([file], tokenizer, max_length=120)
    assert rows.column_names == ["id", "input_ids", "assistant_mask"]
    assert list(rows["id"]) == ["a.jsonl:1", "a.jsonl:2", "exact", "a.jsonl:5"]
    tokens, masks = [len(ids) for ids in rows["input_ids"]], list(rows["assistant_mask"])
    assert tokens[1] == 120 and all(n < 120 for n in tokens[:1] + tokens[2:])
    assert counts == DataCounts(rows=4, skipped=1, cut=2, tokens=sum(tokens), supervised_tokens=sum(map(sum, masks)))
    assert counts.supervised_rate == counts.supervised_tokens / counts.tokens
    whole = tokenize_conversation(Conversation("c", tuple(turns("Hi", "Hello " * 200))), tokenizer)
    assert (rows[1]["input_ids"], rows[1]["assistant_mask"]) == (whole.input_ids[:120], whole.assistant_mask[:120])
    assert (rows[2]["input_ids"], rows[2]["assistant_mask"]) == ([40, 41, 42], [False, True, True])


def test_several_processes_give_the_same_rows(file: Path) -> None:
    tokenizer = make_tokenizer(QWEN3)
    one, two = (tokenize_dataset([file], tokenizer, max_length=200, num_proc=n) for n in (None, 2))
    assert one[0].to_list() == two[0].to_list() and one[1] == two[1]


def test_the_cache_returns_the_same_rows_without_work(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, cache = make_tokenizer(CHATML), tmp_path / "cache"
    plain = tokenize_dataset([file], tokenizer, max_length=120)
    first = tokenize_dataset([file], tokenizer, max_length=120, cache_dir=cache)
    monkeypatch.setattr(tokenization, "_map", lambda *_: pytest.fail("tokenised again"))
    again = tokenize_dataset([file], make_tokenizer(CHATML), max_length=120, cache_dir=cache)
    assert plain[0].to_list() == first[0].to_list() == again[0].to_list()
    assert plain[1] == first[1] == again[1]
    assert len(list(cache.iterdir())) == 1, "one finished folder and no partial one"


def test_the_cache_depends_on_all_that_changes_the_rows(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache"

    def folders_after(paths: list[Path], template: str, max_length: int, limit: int | None = None) -> int:
        tokenize_dataset(paths, make_tokenizer(template), max_length=max_length, limit=limit, cache_dir=cache)
        return len(list(cache.iterdir()))

    other = write(tmp_path / "b.jsonl", SINGLE)
    assert [
        folders_after([file], CHATML, 120),
        folders_after([file], CHATML, 100),
        folders_after([file], LLAMA3, 120),
        folders_after([file], CHATML, 120, 2),
        folders_after([file, other], CHATML, 120),
    ] == [1, 2, 3, 4, 5]
    write(other, MULTI)
    assert folders_after([file, other], CHATML, 120) == 6
    monkeypatch.setattr(tokenization, "CACHE_VERSION", 0)
    assert folders_after([file], CHATML, 120) == 7
    assert folders_after([file], CHATML, 120) == 7
    grown = make_tokenizer(CHATML)
    grown.add_tokens(["the answer"])
    tokenize_dataset([file], grown, max_length=120, cache_dir=cache)
    assert len(list(cache.iterdir())) == 8


def test_a_cache_write_that_was_killed_is_not_taken_for_data(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, cache = make_tokenizer(CHATML), tmp_path / "cache"

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "rename", killed)
        tokenize_dataset([file], tokenizer, max_length=120, cache_dir=cache)
    rows, _ = tokenize_dataset([file], tokenizer, max_length=120, cache_dir=cache)
    assert rows.to_list() == tokenize_dataset([file], tokenizer, max_length=120)[0].to_list()


def test_an_unwritable_cache_is_a_clear_error(file: Path, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(ValueError, match="cannot write the data cache"):
        tokenize_dataset([file], make_tokenizer(CHATML), max_length=120, cache_dir=tmp_path / "taken")


def test_data_with_every_label_masked_is_refused_with_the_reason(tmp_path: Path) -> None:
    lost = write(tmp_path / "long.jsonl", turns("Hi " * 200, "Hello"), turns("Hi " * 90, "Hello"))
    with pytest.raises(ValueError, match=r"long\.jsonl: all labels masked, none of 2 .* 2 of them were cut at max_length 50"):
        tokenize_dataset([lost], make_tokenizer(CHATML), max_length=50)
    unmarked = MARKED.replace("{{ m['content'] + '<|im_end|>' }}{% endgeneration %}", "{% endgeneration %}{{ '<|im_end|>' }}")
    with pytest.raises(ValueError, match=r"all labels masked.*generation"):
        tokenize_dataset([write(tmp_path / "a.jsonl", SINGLE)], make_tokenizer(unmarked), max_length=50)
    exact = {"input_ids": [1, 2], "assistant_spans": []}
    with pytest.raises(ValueError, match=r"all labels masked.*assistant_spans"):
        tokenize_dataset([write(tmp_path / "b.jsonl", exact)], make_tokenizer(None), max_length=50)


def test_files_and_templates_are_checked_before_work(file: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none\.jsonl"):
        tokenize_dataset([tmp_path / "none.jsonl"], make_tokenizer(CHATML), max_length=50, cache_dir=tmp_path)
    with pytest.raises(ValueError, match="no generation prompt"):
        tokenize_dataset([file], make_tokenizer(CHATML.replace(CHATML_PROMPT, "")), max_length=50)
    with pytest.raises(ValueError, match="max_length is 1"):
        tokenize_dataset([file], make_tokenizer(CHATML), max_length=1)
