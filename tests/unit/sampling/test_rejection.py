"""The parts of the rejection rule, and its numbers at their limits."""

from collections.abc import Sequence

import pytest
import torch

from outrider.messages import SamplingParams, SparseDistribution, TokenOrigin
from outrider.sampling.coupled import processed_scores
from outrider.sampling.noise import Stream, gumbels, uniform
from outrider.sampling.proposal import quantised
from outrider.sampling.rejection import (
    KeyedChance,
    acceptance_probability,
    dense,
    one_hot,
    residual,
    verify_rejection,
)
from outrider.sampling.rows import Row

ACCEPTED, RECOVERED = TokenOrigin.ACCEPTED, TokenOrigin.RECOVERED
BONUS, PLAIN = TokenOrigin.BONUS, TokenOrigin.PLAIN


def law(*masses: float) -> torch.Tensor:
    return torch.tensor(masses, dtype=torch.float64)


class Told:
    """A chance that accepts so many tokens and notes what it was asked."""

    def __init__(self, accepts: int) -> None:
        self.accepts = accepts
        self.asked: list[tuple[int, float]] = []
        self.drawn: list[tuple[int, Stream, list[float]]] = []

    def accept(self, position: int, probability: float) -> bool:
        self.asked.append((position, probability))
        return len(self.asked) <= self.accepts

    def draw(self, position: int, stream: Stream, p: torch.Tensor) -> int:
        self.drawn.append((position, stream, p.tolist()))
        return 3


P = torch.stack([law(0.5, 0.25, 0.25, 0), law(0.25, 0, 0.5, 0.25), law(0, 0, 0.75, 0.25)])
Q = [law(0.25, 0.5, 0.25, 0), law(0.25, 0.25, 0, 0.5)]


@pytest.mark.parametrize(
    ("accepts", "tokens", "asked", "drawn"),
    [
        (0, (3,), [(10, 0.5)], (10, Stream.RESAMPLE, [1, 0, 0, 0])),
        (1, (1, 3), [(10, 0.5), (11, 0.5)], (11, Stream.RESAMPLE, [0, 0, 1, 0])),
        (2, (1, 3, 3), [(10, 0.5), (11, 0.5)], (12, Stream.TARGET, [0, 0, 0.75, 0.25])),
    ],
)
def test_each_row_and_each_stream(
    accepts: int,
    tokens: tuple[int, ...],
    asked: list[tuple[int, float]],
    drawn: tuple[int, Stream, list[float]],
) -> None:
    chance = Told(accepts)
    verdict = verify_rejection([1, 3], Q, P, 10, chance)
    assert verdict.token_ids == tokens
    assert verdict.origins == (ACCEPTED,) * accepts + (BONUS if accepts == 2 else RECOVERED,)
    assert (verdict.draft_tokens, verdict.path) == (2, tuple(range(accepts)))
    assert (chance.asked, chance.drawn) == (asked, [drawn])


def test_without_a_draft_the_token_is_plain() -> None:
    chance = Told(0)
    verdict = verify_rejection([], [], P[:1], 10, chance)
    assert (verdict.token_ids, verdict.origins, verdict.draft_tokens) == ((3,), (PLAIN,), 0)
    assert chance.drawn == [(10, Stream.TARGET, [0.5, 0.25, 0.25, 0])]


@pytest.mark.parametrize(
    ("p", "q", "probability"),
    [
        (0.5, 0.25, 1.0),
        (0.25, 0.5, 0.5),
        (0.3, 0.3, 1.0),
        (0.0, 0.3, 0.0),
        (0.0, 0.0, 0.0),
        (0.3, 0.0, 0.0),
        (0.3, 1e-300, 1.0),
        (1e-300, 1e-300, 1.0),
        (5e-324, 1e-300, 0.0),
        (1e-300, 1.0, 1e-300),
        (1.0, 5e-324, 1.0),
    ],
)
def test_acceptance_probability(p: float, q: float, probability: float) -> None:
    actual = acceptance_probability(law(0, p), law(0, q), 1)
    assert actual == pytest.approx(probability, rel=1e-12, abs=1e-20)
    assert 0 <= actual <= 1


