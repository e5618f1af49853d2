"""What goes on beside the steps of a split target: messages, while the ranks compute.

A worker's own engine, servicer and event loop with a coordinator's stream from another process;
only the registry is missing. The processor time of the event loop is read at both ends of every
step, so that what it does while the ranks compute is told from what it does in between. What
rank 0 does from its answer to the next message is timed by parts: the others have nothing to do.
"""

import asyncio
import multiprocessing
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.report import Bar, Report
from bench.rounds import Spread
from outrider import rpc, wire
from outrider.messages import Endings, SamplingParams, SpeculationOptions, StartSession
from outrider.model.parallel.leader import ParallelModel
from outrider.pb.v1 import verify_pb2, verify_pb2_grpc
from verify_worker.app import SERVICE_NAME
from verify_worker.draft_links import DraftLinks
from verify_worker.engine import Engine
from verify_worker.health import heartbeat
from verify_worker.runner import Runner
from verify_worker.servicer import Identity, VerifyServicer
from verify_worker.state import Outcome, Output, Plan
from verify_worker.streams import Streams, deliver
from verify_worker.target import Target
from verify_worker.tracing import SessionSpans

# Steps at either end that are not counted: not all sessions are in them.
_EDGE = 4
# What encoding and sending the message of a step may take.
CONTROL_MOST_S = 0.001
# What rank 0 does from one answer to the next; each part ends where the next begins.
PARTS = {
    "decided": "decide: verdicts from the answer",
    "applied": "apply: commit them, frames to publish",
    "published": "publish: hand frames to the event loop",
    "planned": "plan: messages, plan, blocks",
    "laid out": "rows to decide",
    "sent": "encode and send the message",
    "answered": "the ranks' work",
}


@dataclass(slots=True)
class Timeline:
    """When rank 0 came to the end of each of PARTS, step by step."""

    marks: list[tuple[str, float]] = field(default_factory=list)

    def after(self, name: str, call: Callable[..., Any], before: str = "") -> Callable[..., Any]:
        """The call, which is the end of a part, and whose begin may be that of one `before`."""

        def wrapped(*arguments: Any) -> Any:
            if before:
                self.marks.append((before, time.perf_counter()))
            result = call(*arguments)
            self.marks.append((name, time.perf_counter()))
            return result

        return wrapped

    def steps(self) -> list[dict[str, float]]:
        """Seconds of each part, from one answer to the next; they add up to the step."""
        found: list[dict[str, float]] = []
        last_s = 0.0
        for name, now_s in self.marks:
            if found:
                found[-1][name] = found[-1].get(name, 0.0) + now_s - last_s
            if name == "answered":
                found.append({})
            last_s = now_s
        whole = [one for one in found[_EDGE : -_EDGE - 1] if one.keys() == PARTS.keys()]
        return [{part: one[part] for part in PARTS} for one in whole]


@dataclass(slots=True)
class WatchedRunner:
    """A runner that notes, at both ends of each step, the time and that of a thread."""

    inner: Runner
    thread: int
    marks: list[tuple[float, float]] = field(default_factory=list)

    def run(self, plan: Plan) -> Outcome:
        """The inner one's."""
        self._mark()
        outcome = self.inner.run(plan)
        self._mark()
        return outcome

    def _mark(self) -> None:
        clock = time.pthread_getcpuclockid(self.thread)
        self.marks.append((time.perf_counter(), time.clock_gettime(clock)))

    def steps(self) -> list[dict[str, float]]:
        """Seconds by step: of the ranks, between two of them, and of the thread in both."""
        found = []
        # From the end of a step to the end of the next: its messages are those of the one before.
        for i in range(1 + 2 * _EDGE, len(self.marks) - 2 * _EDGE, 2):
            ended, began, end = self.marks[i : i + 3]
            found.append(
                {
                    "step": end[0] - ended[0],
                    "between": began[0] - ended[0],
                    "loop": end[1] - ended[1],
                    "beside": end[1] - began[1],
                }
            )
        return found


