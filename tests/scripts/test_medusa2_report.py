"""The perplexity report: a naive sum, the rows that training holds out, and references of prompts."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from infer.generate import Generator
from infer.prompts import encode_chat
from medusa_heads import base_model
from scripts import medusa2_report
from scripts.medusa2_report import Medusa2Report, perplexity, reference_conversations
from tests.tiny_models import tiny_model, tiny_tokenizer
from train.tokenization import TokenizedRow


def write(path: Path, *rows: dict[str, object]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def turns(question: str, answer: str | None = None) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, *([{"role": "assistant", "content": answer}] if answer else [])]


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_perplexity_is_the_naive_one(family: str) -> None:
    """Of the second to last token of each text where it is supervised; every token counts once, not every text."""
    model = tiny_model(family)
    rows = [TokenizedRow([5, 6, 7, 8, 9, 10], [False, False, True, True, False, True]), TokenizedRow([3, 4], [True, True])]
    terms = []
    for row in rows:
        law = model(torch.tensor([row.input_ids])).logits[0].log_softmax(-1)
        terms += [float(law[t - 1, row.input_ids[t]]) for t in range(1, len(row.input_ids)) if row.assistant_mask[t]]
    assert len(terms) == 4
    assert perplexity(model, rows, "") == pytest.approx(math.exp(-sum(terms) / 4), rel=1e-5)
    with pytest.raises(ValueError, match="no text holds a token of an answer"):
        perplexity(model, [TokenizedRow([1, 2], [False, False])], "answers")


def test_reports_both_models_on_both_kinds_of_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seed in (("base", 0), ("tuned", 1)):
        tiny_model("llama", seed).save_pretrained(tmp_path / name)
        tiny_tokenizer().save_pretrained(tmp_path / name)
    rows: list[dict[str, object]] = [{"id": f"{i}", "messages": turns("what is", f"the cat {i}")} for i in range(6)]
    answers = write(tmp_path / "answers.jsonl", *rows)
    references = write(tmp_path / "gsm8k.jsonl", {"id": "g", "messages": turns("what is the answer"), "reference": "it is #### 7"})
    report = Medusa2Report(
        base=str(tmp_path / "base"),
        tuned=str(tmp_path / "tuned"),
        answers=[str(answers)],
        references=references,
        held_out=2,
        output=tmp_path / "new" / "report.json",
        device="cpu",
        max_new_tokens=3,
    )
    base, tokenizer = base_model.load_base(str(tmp_path / "base"))
    prompt = encode_chat(tokenizer, turns("what is the answer"))
    spoken_by_base = Generator(base, tokenizer=tokenizer).generate([prompt], max_new_tokens=3)[0].text
    monkeypatch.setattr(medusa2_report, "is_right", lambda prompt, text: prompt.reference == "it is #### 7" and text == spoken_by_base)
    report.run()
    found = json.loads(report.output.read_text())
    assert found["texts"] == {"answers": 2, "references": 1}
    assert found["right_answers"] == {"untouched": 1.0, "tuned": 0.0} and found["num_questions"] == 1
    texts = report.texts()
    for kind in ("answers", "references"):
        pair = found["perplexity"][kind]
        for name, key in (("base", "untouched"), ("tuned", "tuned")):
            model, _ = base_model.load_base(str(tmp_path / name))
            assert pair[key] == pytest.approx(perplexity(model, texts[kind], ""))
        assert pair["change_percent"] == pytest.approx(100 * (pair["tuned"] - pair["untouched"]) / pair["untouched"])
    row = texts["references"][0]
    spoken = tokenizer.decode([t for t, is_answer in zip(row.input_ids, row.assistant_mask, strict=True) if is_answer])
    assert spoken == "it is #### 7<|im_end|>"


def test_conversations_are_references_too(tmp_path: Path) -> None:
    path = write(tmp_path / "c.jsonl", {"id": "c", "messages": turns("what", "that")})
    assert reference_conversations(path)[0].messages[-1]["content"] == "that"