def test_residual() -> None:
    torch.testing.assert_close(
        residual(law(0.5, 0.3, 0.2), law(0.1, 0.2, 0.7)), law(0.8, 0.2, 0), rtol=1e-12, atol=0
    )


@pytest.mark.parametrize("p", [law(0, 1, 0), law(0.2, 0.3, 0.5), law(1 / 3, 1 / 3, 1 / 3)])
def test_a_residual_of_nothing_is_p_itself(p: torch.Tensor) -> None:
    assert torch.equal(residual(p, p.clone()), p)


def test_a_residual_of_next_to_nothing_is_a_distribution() -> None:
    p = law(0.5, 0.5 + 2**-53, 0)
    for rest in (residual(p, law(0.5, 0.5, 0)), residual(law(5e-324, 1, 0), law(0, 1, 0))):
        assert rest.isfinite().all()
        assert float(rest.sum()) == 1.0


@pytest.mark.parametrize("scale", [1e-300, 1e-12, 1.0])
def test_tiny_q_and_zeros_in_it(scale: float) -> None:
    p, q = law(0.25, 0.75, 0), law(scale, 0, 1 - scale)
    assert acceptance_probability(p, q, 0) == pytest.approx(min(1, 0.25 / scale))
    assert acceptance_probability(p, q, 2) == 0
    rest = residual(p, q)
    assert rest.isfinite().all()
    assert float(rest.sum()) == pytest.approx(1)
    for seed in range(50):
        verdict = verify_rejection([2], [q], torch.stack([p, p]), 0, KeyedChance(seed))
        assert verdict.token_ids[0] in (0, 1)


def test_q_dense_and_one_hot() -> None:
    assert dense(SparseDistribution((3, 1), (1, 3)), 5).tolist() == [0, 0.75, 0, 0.25, 0]
    assert one_hot(2, 4).tolist() == [0, 0, 1, 0]
    assert dense(SparseDistribution((3,), (7,)), 4).dtype == one_hot(0, 1).dtype == torch.float64


def test_keyed_chance_is_the_noise_of_its_position() -> None:
    chance = KeyedChance(5)
    p = law(0.2, 0.3, 0, 0.5)
    for position in range(200):
        u = uniform(5, position, Stream.ACCEPT)
        assert chance.accept(position, u + 1e-12)
        assert not chance.accept(position, u)
        assert not chance.accept(position, 0.0)
        assert chance.accept(position, 1.0)
        for stream in (Stream.TARGET, Stream.RESAMPLE):
            noise = gumbels([5], [position], 4, stream=stream)[0]
            assert chance.draw(position, stream, p) == int((p.log() + noise).argmax())
    assert {chance.draw(i, Stream.TARGET, p) for i in range(200)} == {0, 1, 3}


def decided(logits: torch.Tensor, temperature: float, draft: Sequence[int], seed: int) -> int:
    """The first token of a round by the rejection rule, q as the drafter reports it."""
    row = Row(SamplingParams(temperature=temperature), (0,))
    p = processed_scores(logits.expand(len(draft) + 1, -1), [row] * (len(draft) + 1)).softmax(-1)
    q = [dense(quantised(p[0], 0), logits.shape[-1])] * len(draft)
    assert not p.isnan().any()
    return verify_rejection(draft, q, p, 1, KeyedChance(seed)).token_ids[0]


@pytest.mark.parametrize("exponent", range(-6, 4))
def test_every_temperature(exponent: int) -> None:
    generator = torch.Generator().manual_seed(exponent + 6)
    for seed in range(20):
        logits = torch.randn(30, generator=generator) * 100
        best = int(logits.argmax())
        for draft in ([], [best]):
            token = decided(logits, 10.0**exponent, draft, seed)
            assert 0 <= token < 30
            if exponent <= -3:
                assert token == best
