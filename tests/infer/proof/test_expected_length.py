"""Sample-and-match emits what plain forwards say it should on average; a biased verification does not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

import infer.proof.expected_length
import infer.verifiers
from infer.candidates import Candidates
from infer.drafters import Drafter
from infer.draws import Draws
from infer.generate import Generator
from infer.proof.expected_length import Comparison, RecordedStep, RecordingDrafter, compare, expected_lengths
from infer.tree import build_tree
from infer.verify_sampled import DraftTree, Laws, sample_and_match
from scripts.prove_sampling import target_law
from tests.infer.test_generate import prompts
from tests.tiny_models import tiny_model

LAWS = ((0.7, 0.95), (1.0, 1.0))
SHAPE = build_tree([[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0]])


def settings(temperature: float, top_p: float) -> GenerationConfig:
    return GenerationConfig(do_sample=True, temperature=temperature, top_p=top_p, top_k=0)


class LikelyDrafter(Drafter):
    """Proposes the model's own most likely tokens after every node, so that many are accepted."""

    name = "likely"
    max_nodes = SHAPE.num_nodes

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model

    def start(self, prompts: list[list[int]]) -> None:
        pass

    def propose(self, root_B: Tensor, hidden_BD: Tensor, texts: list[list[int]]) -> Candidates:
        parents, ranks, depths = SHAPE.parents_N.tolist(), SHAPE.ranks_N.tolist(), SHAPE.depths_N.tolist()
        paths = {(row, 0): list(text) for row, text in enumerate(texts)}
        for depth in range(1, SHAPE.depth + 1):
            nodes = [node for node in range(1, len(parents)) if depths[node] == depth]
            above = [(row, parent) for row in range(len(texts)) for parent in sorted({parents[node] for node in nodes})]
            likely = dict(zip(above, self.likely([paths[key] for key in above]), strict=True))
            for row in range(len(texts)):
                for node in nodes:
                    paths[row, node] = [*paths[row, parents[node]], likely[row, parents[node]][ranks[node]]]
        tokens_BN = torch.tensor([[paths[row, node][-1] for node in range(len(parents))] for row in range(len(texts))])
        return Candidates(tokens_BN, SHAPE.parents_N[None], SHAPE.depths_N[None], SHAPE.ancestors_NN[None], SHAPE.depth)

    def likely(self, texts: list[list[int]]) -> list[list[int]]:
        longest = max(map(len, texts))
        logits_RTV = self.model(torch.tensor([text + [0] * (longest - len(text)) for text in texts])).logits
        return [logits_TV[len(text) - 1].topk(3).indices.tolist() for logits_TV, text in zip(logits_RTV, texts, strict=True)]


def recorded(model: PreTrainedModel, law: tuple[float, float], *, batch: int = 20) -> list[RecordedStep]:
    recorder = RecordingDrafter(LikelyDrafter(model))
    texts = prompts([5 + i % 8 for i in range(batch)])
    Generator(model, recorder).generate(texts, max_new_tokens=24, eos_ids=(), generation_config=settings(*law))
    return recorder.steps


def comparison(model: PreTrainedModel, law: tuple[float, float], steps: list[RecordedStep]) -> Comparison:
    return compare([step.length for step in steps], expected_lengths(model, steps, target_law(model, settings(*law))))


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_the_mean_length_is_within_three_standard_errors(family: str, law: tuple[float, float]) -> None:
    model = tiny_model(family)
    found = comparison(model, law, recorded(model, law))
    assert found.num_steps > 250 and found.mean_expected > 1.2
    assert abs(found.deviation) <= 3 and found.standard_error < 0.06


def follow_the_best(tree: DraftTree, p: Laws, draws: Draws) -> tuple[list[int], int]:
    """Likely tokens are accepted too often: each node draws twice and prefers a child."""
    path = [0]
    while True:
        children = {tree.tokens[child]: child for child in tree.children(path[-1])}
        tokens = [draws.index(p[path[-1]]) for _ in range(2)]
        token = next((token for token in tokens if token in children), tokens[0])
        if token not in children:
            return path, token
        path.append(children[token])


