"""Chat templates as models ship them, a small tokenizer for any of them, and conversations to render."""

from __future__ import annotations

import functools

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

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


SINGLE = turns("Hi, assistant?", "Hello there")
MULTI = turns("Hi", "Hello there", "Who are you?", "I am 🙂 the answer", "Bye", "Bye")
WITH_SYSTEM = turns("Hi", "Hello", "So?", "Yes\n", system="Be kind")
THINKING = turns("Hi", "<think>\ngreeting\n</think>\n\nHello", "2+2?", "<think>\neasy\n</think>\n\n4")
