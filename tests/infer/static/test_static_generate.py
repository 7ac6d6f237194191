"""The bulk generator against transformers' own generate, token for token, and against the softmax law."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from infer.static import slot_cache, static_generate, static_step
from infer.static.grouped_attention import KERNELS, matmul_kernel, sdpa_kernel
from infer.static.sampling import Sampling, choose_tokens
from infer.static.static_generate import Answer, StaticGenerator, generate_many
from infer.static.static_step import SlotDecoder
from tests.tiny_models import FAMILIES, VOCAB_SIZE, tiny_model

EOS = tuple(range(40, 52))  # many, so that answers of random models end at different lengths


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Models this small only lose time to threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def prompts(count: int = 7) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    lengths = [int(n) for n in torch.randint(1, 30, (count,), generator=generator)]
    return [torch.randint(60, VOCAB_SIZE, (n,), generator=generator).tolist() for n in lengths]


def reference(model: Any, prompt: list[int], new: int) -> list[int]:
    ids = torch.tensor([prompt])
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, eos_token_id=list(EOS), pad_token_id=0
    )
    return output[0, len(prompt) :].tolist()


def answers(model: PreTrainedModel, texts: list[list[int]], *, new: int = 20, slots: int = 3, **options: Any) -> dict[Any, Answer]:
    found = generate_many(model, enumerate(texts), max_new_tokens=new, eos_ids=EOS, batch_size=slots, **options)
    return {answer.key: answer for answer in found}


@pytest.mark.compat
@pytest.mark.parametrize("attention", [None, "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_equals_generate(family: str, attention: str | None) -> None:
    model, texts = tiny_model(family, attention=attention), prompts()
    own = model.config._attn_implementation
    expected = [reference(model, text, 20) for text in texts]
    found = answers(model, texts)
    assert [found[i].token_ids for i in range(len(texts))] == expected
    assert [found[i].finish_reason for i in range(len(texts))] == ["eos" if e[-1] in EOS else "length" for e in expected]
    assert model.config._attn_implementation == own


def test_some_answers_end_early_and_some_do_not() -> None:
    """Otherwise the equality above would not test slots that finish at different steps."""
    lengths = {len(answer.token_ids) for answer in answers(tiny_model("llama"), prompts()).values()}
    assert len(lengths) > 2


def test_wrong_positions_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: with keys written one column too far, the comparison above must fail."""
    model, texts = tiny_model("llama"), prompts()
    expected = [reference(model, text, 20) for text in texts]

    def shifted(self: slot_cache._SlotLayer, keys: torch.Tensor, values: torch.Tensor, *args: object, **kwargs: object):  # type: ignore[no-untyped-def]
        own, self.cache.lengths_B = self.cache.lengths_B, self.cache.lengths_B + 1
        try:
            return update(self, keys, values)
        finally:
            self.cache.lengths_B = own

    update = slot_cache._SlotLayer.update
    monkeypatch.setattr(slot_cache._SlotLayer, "update", shifted)
    found = answers(model, texts)
    assert [found[i].token_ids for i in range(len(texts))] != expected


