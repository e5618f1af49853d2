"""A draft worker that means no good: `python -m bench.hostile_drafter KIND FLAGS…`.

random       proposes ids by chance
adversarial  knows the target and uses it against it: drafts that are right up to a wrong
             token, drafts that are wrong from the start, and now and then one that is late,
             stale, for nobody or empty
malformed    the same, and now and then a draft that is malformed in one of several ways,
             for which it is soon left alone

It announces itself like any other draft worker. `HostileCommands` starts it in a stack.
"""

import asyncio
import random
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from outrider import rpc, wire
from outrider.exactness.reference import Reference, load_reference
from outrider.local.commands import Commands, StackSettings
from outrider.messages import CloseDraft, CommitDraft, Draft, OpenDraft, Proposal
from outrider.pb.v1 import draft_pb2, draft_pb2_grpc
from outrider.sampling.coupled import processed_scores, target_tokens
from outrider.sampling.rows import Row
from outrider.service import new_incarnation
from outrider.session.announcing import Announcer
from outrider.session.redis import connect
from outrider.session.registry import Pool, Registry, WorkerRecord

KINDS = ("random", "adversarial", "malformed")
LATE_S = 0.05
# One proposal in so many is not a decent draft at all.
RUBBISH_EVERY = 12


class HostileCommands(Commands):
    """The commands of a stack whose draft workers are hostile."""

    def __init__(self, settings: StackSettings, kind: str) -> None:
        super().__init__(settings)
        self._kind = kind
        self._model = settings.model

    def draft_worker(self, redis_url: str, worker_id: str) -> list[str]:
        """`python -m bench.hostile_drafter`."""
        arguments = [self._kind, self._model, redis_url, worker_id]
        return [sys.executable, "-m", "bench.hostile_drafter", *arguments]


@dataclass(slots=True)
class _Followed:
    """A session as the drafter was told of it."""

    opened: OpenDraft
    tokens: list[int] = field(default_factory=list)


class Mind(Protocol):
    """What a drafter answers when `draft_len` tokens are wanted."""

    def proposals(self, session: _Followed, draft_len: int) -> Iterator[Proposal | float]:
        """Proposals to send, and seconds to wait between them."""
        ...


def _proposal(session: _Followed, tokens: list[int], **fields: Any) -> Proposal:
    values: dict[str, Any] = {
        "session_id": session.opened.session_id,
        "epoch": session.opened.epoch,
        "base_len": len(session.tokens),
        "draft": Draft(tuple(tokens)),
    }
    return Proposal(**{**values, **fields})


class RandomMind:
    """Ids by chance, as many as were asked for or fewer."""

    def __init__(self, reference: Reference) -> None:
        self._token_count = reference.token_count
        self._chance = random.Random(1)

    def proposals(self, session: _Followed, draft_len: int) -> Iterator[Proposal | float]:
        """One proposal."""
        count = self._chance.randint(0, draft_len)
        yield _proposal(session, [self._chance.randrange(self._token_count) for _ in range(count)])


class AdversarialMind:
    """Right where it is of no use, wrong where it hurts most; malformed too if it may be."""

    def __init__(self, reference: Reference, *, malformed: bool) -> None:
        self._reference = reference
        self._malformed = malformed
        self._chance = random.Random(2)

    def proposals(self, session: _Followed, draft_len: int) -> Iterator[Proposal | float]:
        """What it is up to this time."""
        if self._chance.randrange(RUBBISH_EVERY):
            right = self._chance.randint(0, draft_len)
            yield _proposal(session, self._draft(session, draft_len, right))
            return
        tokens = self._draft(session, draft_len, draft_len)
        if self._malformed and self._chance.random() < 0.5:
            yield self._rubbish(session, tokens)
            return
        match self._chance.randrange(5):
            case 0:
                yield LATE_S
                yield _proposal(session, tokens)
            case 1:  # stale first, then twice the same
                yield _proposal(session, tokens, base_len=len(session.tokens) - 1)
                yield _proposal(session, tokens)
                yield _proposal(session, tokens)
            case 2:
                yield _proposal(session, tokens, session_id="nobody")
            case 3:
                yield _proposal(session, tokens, epoch=session.opened.epoch + 1)
            case _:
                yield _proposal(session, [])

    def _rubbish(self, session: _Followed, tokens: list[int]) -> Proposal:
        """A draft that no drafter sends in earnest."""
        match self._chance.randrange(4):
            case 0:
                return _proposal(session, [*tokens, 0])  # more than was asked for
            case 1:
                return _proposal(session, [self._reference.token_count, *tokens[1:]])
            case 2:
                return _proposal(session, [2**32 - 1, *tokens[1:]])
            case _:
                forward = tuple(range(1, len(tokens) + 1))
                return _proposal(session, tokens, draft=Draft(tuple(tokens), forward))

    def _draft(self, session: _Followed, draft_len: int, right: int) -> list[int]:
        """`right` tokens of the target's own, then the second best, and rubbish after it."""
        tokens: list[int] = []
        while len(tokens) < draft_len:
            if len(tokens) > right:
                tokens.append(self._chance.randrange(self._reference.token_count))
                continue
            opened = session.opened
            row = Row(opened.sampling, session.tokens, tokens, opened.prompt_len, opened.stop_ids)
            logits = self._reference.logits([[*session.tokens, *tokens]]).float()
            own = target_tokens(logits, [row])[0]
            tokens.append(own if len(tokens) < right else _second_best(logits, row, own))
        return tokens


