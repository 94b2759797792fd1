"""What is drawn, against distributions computed one token at a time in float64, and against the
whole forward pass.
"""

import math

import numpy as np
import pytest
import torch

from lrattnres.model.decoder import Decoder
from lrattnres.model.generate import Generation, room
from lrattnres.model.sampling import Dice, Sampling, choose, probabilities
from lrattnres.residual.base import paths
from tests.model.test_decoder import SEPARATOR, make, whole


def naive(logits: list[float], temperature=1.0, top_k=None, top_p=None, min_p=None) -> list[float]:
    """The same in plain Python: a list of (probability, token), cut step by step."""
    weights = [math.exp((logit - max(logits)) / temperature) for logit in logits]
    left = sorted(
        ((w / sum(weights), token) for token, w in enumerate(weights)),
        key=lambda pair: (-pair[0], pair[1]),
    )
    if top_k is not None:
        left = left[:top_k]
    if top_p is not None:
        total, kept, mass = sum(p for p, _ in left), [], 0.0
        for p, token in left:
            if mass >= top_p and kept:
                break
            kept.append((p, token))
            mass += p / total
        left = kept
    if min_p is not None:
        left = [(p, token) for p, token in left if p >= min_p * left[0][0]]
    total, result = sum(p for p, _ in left), [0.0] * len(logits)
    for p, token in left:
        result[token] = p / total
    return result


SETTINGS = [
    {},
    {"temperature": 0.5},
    {"temperature": 2.0, "top_k": 5},
    {"top_k": 1},
    {"top_k": 1000},
    {"top_p": 0.7},
    {"top_p": 1.0},
    {"top_p": 1e-9},
    {"min_p": 0.2},
    {"min_p": 1.0},
    {"temperature": 1.3, "top_k": 12, "top_p": 0.8, "min_p": 0.1},
]


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_distributions_against_a_list_in_plain_python(setting: dict) -> None:
    logits = torch.randn(7, 23) * 2
    found = probabilities(logits, Sampling(**setting))
    expected = [naive(row, **setting) for row in logits.double().tolist()]
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_what_is_no_token_is_never_chosen(setting: dict) -> None:
    """As if the model had no such rows."""
    logits, allowed = torch.randn(7, 23) * 2, torch.rand(23) < 0.6
    found = probabilities(logits, Sampling(**setting), allowed)
    expected = torch.zeros(7, 23, dtype=torch.float64)
    rows = [naive(row, **setting) for row in logits[:, allowed].double().tolist()]
    expected[:, allowed] = torch.tensor(rows, dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-15)


def test_equal_logits_keep_exactly_k() -> None:
    found = probabilities(torch.zeros(1, 9), Sampling(top_k=3))
    assert found[0].tolist() == pytest.approx([1 / 3] * 3 + [0] * 6)


def test_draws_follow_the_distribution() -> None:
    """Pearson's χ² of 20000 draws, against its mean (23 tokens, 12 left: 11) and six deviations."""
    logits, setting = torch.randn(1, 23), {"temperature": 1.2, "top_k": 12}
    expected = np.array(naive(logits[0].double().tolist(), **setting))
    draws, dice = 20_000, Dice(seed=3, sample=0)
    chances = probabilities(logits, Sampling(**setting))
    counts = np.bincount([int(choose(chances, [dice])) for _ in range(draws)], minlength=23)
    assert counts[expected == 0].sum() == 0
    inside = expected > 0
    chi2 = ((counts - draws * expected)[inside] ** 2 / (draws * expected[inside])).sum()
    assert chi2 < 11 + 6 * math.sqrt(22)


def test_the_highest_draw_still_finds_a_token() -> None:
    class Loaded:
        def draw(self) -> torch.Tensor:
            return torch.tensor(1 - 2.0**-53, dtype=torch.float64)

    chances = torch.tensor([[0.1, 0.2, 0.7, 0.0]], dtype=torch.float64)
    assert choose(chances, [Loaded()]).tolist() == [2]


def test_infinite_logits_are_refused() -> None:
    with pytest.raises(FloatingPointError):
        probabilities(torch.tensor([[0.0, math.nan]]), Sampling())


def continued(decoder: Decoder, prompts, **options) -> list[list[int]]:
    generation = Generation(decoder, prompts, options.pop("sampling", Sampling()), **options)
    texts = [[] for _ in prompts]
    while generation.rows:
        for row, token in generation.step().items():
            texts[row].append(token)
    return texts


PROMPTS = [
    [SEPARATOR, 3, 4, 5],
    [SEPARATOR],
    [SEPARATOR, 7, SEPARATOR, 8, 9, 1, 2],
    [SEPARATOR, *range(13)],
]


@pytest.mark.parametrize("residual", list(paths()))
def test_greedy_is_the_argmax_of_the_whole_pass(tiny_model_config, residual: str) -> None:
    """Up to the context limit, with rows that end at different times."""
    model = make(tiny_model_config(residual=residual, context=16))
    texts = continued(Decoder(model, SEPARATOR), PROMPTS, sampling=Sampling(temperature=0))
    for prompt, text in zip(PROMPTS, texts, strict=True):
        assert len(prompt) + len(text) == 17
        sequence = list(prompt)
        for token in text:
            assert token == whole(model, torch.tensor([sequence]))[0, -1].argmax()
            sequence.append(token)


def test_a_text_depends_on_seed_and_sample_and_not_on_the_batch(tiny_model_config) -> None:
    decoder = Decoder(make(tiny_model_config(context=16)), SEPARATOR)
    together = continued(decoder, PROMPTS, seed=5)
    assert [continued(decoder, [prompt], seed=5)[0] for prompt in PROMPTS] == together
    assert continued(decoder, PROMPTS, seed=6) != together
    samples = [4, 3, 2, 1]
    apart = [
        continued(decoder, [p], seed=5, samples=[sample])[0]
        for p, sample in zip(PROMPTS, samples, strict=True)
    ]
    assert continued(decoder, PROMPTS, seed=5, samples=samples) == apart
    first, second, again = continued(decoder, [PROMPTS[0]] * 3, seed=5, samples=[0, 1, 0])
    assert first == again == together[0] and second != first


def test_a_dropped_row_leaves_the_others_alone(tiny_model_config) -> None:
    decoder = Decoder(make(tiny_model_config(context=16)), SEPARATOR)
    whole_texts = continued(decoder, PROMPTS, seed=1)
    generation, texts = Generation(decoder, PROMPTS, Sampling(), seed=1), [[] for _ in PROMPTS]
    while generation.rows:
        for row, token in generation.step().items():
            texts[row].append(token)
        generation.drop([row for row in (0, 2) if len(texts[row]) == 2 + row])
    assert texts == [whole_texts[0][:2], whole_texts[1], whole_texts[2][:4], whole_texts[3]]


def test_what_does_not_fit_is_refused_with_what_to_write(tiny_model_config) -> None:
    assert (room(5, None, 16), room(16, None, 16), room(5, 3, 16)) == (12, 1, 3)
    with pytest.raises(ValueError, match="write tokens=12"):
        room(5, 13, 16)
    with pytest.raises(ValueError, match=r"17 tokens.*shorten"):
        room(17, None, 16)
    with pytest.raises(ValueError, match="empty prompt"):
        Generation(Decoder(make(tiny_model_config()), SEPARATOR), [[]], Sampling())
