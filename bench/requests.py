"""Seeded requests over random parameters, the same ones every time."""

import random
from dataclasses import dataclass

from outrider.client import GenerateOptions
from outrider.messages import SamplingParams


@dataclass(frozen=True, slots=True)
class Request:
    """One request of token ids."""

    prompt: tuple[int, ...]
    sampling: SamplingParams
    max_tokens: int

    def options(self) -> GenerateOptions:
        """The client's options for it."""
        sampling = self.sampling
        return GenerateOptions(
            token_ids=self.prompt,
            max_tokens=self.max_tokens,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            seed=sampling.seed,
            repetition_penalty=sampling.repetition_penalty,
            frequency_penalty=sampling.frequency_penalty,
            presence_penalty=sampling.presence_penalty,
            logit_bias=dict(sampling.logit_bias),
            bad_words_ids=sampling.bad_words,
            min_tokens=sampling.min_tokens,
            allowed_token_ids=sampling.allowed_ids,
            banned_token_ids=sampling.banned_ids,
        )


def random_request(number: int, *, vocab_size: int, max_tokens: int) -> Request:
    """Request `number`; half of its parameters are off, most of the time."""
    chance = random.Random(number)

    def ids(most: int) -> tuple[int, ...]:
        return tuple(chance.sample(range(vocab_size), chance.randint(0, most)))

    def sometimes(*values: float) -> float:
        """0 in half of the cases, else one of the values."""
        return chance.choice(values) if chance.random() < 0.5 else 0.0

    words = [(*ids(1), chance.randrange(vocab_size)) for _ in range(chance.choice((0, 0, 1, 3)))]
    some_allowed = chance.random() < 0.1
    sampling = SamplingParams(
        temperature=chance.choice((0.0, 0.3, 0.8, 0.8, 1.0, 1.0, 1.5)),
        top_k=int(sometimes(2, 5, 12)),
        top_p=sometimes(0.5, 0.8, 0.95) or 1.0,
        min_p=sometimes(0.02, 0.1),
        seed=chance.randrange(2**64),
        repetition_penalty=sometimes(0.9, 1.1, 1.3) or 1.0,
        frequency_penalty=sometimes(-0.3, 0.2, 1.0),
        presence_penalty=sometimes(-0.2, 0.5),
        logit_bias=tuple((token, chance.uniform(-3, 3)) for token in ids(3)),
        bad_words=tuple(words),
        min_tokens=int(sometimes(4, max_tokens // 2, max_tokens)),
        allowed_ids=tuple(range(chance.randint(0, 1), vocab_size, 2)) if some_allowed else (),
        banned_ids=ids(3),
    )
    prompt = [chance.randrange(vocab_size) for _ in range(chance.randint(1, 40))]
    if chance.random() < 0.5:  # something to look up
        prompt = (prompt * 3)[:60]
    return Request(tuple(prompt), sampling, max_tokens)
