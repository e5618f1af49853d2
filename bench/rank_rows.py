"""Tokens of rows whose logits are spread over ranks: found there, or of rows brought together."""

import random
import time
from functools import partial
from typing import Any

from bench.rank_spent import Spent
from bench.report import Report
from bench.rounds import Spread, alternate
from outrider.messages import SamplingParams
from outrider.model.blocks import BlockTable
from outrider.model.paged import Segment
from outrider.sampling.rows import Row
from outrider.sampling.scores import Choosing


def rows_report(model: Any, spent: Spent, *, sessions: int, rounds: int) -> Report:
    """The same rows, their tokens found where the logits are, and brought together whole."""
    chance = random.Random(2)
    samplings = {
        "drawn where they are": SamplingParams(temperature=1.0, seed=1),
        "whole rows, for top-p": SamplingParams(temperature=1.0, seed=1, top_p=0.9),
    }
    table = BlockTable()
    model.pool.grow(table, sessions)
    tokens = [chance.randrange(min(model.vocab_size, 20_000)) for _ in range(sessions)]

    def turn(sampling: SamplingParams, _: int) -> dict[str, float]:
        rows = [Row(sampling, tokens[: place + 1]) for place in range(len(tokens))]
        spent.clear()
        began = time.perf_counter()
        choosing = Choosing(rows, [], model.vocab_size)
        scores = model.score([Segment(tokens, table, len(rows))], choosing)
        answered = time.perf_counter()
        for place in range(len(rows)):
            assert scores.targets[place] is not None
        chosen = time.perf_counter()
        gather = spent.collectives()[-1]  # the others are sums of the forward
        return {
            "step with its tokens": chosen - began,
            "of it: wait for the other's rows": gather.waited_s,
            "of it: gather": gather.summed_s,
            "of it: tokens of whole rows (sort, draw)": chosen - answered,
        }

    sides = {name: partial(turn, sampling) for name, sampling in samplings.items()}
    found = alternate(sides, 2 * rounds)
    model.pool.release(table)
    title = f"Tokens of {sessions} rows; ms, median (quartiles)"
    columns = list(found["drawn where they are"][0])
    report = Report(title, ["", *columns, "bytes to rank 0 from each other rank"])
    each = -(-model.vocab_size // spent.arrivals.ranks)
    for name, size in zip(found, (24, 4 * each), strict=True):
        spreads = [Spread.of([one[key] * 1000 for one in found[name]]) for key in columns]
        report.rows.append([name, *spreads, sessions * size])
        figures = dict(zip(columns, (spread.median for spread in spreads), strict=True))
        report.figures[name] = {"ms": figures, "bytes": sessions * size}
    return report