@pytest.mark.parametrize("slots", [1, 2, 16])
def test_slots_and_looks_change_nothing(slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, texts = tiny_model("qwen3"), prompts()
    expected = answers(model, texts)
    monkeypatch.setattr(static_generate, "STEPS_PER_LOOK", 5)
    monkeypatch.setattr(static_step, "STEPS_PER_LOOK", 5)
    monkeypatch.setattr(static_step, "BUCKET", 8)
    monkeypatch.setattr(static_generate, "PREFILL_TOKENS", 50)
    assert answers(model, texts, slots=slots) == expected


def test_ended_slots_stand_still() -> None:
    """Else a slot that idles long would write behind its room."""
    decoder = SlotDecoder(tiny_model("llama"), num_slots=3, capacity=64, max_new_tokens=50, eos_ids=(), sampling=Sampling())
    with torch.inference_mode():
        decoder.prefill([0, 1], [[60, 61, 62], [63]], limits=[3, 50], uniform_RN=torch.zeros(2, 0))
        for _ in range(2):
            decoder.steps(10, longest=21)
    assert decoder.state.lengths_B.tolist() == [5, 21, 0]
    assert decoder.state.produced_B.tolist() == [3, 21, 0] and decoder.state.running_B.tolist() == [False, True, False]


def test_prompts_added_while_running() -> None:
    model, texts = tiny_model("llama"), prompts(4)
    generator = StaticGenerator(model, max_new_tokens=8, eos_ids=EOS, batch_size=2, capacity=200)
    generator.add(0, texts[0])
    found: dict[Any, list[int]] = {}
    for answer in generator.run():
        found[answer.key] = answer.token_ids
        if len(found) < len(texts):
            generator.add(len(found), texts[len(found)])
    assert found == {i: reference(model, text, 8) for i, text in enumerate(texts)}
    assert generator.num_tokens == sum(map(len, found.values()))


def test_the_context_limits_the_answer() -> None:
    model = tiny_model("gpt2")  # 64 positions
    [answer] = generate_many(model, [("a", [9] * 56)], max_new_tokens=100, eos_ids=(), batch_size=4)
    assert len(answer.token_ids) == 8 and answer.finish_reason == "length"
    with pytest.raises(ValueError, match="leave room"):
        list(generate_many(model, [("a", [9] * 64)], max_new_tokens=100, eos_ids=(), batch_size=4))
    with pytest.raises(ValueError, match="leave room"):
        list(generate_many(model, [("a", [])], max_new_tokens=100, eos_ids=(), batch_size=4))


def test_nothing_to_do() -> None:
    assert list(generate_many(tiny_model("llama"), [], max_new_tokens=4, eos_ids=(), batch_size=4)) == []


# ---------------------------------------------------------------- kernels


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_agree_with_repeated_heads(name: str) -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 6, 1, 8), torch.randn(3, 2, 16, 8), torch.randn(3, 2, 16, 8)
    mask = torch.zeros(3, 1, 1, 16)
    mask[0, ..., 3:] = torch.finfo(torch.float32).min
    expected = sdpa_kernel(query, key.repeat_interleave(3, 1), value.repeat_interleave(3, 1), mask, 0.3)
    found = KERNELS[name](query.view(3, 2, 3, 8), key, value, mask, 0.3)
    torch.testing.assert_close(found.reshape(3, 6, 1, 8), expected)


def test_kernels_agree_with_each_other_in_bfloat16() -> None:
    torch.manual_seed(0)
    query, key = torch.randn(2, 2, 3, 8).bfloat16(), torch.randn(2, 2, 16, 8).bfloat16()
    mask = torch.zeros(2, 1, 1, 16).bfloat16()
    torch.testing.assert_close(sdpa_kernel(query, key, key, mask, 0.3), matmul_kernel(query, key, key, mask, 0.3), atol=0.02, rtol=0.02)


# ---------------------------------------------------------------- sampling


def frequencies(logits: torch.Tensor, sampling: Sampling, draws: int = 20000) -> torch.Tensor:
    uniform = torch.rand(draws, generator=torch.Generator().manual_seed(0))
    return torch.bincount(choose_tokens(logits.expand(draws, -1), sampling, uniform), minlength=logits.shape[-1]) / draws


def test_frequencies_match_the_softmax() -> None:
    torch.manual_seed(0)
    logits = torch.randn(1, 12) * 2
    expected = torch.softmax(logits[0] / 0.7, -1)
    assert (frequencies(logits, Sampling(temperature=0.7)) - expected).abs().max() < 0.012
    assert (frequencies(logits, Sampling(temperature=1.4)) - expected).abs().max() > 0.03  # the control


def test_top_k_and_top_p_keep_the_right_tokens() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    assert frequencies(logits, Sampling(temperature=1, top_k=2)) == pytest.approx([0.625, 0.375, 0, 0], abs=0.02)
    assert frequencies(logits, Sampling(temperature=1, top_p=0.85)) == pytest.approx([0.526, 0.316, 0.158, 0], abs=0.02)
    assert frequencies(logits, Sampling(temperature=1, top_k=3, top_p=0.5)) == pytest.approx([1, 0, 0, 0], abs=0.02)


