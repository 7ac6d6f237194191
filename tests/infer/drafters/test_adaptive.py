"""The adaptive drafter: what it chooses by hand-made step times, and that the text stays the base model's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from infer.candidates import Candidates, chain_candidates
from infer.drafters import Drafter
from infer.drafters.adaptive import FIRST_PAUSE, LONGEST_PAUSE, TRIAL, AdaptiveDrafter
from infer.drafters.draft_model import DraftModelDrafter
from infer.drafters.early_exit import EarlyExitDrafter
from infer.drafters.heads import HeadsDrafter
from infer.drafters.prompt_lookup import PromptLookupDrafter
from infer.drafters.suffix import SuffixDrafter
from infer.generate import Generator
from infer.tree_spec import BeamTree
from tests.infer.scripted_drafter import ScriptedDrafter
from tests.infer.test_generate import answers_of, prompts
from tests.random_heads import random_heads
from tests.tiny_models import tiny_model

LENGTHS = {1: 1.6, 4: 2.4, 8: 2.9}
SECONDS = {0: 1.0, 1: 1.1, 4: 1.35, 8: 1.7}
MODEL = tiny_model("llama")


class Chain(Drafter):
    """Drafts a chain of `size` tokens, and notes every size it was asked for."""

    name = "chain"

    def __init__(self) -> None:
        self.size, self.asked, self.observed = 0, list[int](), 0

    @property
    def max_nodes(self) -> int:
        return self.size

    def resize(self, num_nodes: int) -> None:
        self.size = num_nodes

    def start(self, prompts: list[list[int]]) -> None:
        self.room = self.size

    def propose(self, root_B: Tensor, hidden_BD: Tensor, texts: list[list[int]]) -> Candidates:
        self.asked.append(self.size)
        return chain_candidates(root_B, torch.zeros(len(root_B), self.size, dtype=torch.long))

    def observe(self, lengths: list[int], running: list[bool]) -> None:
        self.observed += 1


def adaptive(seconds: dict[int, dict[int, float]] | None = None) -> AdaptiveDrafter:
    return AdaptiveDrafter(Chain(), lengths=LENGTHS, seconds=seconds or {1: SECONDS})


def steps(drafter: AdaptiveDrafter, count: int, accepted: float, rows: int = 1) -> list[int]:
    """Sizes of `count` steps of which a share `accepted` of the expected tokens is accepted (in whole tokens, evenly)."""
    sizes, owed = [], 0.0
    for _ in range(count):
        size = drafter.propose(torch.zeros(rows, dtype=torch.long), torch.zeros(rows, 1), []).num_nodes
        owed += accepted * (LENGTHS.get(size, 1.0) - 1)
        drafter.observe([int(owed)] * rows, [True] * rows)
        owed -= int(owed)
        sizes.append(size)
    return sizes


def test_it_begins_with_the_best_size_for_average_text_and_keeps_it() -> None:
    assert set(steps(adaptive(), 200, accepted=1.0)) == {4}  # 2.4 / 1.35 beats 1.6 / 1.1 and 2.9 / 1.7


def test_drafts_that_are_never_right_are_switched_off_and_tried_ever_less() -> None:
    sizes = steps(adaptive(), 4000, accepted=0.0)
    first = sizes.index(0)
    assert 0 < first <= 20
    rests = "".join("x" if size else "." for size in sizes[first:]).split("x" * TRIAL)
    assert [len(rest) for rest in rests[:7]] == [8, 16, 32, 64, 128, 256, 256] and not any("x" in rest for rest in rests[:-1])
    assert FIRST_PAUSE == 8 and LONGEST_PAUSE == 256
    spent = sum(SECONDS[size] for size in sizes)
    assert len(sizes) / spent > 0.99  # of plain decoding's speed
    assert 1000 / sum(SECONDS[size] for size in sizes[:1000]) > 0.98


def test_it_switches_on_again_when_the_text_changes() -> None:
    drafter = adaptive()
    steps(drafter, 3000, accepted=0.0)
    sizes = steps(drafter, 2 * LONGEST_PAUSE, accepted=1.0)
    assert all(sizes[LONGEST_PAUSE + TRIAL :])
    assert drafter.next_pause == FIRST_PAUSE
    assert 0 in steps(drafter, 130, accepted=0.0)  # soon, after hundreds of steps that paid


def test_more_is_drafted_where_more_is_accepted() -> None:
    assert max(steps(adaptive(), 100, accepted=2.5)[50:]) == 8
    assert max(steps(adaptive(), 100, accepted=0.25)[50:]) == 1


def test_a_node_never_stands_for_more_than_a_token() -> None:
    """Three times the 0.6 accepted tokens expected of one node would make it the better one."""
    drafter = adaptive({1: {0: 1.0, 1: 1.1, 4: 2.3}})
    drafter.accepted = 3 * drafter.expected
    assert steps(drafter, 1, accepted=3.0) == [4]


def test_the_drafter_is_not_asked_for_nothing() -> None:
    drafter = adaptive()
    sizes = steps(drafter, 300, accepted=0.0)
    inner = drafter.drafter
    assert isinstance(inner, Chain)
    assert inner.asked == [size for size in sizes if size] and inner.observed == len(inner.asked)


class Nothing(Chain):
    def propose(self, root_B: Tensor, hidden_BD: Tensor, texts: list[list[int]]) -> Candidates:
        return Candidates.root_only(root_B)


def test_proposing_nothing_is_no_evidence() -> None:
    drafter = AdaptiveDrafter(Nothing(), lengths=LENGTHS, seconds={1: SECONDS})
    steps(drafter, 100, accepted=0.0)
    assert drafter.accepted == drafter.expected and not drafter.pause


class FirstRow(Chain):
    def propose(self, root_B: Tensor, hidden_BD: Tensor, texts: list[list[int]]) -> Candidates:
        drafted_BC = torch.zeros(len(root_B), self.size, dtype=torch.long)
        return chain_candidates(root_B, drafted_BC, num_drafted=(self.size, *[0] * (len(root_B) - 1)))


def test_rows_that_propose_nothing_beside_others_are_no_evidence() -> None:
    alone, beside = (AdaptiveDrafter(FirstRow(), lengths=LENGTHS, seconds={1: SECONDS}) for _ in range(2))
    for drafter, rows in ((alone, 1), (beside, 3)):
        drafter.propose(torch.zeros(rows, dtype=torch.long), torch.zeros(rows, 1), [])
        drafter.observe([2] + [0] * (rows - 1), [True] * rows)
    assert (alone.accepted, alone.expected) == (beside.accepted, beside.expected)


def test_drafts_that_no_longer_fit_the_context_are_no_evidence() -> None:
    """An oracle of 4 tokens where 4 are expected: all that is verified is accepted, up to the end of a context of 64 tokens."""
    model, texts = tiny_model("gpt2"), prompts((40,))
    whole = [text + answer for text, answer in zip(texts, answers_of(model, texts, 64 - 40), strict=True)]
    drafter = AdaptiveDrafter(ScriptedDrafter(whole), lengths={12: 5.0}, seconds={1: {0: 1.0, 12: 2.0}})
    answer = Generator(model, drafter).generate(texts, max_new_tokens=64, eos_ids=())[0]
    assert answer.runs == [1, 5, 5, 5, 5, 1, 1, 1] and answer.stats.num_drafted_tokens == 4 * 12
    assert drafter.accepted == pytest.approx(drafter.expected)


def test_rows_share_the_budget_of_the_batch() -> None:
    """One row: 4 nodes pay. Eight rows: none. Between them times are interpolated; as rows end, drafting begins."""
    curves = {1: SECONDS, 8: {0: 2.0, 1: 4.0, 4: 8.0}}
    drafter = adaptive(curves)
    assert drafter.step_seconds(1) == SECONDS and drafter.step_seconds(8) == drafter.step_seconds(9) == curves[8]
    assert drafter.step_seconds(2) == pytest.approx({0: 1 + 1 / 7, 1: 1.1 + 2.9 / 7, 4: 1.35 + 6.65 / 7})
    root_B, hidden_BD = torch.zeros(8, dtype=torch.long), torch.zeros(8, 1)
    drafter.start([[1]] * 8)
    assert drafter.propose(root_B, hidden_BD, []).num_nodes == 0
    drafter.observe([0] * 8, [True] * 8)
    drafter.pause = drafter.trial = 0
    drafter.observe([0] * 8, [True] + [False] * 7)
    assert drafter.propose(root_B, hidden_BD, []).num_nodes == 4


def test_rows_that_have_ended_do_not_count() -> None:
    few, many = adaptive(), adaptive()
    for drafter, lengths, running in ((few, [2], [True]), (many, [2, 9, 9], [True, False, False])):
        drafter.propose(torch.zeros(len(lengths), dtype=torch.long), torch.zeros(1, 1), [])
        drafter.observe(lengths, running)
    assert (few.accepted, few.expected, few.num_rows) == (many.accepted, many.expected, many.num_rows)


@pytest.mark.parametrize("right", [1.0, 0.6, 0.0])
@pytest.mark.parametrize("rows", [1, 3])
def test_the_text_is_the_base_models_and_runs_reproduce(right: float, rows: int) -> None:
    texts = prompts((11, 4, 19)[:rows])
    answers = answers_of(MODEL, texts, 60)
    runs = []
    for _ in range(2):
        inner = ScriptedDrafter([t + a for t, a in zip(texts, answers, strict=True)], depth=8, width=1, right=right)
        drafter = AdaptiveDrafter(inner, lengths=LENGTHS, seconds={1: SECONDS})
        found = Generator(MODEL, drafter).generate(texts, max_new_tokens=60, eos_ids=())
        assert [g.token_ids for g in found] == answers
        runs.append([g.runs for g in found])
    assert runs[0] == runs[1]
    assert max(map(max, runs[0])) <= {1.0: 9, 0.6: 9, 0.0: 1}[right]
    assert right < 1 or sum(map(len, runs[0])) <= rows * 12  # 60 tokens in runs of 5 and 9


def test_every_drafter_can_be_wrapped() -> None:
    """Sizes change at every step, pauses in between: states that grow with the text must catch up."""
    texts = prompts((30, 12))
    answers = answers_of(MODEL, texts, 40)
    heads = HeadsDrafter(MODEL, random_heads(MODEL), BeamTree(8))
    lookups = PromptLookupDrafter(max_ngram=1), SuffixDrafter(min_match=1)
    drafts = EarlyExitDrafter(MODEL, 1, 8), DraftModelDrafter(MODEL, tiny_model("llama", seed=1), 8)
    for inner in (heads, *lookups, *drafts):
        drafter = AdaptiveDrafter(inner, lengths=LENGTHS, seconds={1: SECONDS})
        for pause in (0, 5):
            drafter.pause, drafter.accepted, drafter.expected = pause, 4.0, 4.0
            found = Generator(MODEL, drafter).generate(texts, max_new_tokens=40, eos_ids=())
            assert [g.token_ids for g in found] == answers, inner.name
            assert found[0].stats.num_drafted_tokens or inner in lookups


@pytest.mark.parametrize(("seconds", "tried"), [({0: 1.0, 1: 2.1, 4: 4.0}, False), ({0: 1.0, 1: 1.9, 4: 4.0}, True), ({0: 1.0}, False)])
def test_what_could_not_pay_is_not_tried(seconds: dict[int, float], tried: bool) -> None:
    """One node yields 2 tokens at best (2 * 0.6 expected, cut at one), four 3.8."""
    assert any(steps(adaptive({1: seconds}), 1000, accepted=0.0)) == tried


@pytest.mark.parametrize(("num_heads", "vocabulary"), [(1, None), (3, 3)])
def test_heads_that_propose_less_than_was_measured(num_heads: int, vocabulary: int | None) -> None:
    """One head has 20 nodes at most, three tokens give one head three: in trials too, the text is the base's."""
    texts = prompts((5, 9))
    drafted = None if vocabulary is None else torch.arange(vocabulary)
    heads = HeadsDrafter(MODEL, random_heads(MODEL, num_heads=num_heads), BeamTree(64), draft_vocabulary=drafted)
    for seconds in ({0: 1.0, 8: 1.01, 64: 1.02}, {0: 1.0, 64: 1.0}):
        drafter = AdaptiveDrafter(heads, lengths={0: 1.0, 8: 1.9, 64: 2.1}, seconds={1: seconds})
        found = Generator(MODEL, drafter).generate(texts, max_new_tokens=120, eos_ids=())
        assert [g.token_ids for g in found] == answers_of(MODEL, texts, 120) and found[0].stats.num_drafted_tokens


def test_drafts_of_which_nothing_is_expected_end_in_no_division_by_zero() -> None:
    drafter = AdaptiveDrafter(Chain(), lengths={0: 1.0, 2: 1.0}, seconds={1: {0: 1.0, 2: 0.9}})
    root_B, hidden_BD = torch.zeros(64, dtype=torch.long), torch.zeros(64, 4)
    drafter.start([[1]] * 64)
    for _ in range(1200):
        drafter.propose(root_B, hidden_BD, [[1]] * 64)
        drafter.observe([0] * 64, [True] * 64)
    assert drafter.expected > 0