def overlap_report(target: Target, prompts: Sequence[Sequence[int]], new_tokens: int) -> Report:
    """Plain sessions from start to end; the others of the target's ranks are still there then."""
    timeline = Timeline()
    steps = asyncio.run(_serve(target, prompts, new_tokens, timeline))
    spreads = {key: Spread.of([step[key] * 1000 for step in steps]) for key in steps[0]}
    share = sum(step["beside"] for step in steps) / sum(step["loop"] for step in steps)
    names = {
        "step": "step, with messages to a coordinator",
        "between": "  between the ranks' work: apply, plan",
        "loop": "  processor time of the event loop",
        "beside": "  of it while the ranks work",
    }
    report = Report(
        f"Beside the steps of {len(prompts)} sessions; ms, median (quartiles)", ["", "a step"]
    )
    for key, name in names.items():
        report.rows.append([name, spreads[key]])
        report.figures[key] = {"ms": spreads[key].median}
    parts = timeline.steps()
    for part, said in PARTS.items():
        spread = Spread.of([one[part] * 1000 for one in parts])
        report.rows.append([f"  rank 0: {said}", spread])
        report.figures[part] = {"ms": spread.median}
    sent_s = report.figures["sent"]["ms"] / 1000
    met, said = sent_s < CONTROL_MOST_S, f"{sent_s * 1e6:.0f} us"
    report.bars.append(Bar("a message takes below 1 ms beside the event loop", met, said))
    report.rows.append(["  share of the event loop's time beside the ranks' work", f"{share:.0%}"])
    report.figures["share"] = share
    return report


async def _serve(
    target: Target, prompts: Sequence[Sequence[int]], new_tokens: int, timeline: Timeline
) -> list[dict[str, float]]:
    loop = asyncio.get_running_loop()

    def publish(outputs: Sequence[Output]) -> None:
        loop.call_soon_threadsafe(deliver, outputs, streams, links)

    runner = WatchedRunner(target.runner, threading.get_ident())
    assert isinstance(target.model, ParallelModel)
    _watch(target, runner, timeline)
    engine = Engine(
        target.scheduler,
        runner,
        timeline.after("published", publish),
        SessionSpans(),
        ranks=target.model,
    )
    identity = Identity("bench", "1")
    streams = Streams(lambda: heartbeat(engine, identity))
    links = DraftLinks(engine.post, None)
    server, servicer = rpc.Server(), VerifyServicer("bench")
    verify_pb2_grpc.add_VerifyServiceServicer_to_server(servicer, server.grpc)
    port = await server.start(SERVICE_NAME, "127.0.0.1", 0)
    servicer.serve_with(identity, engine, streams)
    engine.start()
    spawn = multiprocessing.get_context("spawn")
    coordinator = spawn.Process(
        target=_coordinate, args=(f"127.0.0.1:{port}", prompts, new_tokens), daemon=True
    )
    coordinator.start()
    try:
        await asyncio.to_thread(coordinator.join)
    finally:
        await servicer.leave(1.0)
        await server.stop(1.0)
        await links.close()
        await asyncio.to_thread(engine.stop)
    if coordinator.exitcode:
        raise RuntimeError("the coordinator's side failed")
    return runner.steps()


def _watch(target: Target, runner: WatchedRunner, timeline: Timeline) -> None:
    model: Any = target.model
    scheduler: Any = target.scheduler
    watched: Any = runner.inner
    group = model._member.group
    group.send = timeline.after("sent", group.send)
    model.score = timeline.after("answered", model.score, before="laid out")
    watched.run = timeline.after("decided", watched.run, before="planned")
    scheduler.apply = timeline.after("applied", scheduler.apply)


def _coordinate(address: str, prompts: Sequence[Sequence[int]], new_tokens: int) -> None:
    asyncio.run(_read(address, prompts, new_tokens))


async def _read(address: str, prompts: Sequence[Sequence[int]], new_tokens: int) -> None:
    ended = asyncio.Event()

    async def commands() -> AsyncIterator[verify_pb2.DecodeRequest]:
        starts = [
            StartSession(
                session_id=f"s{number}",
                epoch=1,
                token_ids=tuple(prompt),
                prompt_len=len(prompt),
                sampling=SamplingParams(),
                endings=Endings(new_tokens),
                speculation=SpeculationOptions(enabled=False),
            )
            for number, prompt in enumerate(prompts)
        ]
        yield verify_pb2.DecodeRequest(commands=[wire.decode_command_to_pb(s) for s in starts])
        await ended.wait()

    async with rpc.open_channel(address) as channel:
        stub: Any = verify_pb2_grpc.VerifyServiceStub(channel)
        left = len(prompts)
        async for frame in stub.Decode(commands()):
            left -= sum(event.WhichOneof("event") == "ended" for event in frame.events)
            if not left:
                break
        ended.set()
