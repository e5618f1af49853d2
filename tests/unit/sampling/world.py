"""A tiny world: a target and drafters whose logits are tables, and the law of plain decoding."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from outrider.messages import Endings, SamplingParams
from outrider.sampling.coupled import processed_scores
from outrider.sampling.rows import Row

HORIZON = 3
THREE_TOKENS = Endings(HORIZON)
SAMPLED = SamplingParams(temperature=1.0)
PROMPT = (1, 0)
KINDS = ("peaked", "flat", "disjoint", "equal", "zeros")

Tokens = tuple[int, ...]
Law = dict[Tokens, float]


@dataclass(frozen=True)
class World:
    """Raw logits, float64 [V, V, V]: by the last two tokens, the target's and each drafter's."""

    target: torch.Tensor
    drafters: tuple[torch.Tensor, ...]

    @property
    def vocab_size(self) -> int:
        return self.target.shape[-1]


@dataclass(frozen=True)
class Task:
    """What is decoded: a world, the sampling parameters and the endings."""

    world: World
    sampling: SamplingParams = SAMPLED
    endings: Endings = THREE_TOKENS

    def row(self, committed: Sequence[int], drafted: Sequence[int] = ()) -> Row:
        return Row(self.sampling, committed, drafted, len(PROMPT), self.endings.stop_ids)


def logits(table: torch.Tensor, context: Sequence[int]) -> torch.Tensor:
    """The row [V] of a table after a context."""
    return table[context[-2], context[-1]]


def make_world(kind: str, vocab_size: int, seed: int = 0) -> World:
    """A random world of one of KINDS; its second drafter has nothing to do with the target."""
    generator = torch.Generator().manual_seed(1000 * seed + 10 * vocab_size + KINDS.index(kind))
    shape = (vocab_size,) * 3

    def noise(scale: float) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64) * scale

    def with_zeros(table: torch.Tensor) -> torch.Tensor:
        zeros = torch.rand(shape, generator=generator) < 0.4
        # One token stays possible everywhere.
        zeros.scatter_(-1, table.argmax(-1, keepdim=True), torch.zeros(shape, dtype=torch.bool))
        return table.masked_fill(zeros, -torch.inf)

    even = torch.arange(vocab_size) % 2 == 0
    stranger = noise(1.5)
    match kind:
        case "peaked":
            target = noise(4.0)
            return World(target, (target + noise(2.0), stranger))
        case "flat":
            return World(torch.zeros(shape, dtype=torch.float64), (noise(1.0), stranger))
        case "disjoint":
            target, draft = noise(1.0), noise(1.0)
            target[..., even], draft[..., ~even] = -torch.inf, -torch.inf
            return World(target, (draft, stranger))
        case "equal":
            target = noise(1.5)
            return World(target, (target.clone(), stranger))
        case "zeros":
            target = noise(1.5)
            return World(with_zeros(target), (with_zeros(target + noise(1.0)), stranger))
    raise ValueError(kind)


def distribution(task: Task, table: torch.Tensor, row: Row) -> torch.Tensor:
    """The processed distribution of a table's row, float64 [V]."""
    context = (*row.committed, *row.drafted)
    return processed_scores(logits(table, context)[None], [row])[0].softmax(-1)


def plain_law(task: Task) -> Law:
    """The probability of each completion, one token at a time, with nothing drafted."""
    law: Law = {}

    def extend(completion: Tokens, mass: float) -> None:
        ended = completion and completion[-1] in task.endings.stop_ids
        if ended or len(completion) == task.endings.max_new_tokens:
            law[completion] = mass
            return
        p = distribution(task, task.world.target, task.row((*PROMPT, *completion)))
        for token, probability in enumerate(p.tolist()):
            if probability > 0:
                extend((*completion, token), mass * probability)

    extend((), 1.0)
    return law


def assert_same_law(actual: Law, expected: Law, tolerance: float = 1e-9) -> None:
    """Every completion has the probability that it should have."""
    assert abs(sum(expected.values()) - 1) < tolerance
    for tokens in actual.keys() | expected.keys():
        difference = actual.get(tokens, 0.0) - expected.get(tokens, 0.0)
        assert abs(difference) <= tolerance, f"{tokens}: off by {difference:.3g}"


# Each processor with values that change the law of the worlds above, and the stop ids it needs.
PROCESSED: dict[str, tuple[SamplingParams, frozenset[int]]] = {
    "temperature": (replace(SAMPLED, temperature=0.6), frozenset()),
    "top_k": (replace(SAMPLED, top_k=2), frozenset()),
    "top_p": (replace(SAMPLED, top_p=0.7), frozenset()),
    "min_p": (replace(SAMPLED, min_p=0.4), frozenset()),
    "repetition_penalty": (replace(SAMPLED, repetition_penalty=2.5), frozenset()),
    "frequency_penalty": (replace(SAMPLED, frequency_penalty=1.3), frozenset()),
    "presence_penalty": (replace(SAMPLED, presence_penalty=1.3), frozenset()),
    "logit_bias": (replace(SAMPLED, logit_bias=((2, 1.5), (0, -100.0))), frozenset()),
    "bad_words": (
        replace(SAMPLED, bad_words=((1,), (0, 2), (2, 3, 0), (0, 0, 3))),
        frozenset(),
    ),
    "min_tokens": (replace(SAMPLED, min_tokens=2), frozenset({2})),
    "allowed_ids": (replace(SAMPLED, allowed_ids=(0, 3)), frozenset()),
    "banned_ids": (replace(SAMPLED, banned_ids=(2,)), frozenset()),
    "everything": (
        SamplingParams(
            temperature=0.8,
            top_k=3,
            top_p=0.95,
            min_p=0.05,
            repetition_penalty=1.3,
            frequency_penalty=0.4,
            presence_penalty=0.3,
            logit_bias=((1, 0.7),),
            bad_words=((2, 1),),
            min_tokens=1,
            allowed_ids=(0, 1, 2, 3),
            banned_ids=(4,),
        ),
        frozenset({3}),
    ),
}


def processed_task(name: str, *, greedy: bool = False) -> Task:
    """A task with one processor at work; `greedy` takes the temperature and warpers away."""
    sampling, stop_ids = PROCESSED[name]
    if greedy:
        sampling = replace(sampling, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0)
    world = make_world("equal", 5, seed=4)
    rough = World(world.target, (world.target + 0.5 * world.drafters[1], world.drafters[1]))
    return Task(rough, sampling, Endings(HORIZON, stop_ids))
