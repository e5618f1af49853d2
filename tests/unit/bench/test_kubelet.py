"""What a container goes through for what its probes are answered, by the kubelet's rules."""

import asyncio
import sys
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from bench import kubelet
from bench.kubelet import SERVING, Kubelet, until
from bench.pods import LIVENESS, READINESS, STARTUP, Pod, Probe

SPEED = 200
NOT = "NOT_SERVING"
PATIENCE_S = 60
# Ends with 7 when it is told to, as soon as it says that it listens to that.
COMMAND = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))"
OBEYS = f"{COMMAND}; print('up', flush=True); time.sleep(600)"
HANGS = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"


def probe(kind: str, *, failures: int, grace_s: float | None = None) -> Probe:
    return Probe(
        port=1,
        service=kind,
        command=(),
        period_s=5,
        timeout_s=1,
        failures=failures,
        successes=1,
        delay_s=0,
        grace_s=grace_s,
    )


POD = Pod(
    name="pod",
    service="pod",
    labels={},
    replicas=1,
    args=(),
    probes={
        STARTUP: probe(STARTUP, failures=4),
        LIVENESS: probe(LIVENESS, failures=3, grace_s=100),
        READINESS: probe(READINESS, failures=1),
    },
    grace_s=60,
    pre_stop_s=0,
)


class Answers:
    """What is said to each probe, one after the other; the last one from then on."""

    def __init__(self, **said: list[str]) -> None:
        self.asked: list[str] = []
        self._said = {kind: deque(answers) for kind, answers in said.items()}

    async def health(self, target: str, service: str, timeout_s: float) -> str:
        self.asked.append(service)
        answers = self._said[service]
        return answers.popleft() if len(answers) > 1 else answers[0]


async def watched(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    answers: Answers,
    true: Callable[[Kubelet], bool],
    code: str = OBEYS,
) -> Kubelet:
    """A container under these answers until something holds."""
    monkeypatch.setattr(kubelet, "health", answers.health)
    command = [sys.executable, "-I", "-S", "-c", code]
    made = Kubelet(POD, "pod", "127.0.0.1", command, tmp_path / "log", speed=SPEED)
    running = asyncio.create_task(made.run())
    try:
        await until(lambda: true(made), "what was waited for", PATIENCE_S)
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
    return made


def happened(made: Kubelet) -> list[str]:
    return [event.what for event in made.events]


async def test_nothing_else_is_asked_before_the_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    answers = Answers(startup=[NOT, NOT, NOT, SERVING], liveness=[SERVING], readiness=[SERVING])
    made = await watched(monkeypatch, tmp_path, answers, lambda k: k.ready)
    assert happened(made)[:3] == ["begun", "started", "ready"]
    assert answers.asked[:4] == [STARTUP] * 4
    assert STARTUP not in answers.asked[4:]


async def test_a_start_that_takes_too_long_is_ended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    answers = Answers(startup=[NOT], liveness=[SERVING], readiness=[SERVING])
    made = await watched(monkeypatch, tmp_path, answers, lambda k: k.restarts == 1)
    assert happened(made)[:2] == ["begun", "startup failed"]
    assert set(answers.asked) == {STARTUP}


async def test_liveness_ends_a_container_after_so_many_failures_in_a_row(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    said = [NOT, NOT, SERVING, NOT, NOT, NOT, SERVING]
    answers = Answers(startup=[SERVING], liveness=said, readiness=[SERVING])
    made = await watched(monkeypatch, tmp_path, answers, lambda k: k.restarts == 1, HANGS)
    assert "liveness failed" in happened(made)
    assert made.failed[LIVENESS] == 5
    # It hears nothing, and is killed once the probe's own grace is over.
    ended = next(event for event in made.events if event.what == "unready")
    failed = next(event for event in made.events if event.what == "liveness failed")
    assert ended.at_s - failed.at_s >= 100 / SPEED


async def test_readiness_turns_both_ways_and_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    said = [SERVING, NOT, NOT, SERVING, NOT]
    answers = Answers(startup=[SERVING], liveness=[SERVING], readiness=said)

    def often(made: Kubelet) -> bool:
        return made.failed[READINESS] >= 8

    made = await watched(monkeypatch, tmp_path, answers, often)
    turns = ["begun", "started", "ready", "unready", "ready", "unready"]
    assert happened(made) == turns
    assert made.restarts == 0


async def test_a_deleted_pod_is_only_asked_whether_it_is_ready(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    answers = Answers(startup=[SERVING], liveness=[SERVING], readiness=[SERVING])
    monkeypatch.setattr(kubelet, "health", answers.health)
    command = [sys.executable, "-I", "-S", "-c", OBEYS]
    made = Kubelet(POD, "pod", "127.0.0.1", command, tmp_path / "log", speed=SPEED)
    running = asyncio.create_task(made.run())
    await until(lambda: made.ready and "up" in made.child.log_tail(), "ready", PATIENCE_S)
    assert await made.delete() == 7
    await running
    assert made.restarts == 0
    assert happened(made)[-3:] in (["deleted", "ended", "unready"], ["deleted", "unready", "ended"])
