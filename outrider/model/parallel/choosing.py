"""The token of a row whose logits are spread over ranks, without bringing the row together.

Every rank finds the best token of its slice, noise included, since noise depends on the seed,
the position and the token's id alone. Rank 0 gets three numbers a row from each,

    [the best logit of the slice, the logit of its candidate, the id of its candidate]

and compares the candidates as one rank would: the same formula, with the best logit of all,
and of equals the lowest id.
"""

from collections.abc import Sequence

import torch

from outrider.model.parallel.messages import Drawn, Wanted
from outrider.sampling import gumbel_max
from outrider.sampling.best import best_tokens, finite
from outrider.sampling.coupled import Choices, is_simply_greedy
from outrider.sampling.noise import GAMMA, gumbels_at, key, keyed_gumbels
from outrider.sampling.rows import Row

_MASK = (1 << 64) - 1


def sorted_rows(rows: Sequence[Row], whole: Sequence[int], token_count: int) -> Wanted:
    """What each row needs; `whole` ones are needed whole whatever they ask for."""
    everything = set(whole)
    greedy: list[int] = []
    drawn: list[Drawn] = []
    for r, row in enumerate(rows):
        if r in everything:
            continue
        if is_simply_greedy(row):
            greedy.append(r)
        elif gumbel_max.is_plain(row.sampling):
            noise = key(row.sampling.seed, row.position)
            drawn.append(Drawn(r, noise, row.sampling.temperature))
        else:
            everything.add(r)
    return Wanted(token_count, sorted(everything), greedy, drawn)


def candidates(logits: torch.Tensor, begin: int, wanted: Wanted) -> torch.Tensor:
    """This rank's candidates: of logits [W, v] of the ids from `begin` on, float64 [R, 3].

    R rows: the greedy ones, then the drawn ones.
    """
    places = wanted.chosen_rows
    size = min(max(wanted.token_count - begin, 0), logits.shape[1])
    found = torch.full((len(places), 3), -torch.inf, dtype=torch.float64, device=logits.device)
    found[:, 2] = begin
    if not size or not places:
        return found
    some = logits[places, :size].float()
    tops, ids = best_tokens(some)
    alive = finite(tops).tolist()
    first = len(wanted.greedy)
    drawn = [(first + i, one) for i, one in enumerate(wanted.drawn) if alive[first + i]]
    if drawn:
        _draw(some, begin, drawn, tops, ids)
    found[:, 0] = tops
    found[:, 1] = some.gather(1, ids[:, None])[:, 0]
    found[:, 2] = ids + begin
    return found


def chosen(parts: Sequence[torch.Tensor], wanted: Wanted) -> Choices:
    """The tokens of the rows in the order of `candidates`, from those of all ranks.

    A dead row has NaN or infinite logits.
    """
    together = torch.stack(list(parts)).cpu()  # [N, R, 3]
    tops = together[:, :, 0].amax(0)
    totals, ids = together[:, :, 1].clone(), together[:, :, 2].long()
    first = len(wanted.greedy)
    if wanted.drawn:
        temperatures = torch.tensor([one.temperature for one in wanted.drawn], dtype=torch.float64)
        noise = gumbels_at([one.key for one in wanted.drawn], ids[:, first:])
        totals[:, first:] = (totals[:, first:] - tops[first:]) / temperatures + noise
    # The first of equals, which has the lowest id: slices are in the order of ranks.
    owners = torch.from_numpy(totals.numpy().argmax(0))
    tokens = ids.gather(0, owners[None])[0].tolist()
    dead = (~tops.isfinite()).nonzero().flatten().tolist()
    return Choices(tokens, dead)


def _draw(
    logits: torch.Tensor,
    begin: int,
    drawn: Sequence[tuple[int, Drawn]],
    tops: torch.Tensor,
    ids: torch.Tensor,
) -> None:
    """Put what is drawn on rows of logits [R, v] into `ids`, which count from `begin`."""
    places = [place for place, _ in drawn]
    # Noise counts from the key: that of a slice begins so much later.
    keys = [(one.key + GAMMA * begin) & _MASK for _, one in drawn]
    temperatures = [one.temperature for _, one in drawn]
    left = list(range(len(drawn)))
    if gumbel_max.suits(logits):
        unclear = set(gumbel_max.draw_keyed(logits, places, keys, temperatures, tops, ids))
        left = [i for i in left if places[i] in unclear]
    if not left:
        return
    rows = torch.tensor([places[i] for i in left], device=logits.device)
    scale = torch.tensor([temperatures[i] for i in left], dtype=torch.float64, device=logits.device)
    scores = logits[rows].double().sub_(tops[rows, None]).div_(scale[:, None])
    noise = keyed_gumbels([keys[i] for i in left], logits.shape[1], device=logits.device)
    ids[rows] = best_tokens(scores.add_(noise))[1]
