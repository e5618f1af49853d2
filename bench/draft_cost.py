"""What a proposed token costs, over a plain step of the target, both taken in turns."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch

from bench.engine import VerifyEngine
from bench.replay import ask, commit
from bench.report import Report
from bench.rounds import Spread, alternate, ratios
from outrider.drafting.base import Drafter, DraftLaw
from outrider.errors import ConfigError
from outrider.messages import Draft, SamplingParams

# Tokens that are committed before a proposal: about what comes of a round.
COMMITTED = 2
_SESSION = "cost"


class Follower:
    """A session of one drafter that follows a text; a call gives the seconds of one token."""

    def __init__(self, drafter: Drafter, text: Sequence[int], context: int, draft_len: int) -> None:
        """Open it with the first `context` tokens of the text."""
        self._drafter = drafter
        self._text = text
        self._held = context
        self._draft_len = draft_len
        reads = drafter.reads
        # What is in them takes no part in how long they take.
        self._hidden = None if reads is None else np.ones((COMMITTED, reads.size), np.float16)
        law = DraftLaw(prompt_len=context, corpus="cost")
        drafter.open(_SESSION, text[:context], SamplingParams(), law)
        ask(drafter, _SESSION, 0)

    def __call__(self) -> float:
        """Commit and ask for a draft; the seconds of both over its length."""
        committed = self._text[self._held : self._held + COMMITTED]
        began = time.perf_counter()
        commit(self._drafter, _SESSION, self._held, committed, self._hidden)
        ask(self._drafter, _SESSION, self._draft_len)
        taken = time.perf_counter() - began
        self._held += COMMITTED
        return taken / self._draft_len


def text_tokens(context: int, rounds: int, context_len: int) -> int:
    """Tokens of a text to follow, one round more being for warming up.

    Raises:
        ConfigError: the target has no room for them.
    """
    tokens = context + (rounds + 1) * COMMITTED
    if tokens > context_len:
        raise ConfigError(
            f"{tokens} tokens are needed, and the target takes {context_len}: give a shorter "
            "--context or fewer --rounds"
        )
    return tokens


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds of a plain step of the target, and of a proposed token, by round."""

    step_s: list[float]
    token_s: list[float]


def measure(
    engine: VerifyEngine,
    drafter: Drafter,
    text: Sequence[int],
    *,
    context: int,
    draft_len: int,
    rounds: int,
    target_threads: int,
    draft_threads: int,
) -> Cost:
    """Steps and proposals in turns, after the first `context` tokens of the text."""
    (session,) = engine.decoding([text[:context]], 2)
    step = engine.verification(session, Draft())
    follower = Follower(drafter, text, context, draft_len)

    def target(_: int) -> float:
        torch.set_num_threads(target_threads)
        return step()

    def proposal(_: int) -> float:
        torch.set_num_threads(draft_threads)
        return follower()

    taken = alternate({"target": target, "proposal": proposal}, rounds)
    engine.close(session)
    drafter.close(_SESSION)
    return Cost(taken["target"], taken["proposal"])


def report_of(costs: Mapping[str, Cost], title: str) -> Report:
    """One line a drafter."""
    report = Report(title, ["drafter", "a token, us", "a step of the target, ms", "over it"])
    for name, cost in costs.items():
        spreads = {
            "token_s": Spread.of(cost.token_s),
            "step_s": Spread.of(cost.step_s),
            "over_step": ratios(cost.token_s, cost.step_s),
        }
        shown = [spreads["token_s"].times(1e6), spreads["step_s"].times(1e3), spreads["over_step"]]
        report.rows.append([name, *shown])
        report.figures[name] = {key: asdict(spread) for key, spread in spreads.items()}
    return report
