"""The coupled rule: the target's token is a pure function of logits, seed and position.

    y_t = argmax_v( s_t[v] + gumbel(seed, t, v) )       s_t: scores of the processed distribution

By the Gumbel-max trick y_t is an exact sample of the target's distribution. A drafter that
uses the same noise on its own logits tends to guess the same token (Daliri, Musco, Suresh,
"Coupling without Communication and Drafter-Invariant Speculative Decoding", arXiv
2408.07978), and what is emitted is always the target's own token.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from outrider.sampling import gumbel_max
from outrider.sampling.acceptance import TargetTokens
from outrider.sampling.best import best_tokens, finite
from outrider.sampling.noise import gumbels
from outrider.sampling.processors import constrained_scores, constrains, warped_scores
from outrider.sampling.rows import Row

# Scores and noise are made for about this many tokens at once, so that they stay in the cache
# of a processor and take the same memory whatever the step.
_CHUNK_TOKENS = 1 << 17


@dataclass(frozen=True, slots=True)
class Choices:
    """The token of each row; those of `dead` rows, which decide nothing, mean nothing."""

    token_ids: list[int]
    dead: list[int]


def choose(logits: torch.Tensor, rows: Sequence[Row]) -> Choices:
    """What the rule chooses on each row of raw float [R, V] logits, with one copy to the host.

    A dead row has NaN or infinite logits, or constraints that bar every token.
    """
    values, ids = best_tokens(logits)
    usable = finite(values)
    special = [r for r, row in enumerate(rows) if not is_simply_greedy(row)]
    if special and gumbel_max.suits(logits):
        special = _draw_plain(logits, rows, special, values, ids)
    for chunk in _chunks(rows, special, logits.shape[1]):
        index = torch.tensor(chunk, device=logits.device)
        values, chosen = best_tokens(_scores(logits[index], [rows[r] for r in chunk]))
        ids[index] = chosen
        usable[index] &= finite(values)
    if ids.device.type == "cpu":
        token_ids, alive = ids.tolist(), usable.tolist()
    else:
        token_ids, alive = torch.stack([ids, usable]).tolist()
    return Choices(token_ids, [r for r, living in enumerate(alive) if not living])


def target_tokens(logits: torch.Tensor, rows: Sequence[Row]) -> list[int]:
    """The token that the rule chooses on each row of float [R, V] logits."""
    return choose(logits, rows).token_ids


class Targets:
    """The token of each row of raw float [R, V] logits; None for a dead row.

    Greedy rows cost next to nothing: all at once. Noise and processors run over the vocabulary,
    and a verdict looks at few of the rows of a draft, so on a CPU other rows are chosen when
    they are asked for; but those before any draft, which always are, at once where one pass
    does it. On other devices each answer would be waited for: all at once too.
    """

    def __init__(self, logits: torch.Tensor, rows: Sequence[Row]) -> None:
        self._logits = logits
        self._rows = rows
        self._known: dict[int, int | None] = {}
        everything = logits.device.type != "cpu"
        one_pass = gumbel_max.suits(logits)
        self._choose(
            [
                r
                for r, row in enumerate(rows)
                if everything
                or is_simply_greedy(row)
                or (one_pass and not row.drafted and gumbel_max.is_plain(row.sampling))
            ]
        )

    def __getitem__(self, row: int) -> int | None:
        """The token of a row."""
        if row not in self._known:
            self._choose([row])
        return self._known[row]

    def _choose(self, some: Sequence[int]) -> None:
        if not some:
            return
        logits = self._logits if len(some) == len(self._rows) else self._logits[some]
        choices = choose(logits, [self._rows[r] for r in some])
        self._known.update(zip(some, choices.token_ids, strict=True))
        self._known.update((some[index], None) for index in choices.dead)


@dataclass(frozen=True, slots=True)
class TargetsFrom:
    """The targets from a row on, which is row 0 here."""

    targets: TargetTokens
    begin: int

    def __getitem__(self, row: int) -> int | None:
        """The token of a row."""
        return self.targets[self.begin + row]


def ranked_tokens(logits: torch.Tensor, rows: Sequence[Row], count: int) -> list[list[int]]:
    """The `count` best tokens of each row, best first: the rule's choice and what follows it.

    Fewer where no more can be chosen; at least one.
    """
    if count == 1:
        return [[token] for token in target_tokens(logits, rows)]
    scores = _scores(logits, rows)
    _, first = best_tokens(scores)
    best = scores.topk(min(count, scores.shape[1]))
    return [
        [own, *(i for i, v in zip(ids, values, strict=True) if i != own and v > -torch.inf)][:count]
        for own, ids, values in zip(
            first.tolist(), best.indices.tolist(), best.values.tolist(), strict=True
        )
    ]


def processed_scores(logits: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
    """Scores whose softmax is the processed distribution p of each row, float64 [R, V].

    With temperature 0 they are the scores of which the best is chosen.
    """
    scores = constrained_scores(logits, rows)
    sampled = [r for r, row in enumerate(rows) if is_sampled(row)]
    if len(sampled) == len(rows):
        return warped_scores(scores, [row.sampling for row in rows])
    if sampled:
        scores[sampled] = warped_scores(scores[sampled], [rows[r].sampling for r in sampled])
    return scores


def is_sampled(row: Row) -> bool:
    """Whether the row's token is drawn rather than the best one."""
    return row.sampling.temperature > 0


