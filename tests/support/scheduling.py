"""A scheduler driven by hand: messages in, steps one at a time, and what came out."""

from typing import Any

from outrider.messages import (
    Draft,
    DrafterLost,
    DraftWorkerRef,
    Endings,
    Progress,
    Proposal,
    SamplingParams,
    SessionEnded,
    SessionFailed,
    StartSession,
    TokenOrigin,
)
from outrider.model.blocks import BlockPool
from tests.support.synthetic import VOCABULARY, SyntheticRunner, plain_decoding
from verify_worker.scheduler import Limits, Scheduler
from verify_worker.state import LeaveDrafter, Output, ToCoordinator, ToDrafter

DRAFTER = DraftWorkerRef("d1", "127.0.0.1:1")
OTHER = DraftWorkerRef("d2", "127.0.0.1:2")


class Worker:
    """A scheduler with its synthetic runner, a clock, and what came out."""

    def __init__(self, blocks: int = 64, *, prefix_cache: bool = True, **limits: Any) -> None:
        self.now = 0.0
        self.runner = SyntheticRunner()
        self.scheduler = Scheduler(
            BlockPool(blocks),
            Limits(**{"context_len": 256, "vocab_size": VOCABULARY, **limits}),
            kv_fingerprint="kv" if prefix_cache else "",
        )
        self.tokens: dict[str, list[int]] = {}
        self.origins: dict[str, list[TokenOrigin]] = {}
        self.ends: dict[str, SessionEnded | SessionFailed] = {}
        self.lost: list[DrafterLost] = []
        self.to_drafter: list[ToDrafter] = []
        self.left: list[str] = []

    def start(self, sid: str = "s", prompt: int = 5, new: int = 10, **fields: Any) -> None:
        self.take(self.scheduler.start(self.command(sid, prompt, new, **fields), owner=1))

    def command(
        self, sid: str = "s", prompt: int = 5, new: int = 10, **fields: Any
    ) -> StartSession:
        tokens = tuple(fields.pop("tokens", range(1, prompt + 1)))
        return StartSession(
            **{
                "session_id": sid,
                "epoch": 1,
                "token_ids": tokens,
                "prompt_len": len(tokens),
                "sampling": SamplingParams(),
                "endings": Endings(new),
                "drafter": DRAFTER,
                **fields,
            }
        )

    def step(self) -> bool:
        plan = self.scheduler.plan(self.now)
        if plan is None:
            return False
        self.scheduler.reserve(plan)
        outcome = self.runner.run(plan)
        self.now += outcome.compute_s
        self.take(self.scheduler.apply(plan, outcome, self.now))
        for session in self.scheduler.sessions.values():
            assert session.table.kv_len <= len(session.tokens) - 1
        return True

    def propose(self, sid: str, tokens: list[int], **fields: Any) -> None:
        session = self.scheduler.sessions[sid]
        worker_id = fields.pop("worker_id", "d1")
        proposal = Proposal(
            **{
                "session_id": sid,
                "epoch": session.epoch,
                "base_len": len(session.tokens),
                "draft": Draft(tuple(tokens)),
                **fields,
            }
        )
        self.take(self.scheduler.drafts.receive(worker_id, proposal, self.now))

    def right_draft(self, sid: str, length: int) -> list[int]:
        return plain_decoding(self.scheduler.sessions[sid].tokens, length)

    def finish(self) -> None:
        for _ in range(2000):
            if not self.scheduler.sessions:
                return
            if not self.step():
                wake = self.scheduler.wake_at_s(self.now)
                assert wake is not None, "nothing to do, and nothing to wait for"
                self.now = max(self.now, wake)
        raise AssertionError("sessions do not finish")

    def take(self, outputs: list[Output]) -> None:
        for output in outputs:
            if isinstance(output, ToDrafter):
                self.to_drafter.append(output)
                continue
            if isinstance(output, LeaveDrafter):
                self.left.append(output.worker_id)
                continue
            assert isinstance(output, ToCoordinator)
            event = output.event
            sid = event.session_id
            if isinstance(event, Progress):
                assert sid not in self.ends
                self.tokens.setdefault(sid, []).extend(event.token_ids)
                self.origins.setdefault(sid, []).extend(event.origins)
            elif isinstance(event, DrafterLost):
                self.lost.append(event)
            else:
                assert sid not in self.ends
                self.ends[sid] = event

    def commands(self, kind: type) -> list[Any]:
        return [out.command for out in self.to_drafter if isinstance(out.command, kind)]