def one_draw_per_path(tree: DraftTree, p: Laws, draws: Draws) -> tuple[list[int], int]:
    """Every path draws for itself at nodes that paths share; the longest wins."""
    best = [0]
    for leaf in set(range(len(tree.tokens))) - set(tree.parents):
        path = tree.path_to(leaf)
        length = 1
        while length < len(path) and draws.index(p[path[length - 1]]) == tree.tokens[path[length]]:
            length += 1
        best = max(best, path[:length], key=len)
    return best, draws.index(p[best[-1]])


def never_deep(tree: DraftTree, p: Laws, draws: Draws) -> tuple[list[int], int]:
    path, token = sample_and_match(tree, p, draws)
    return (path, token) if len(path) < 3 else (path[:2], tree.tokens[path[2]])


@pytest.mark.parametrize("biased", [follow_the_best, one_draw_per_path, never_deep])
def test_a_biased_verification_leaves_three_standard_errors(
    biased: Callable[..., tuple[list[int], int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control; the last one has the right law of the text, and is only shorter than it should be."""
    monkeypatch.setattr(infer.verifiers, "sample_and_match", biased)
    model = tiny_model("llama")
    assert abs(comparison(model, LAWS[0], recorded(model, LAWS[0])).deviation) > 3


@pytest.mark.parametrize("law", LAWS)
def test_expected_lengths_are_those_of_one_forward_per_node(law: tuple[float, float], monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("mistral_window")
    steps = recorded(model, law, batch=2)[:12]
    steps += [RecordedStep(step.text, step.tokens[:1], [0], 1) for step in steps[:1]]  # nothing drafted
    monkeypatch.setattr(infer.proof.expected_length, "TOKENS_PER_FORWARD", 100)
    found = expected_lengths(model, steps, target_law(model, settings(*law)))
    for step, length in zip(steps, found, strict=True):
        tree = DraftTree(tuple(step.tokens), tuple(step.parents))
        paths = [tree.path_to(node) for node in range(1, len(step.tokens))]
        by_hand = 1 + sum(path_probability(model, law, step, path) for path in paths)
        assert abs(length - by_hand) < 1e-4
    assert found[-1] == 1 and min(found[:-1]) > 1


def path_probability(model: PreTrainedModel, law: tuple[float, float], step: RecordedStep, path: list[int]) -> float:
    probability, text = 1.0, list(step.text)
    for node in path[1:]:
        p_V = (model(torch.tensor([text])).logits[0, -1] / law[0]).softmax(-1)
        falling_V, order_V = p_V.sort(descending=True)
        cut_V = torch.zeros_like(p_V)
        kept = int((falling_V.cumsum(0) < law[1]).sum()) + 1
        cut_V[order_V[:kept]] = falling_V[:kept] / falling_V[:kept].sum()
        probability *= float(cut_V[step.tokens[node]])
        text.append(step.tokens[node])
    return probability


def test_lengths_are_counted_before_an_answer_is_cut() -> None:
    """With a limit of 2, every answer ends in its first step, whatever that emitted."""
    model = tiny_model("llama")
    recorder = RecordingDrafter(LikelyDrafter(model))
    texts = prompts([5 + i for i in range(16)])
    found = Generator(model, recorder).generate(texts, max_new_tokens=2, eos_ids=(), generation_config=settings(0.7, 0.95))
    assert len(recorder.steps) == 16 and max(step.length for step in recorder.steps) > 1
    for step, text, answer in zip(recorder.steps, texts, found, strict=True):
        assert step.text == [*text, answer.token_ids[0]] and step.length == 1 + answer.stats.num_accepted_tokens


def test_the_statistic_by_hand() -> None:
    found = compare([1, 2, 4, 1], [1.5, 1.5, 2.0, 2.0])
    assert (found.num_steps, found.mean_length, found.mean_expected, found.mean_difference) == (4, 2.0, 1.75, 0.25)
    assert found.standard_error == pytest.approx(((0.75**2 + 0.25**2 + 1.75**2 + 1.25**2) / 3 / 4) ** 0.5)
    assert found.deviation == pytest.approx(0.25 / found.standard_error)