def unusable_rows(logits: torch.Tensor) -> list[int]:
    """Rows of [R, V] scores that no token can be chosen from: NaN, +inf, or all -inf."""
    rows: list[int] = (~logits.amax(-1).isfinite()).nonzero().flatten().tolist()
    return rows


def _scores(logits: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
    """Scores of which the best is chosen, noise included, float64 [R, V]."""
    scores = processed_scores(logits, rows)
    sampled = [r for r, row in enumerate(rows) if is_sampled(row)]
    if not sampled:
        return scores
    # Rows at one position of a session, as siblings of a tree are, share their noise.
    of_row = [_noise_key(rows[r]) for r in sampled]
    place = {key: index for index, key in enumerate(dict.fromkeys(of_row))}
    seeds, positions = zip(*place, strict=True)
    noise = gumbels(seeds, positions, logits.shape[-1], device=logits.device)
    if len(place) < len(sampled):
        noise = noise[[place[key] for key in of_row]]
    if len(sampled) == len(rows):
        return scores.add_(noise)
    scores[sampled] += noise
    return scores


def _draw_plain(
    logits: torch.Tensor,
    rows: Sequence[Row],
    special: Sequence[int],
    values: torch.Tensor,
    ids: torch.Tensor,
) -> list[int]:
    """Put what is drawn on plain rows into `ids`, and return the special rows that are left.

    `values` and `ids` are the best of each row of logits; where they are not finite nothing can
    be drawn.
    """
    alive = finite(values).tolist()
    left = [r for r in special if not gumbel_max.is_plain(rows[r].sampling)]
    wanted = [r for r in special if alive[r] and r not in left]
    return left + gumbel_max.draw(logits, rows, wanted, values, ids)


def is_simply_greedy(row: Row) -> bool:
    """Whether the row's token is that of its best logit, and nothing else."""
    return not (is_sampled(row) or constrains(row.sampling))


def _chunks(rows: Sequence[Row], special: Sequence[int], vocab_size: int) -> Iterator[list[int]]:
    """The special rows, some at a time, those with the same noise together."""
    most = max(_CHUNK_TOKENS // vocab_size, 1)
    chunk: list[int] = []
    keys: set[tuple[int, int]] = set()
    for r in sorted(special, key=lambda r: (is_sampled(rows[r]), *_noise_key(rows[r]))):
        key = _noise_key(rows[r])
        too_many = key not in keys and len(keys) == most
        if too_many or len(chunk) == 4 * most:
            yield chunk
            chunk, keys = [], set()
        chunk.append(r)
        keys.add(key)
    if chunk:
        yield chunk


def _noise_key(row: Row) -> tuple[int, int]:
    return row.sampling.seed, row.position