def _second_best(logits: torch.Tensor, row: Row, best: int) -> int:
    scores = processed_scores(logits, [row])[0]
    scores[best] = -torch.inf
    return int(scores.argmax())


class HostileServicer(draft_pb2_grpc.DraftServiceServicer):
    """Speaks draft.proto and answers with what its mind makes up."""

    def __init__(self, worker_id: str, mind: Mind) -> None:
        self._worker_id = worker_id
        self._mind = mind

    async def Speculate(  # type: ignore[override]  # noqa: N802 - the name of the rpc
        self, request_iterator: AsyncIterator[draft_pb2.SpeculateRequest], context: Any
    ) -> None:
        """Follow the sessions of one verify worker and answer each want."""
        followed: dict[str, _Followed] = {}
        async for request in request_iterator:
            for pb in request.commands:
                match wire.draft_command_from_pb(pb):
                    case OpenDraft() as opened:
                        session = _Followed(opened, list(opened.token_ids))
                        followed[opened.session_id] = session
                        await self._answer(session, opened.draft_len, context)
                    case CommitDraft() as commit:
                        session = followed[commit.session_id]
                        session.tokens.extend(commit.token_ids)
                        await self._answer(session, commit.draft_len, context)
                    case CloseDraft(session_id=session_id):
                        followed.pop(session_id, None)

    async def _answer(self, session: _Followed, draft_len: int, context: Any) -> None:
        for proposal in self._mind.proposals(session, draft_len) if draft_len else ():
            if isinstance(proposal, float):
                await asyncio.sleep(proposal)
                continue
            event = wire.draft_event_to_pb(proposal)
            await context.write(draft_pb2.SpeculateResponse(events=[event]))

    async def GetDraftWorkerState(  # noqa: N802 - the name of the rpc
        self, request: draft_pb2.GetDraftWorkerStateRequest, context: Any
    ) -> draft_pb2.GetDraftWorkerStateResponse:
        """It says that it holds nothing."""
        return draft_pb2.GetDraftWorkerStateResponse(worker_id=self._worker_id)


async def serve(kind: str, model: str, redis_url: str, worker_id: str) -> None:
    """Serve until the process is ended."""
    reference = load_reference(model)
    mind: Mind = RandomMind(reference)
    if kind != "random":
        mind = AdversarialMind(reference, malformed=kind == "malformed")
    server = rpc.Server()
    servicer = HostileServicer(worker_id, mind)
    draft_pb2_grpc.add_DraftServiceServicer_to_server(servicer, server.grpc)
    name = draft_pb2.DESCRIPTOR.services_by_name["DraftService"].full_name
    port = await server.start(name, "127.0.0.1", 0)
    record = WorkerRecord(
        pool=Pool.DRAFT,
        worker_id=worker_id,
        address=f"127.0.0.1:{port}",
        incarnation=new_incarnation(),
        model=kind,
        model_fingerprint="",
        tokenizer_fingerprint="",
        capacity=1000,
        sessions=0,
        draining=False,
        context_len=0,
    )
    async with connect(redis_url) as redis:
        await Announcer(Registry(redis), lambda: record).run(asyncio.Event())


if __name__ == "__main__":
    torch.set_num_threads(1)
    asyncio.run(serve(*sys.argv[1:]))