def test_the_generator_samples_the_models_law() -> None:
    model = tiny_model("llama")
    prompt, draws = prompts(1)[0], 3000
    rows = [(i, prompt) for i in range(draws)]
    found = [
        a.token_ids for a in generate_many(model, rows, max_new_tokens=2, eos_ids=(), batch_size=500, sampling=Sampling(temperature=2.0))
    ]
    with torch.no_grad():
        law = torch.softmax(model(torch.tensor([prompt])).logits[0, -1] / 2.0, -1)
        pairs = model(torch.tensor([prompt + [t] for t in range(VOCAB_SIZE)])).logits[:, -1]
        second_law = law @ torch.softmax(pairs / 2.0, -1)
    for step, expected in enumerate((law, second_law)):
        seen = torch.bincount(torch.tensor([tokens[step] for tokens in found]), minlength=VOCAB_SIZE)
        likely = expected * draws > 5
        chi_square = ((seen - expected * draws) ** 2 / (expected * draws))[likely].sum()
        assert chi_square < int(likely.sum()) + 4 * (2 * int(likely.sum())) ** 0.5


def test_samples_depend_on_seed_and_key_alone() -> None:
    model, texts = tiny_model("llama"), prompts()
    first = answers(model, texts, sampling=Sampling(temperature=1.0, top_p=0.9, seed=1))
    assert answers(model, texts[::-1], slots=7, sampling=Sampling(temperature=1.0, top_p=0.9, seed=1)) != first
    assert answers(model, texts, slots=7, sampling=Sampling(temperature=1.0, top_p=0.9, seed=1)) == first
    assert answers(model, texts, sampling=Sampling(temperature=1.0, top_p=0.9, seed=2)) != first


@pytest.mark.parametrize("options", [{"temperature": -1}, {"top_p": 0}, {"top_p": 1.5}, {"top_k": -1}])
def test_impossible_sampling_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="--"):
        Sampling(**options)


# ---------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("group", "columns", "width"), [(3, 128, 64), (4, 1152, 16), (2, 200, 128)])
def test_triton_kernel_reads_what_the_mask_shows(dtype: torch.dtype, group: int, columns: int, width: int) -> None:
    from infer.static.triton_attention import triton_kernel

    query = torch.randn(4, 2, group, width, device="cuda", dtype=dtype)
    key, value = torch.randn(2, 4, 2, columns + 64, width, device="cuda", dtype=dtype)[:, :, :, :columns]
    value[1, :, columns // 2 + 5] = 100  # hidden below: it would be seen at once
    mask = torch.zeros(4, 1, 1, columns, device="cuda", dtype=dtype)
    hidden = [slice(1, None), slice(columns // 2 + 5, None), slice(None, columns - 9), slice(0, 7)]
    for row, columns_hidden in enumerate(hidden):
        mask[row, ..., columns_hidden] = torch.finfo(dtype).min
    expected = sdpa_kernel(query.double(), key.double(), value.double(), mask.double(), 0.13)
    tolerance = {torch.float32: 1e-4, torch.bfloat16: 0.03, torch.float16: 0.005}[dtype]
    torch.testing.assert_close(triton_kernel(query, key, value, mask, 0.13).double(), expected, atol=tolerance, rtol=tolerance)
    mask[1, ..., columns // 2 + 5] = 0  # the control: one more column
    assert (triton_kernel(query, key, value, mask, 0.13).double() - expected).abs().max() > tolerance


@pytest.mark.gpu
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0, top_p=0.9, seed=1)])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_graphs_change_nothing(family: str, sampling: Sampling) -> None:
    """CUDA graphs, their capture and the kernel in use, against the eager run on the CPU, in float32."""
    texts = prompts(40)
    expected = answers(tiny_model(family), texts, slots=9, new=150, sampling=sampling)
    found = answers(tiny_model(family).to("cuda"), texts, slots=9, new=150, sampling=sampling)  # type: ignore[arg-type]
    same = sum(found[key].token_ids == expected[key].token_ids for key in expected)
    assert same >= 38  # rounding may decide a near-tie


@pytest.mark.parametrize("temperature", [-1.0, 1e-40, float("nan"), float("inf")])
def test_a_temperature_that_is_none_is_refused(temperature: float) -> None:
    with pytest.raises(ValueError, match=r"--temperature .*: must be 0, which is greedy, or at least 0\.001 and finite"):
        Sampling(temperature=temperature)
