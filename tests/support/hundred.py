"""A hundred seeded requests, to be answered alike whatever runs the steps."""

import random

from outrider.messages import Draft, SamplingParams
from tests.support.models import TOKENS
from tests.support.stepping import Stepper

DRAFT_LEN = 4
LIMITS = {"max_sessions": 8, "draft_len": DRAFT_LEN, "draft_wait_s": 60}


def _samplings() -> list[SamplingParams]:
    """Greedy ones, drawn ones, and ones that need whole rows of logits."""
    chance = random.Random(5)
    return [
        SamplingParams(
            temperature=chance.choice((0.0, 0.6, 1.0, 1.4)),
            seed=chance.getrandbits(64),
            top_p=chance.choice((1.0, 1.0, 0.9)),
            top_k=chance.choice((0, 0, 20)),
            repetition_penalty=chance.choice((1.0, 1.0, 1.2)),
        )
        for _ in range(100)
    ]


def say_hundred(worker: Stepper, known: dict[str, list[int]] | None = None) -> dict[str, list[int]]:
    """A hundred requests, at most 8 of them in a step, with drafts when their text is `known`."""
    chance = random.Random(6)
    for number, sampling in enumerate(_samplings()):
        prompt = [chance.randrange(256) for _ in range(chance.randint(1, 24))]
        worker.start(f"{number}", prompt, chance.randint(3, 6), sampling)
    while True:
        for session in worker.wanting:
            assert session.want is not None
            said = len(session.tokens) - session.prompt_len
            right = known[session.session_id][said:] if known else []
            right = right[: session.want.draft_len]
            # Most drafts are right for a while; some are rejected at once.
            draft = [t if chance.random() < 0.8 else (t + 1) % TOKENS for t in right]
            worker.propose(session, Draft(tuple(draft)))
        if not worker.step():
            return {sid: said.tokens for sid, said in worker.said.items()}
