"""The chart's probes and grace periods, carried out against real services.

    load      models that take 3 minutes; and one that never comes
    prefill   a prompt that takes much longer than a liveness probe has patience
    hang      engines that hang while their sockets still answer
    stop      processes that answer nothing (SIGSTOP), one of each service
    drain     one pod of each service deleted, all at once, as when a node is emptied

From `hang` on completions run all the time, and each is compared with what the same request said
before. With `--speed` above 1 everything that takes a set time takes so much less.
"""

import asyncio
import tempfile
from dataclasses import dataclass
from pathlib import Path

from bench.load import LETTERS
from bench.probe_trials import (
    CONTEXT,
    LOAD_S,
    STARTUP_S,
    Loading,
    Outcome,
    load_slowly,
    trial,
    under_load,
)
from bench.report import Bar, Report, progress
from bench.tiny import write_model
from outrider.config import setting

# Beyond what is allowed: a container is looked at and ended by a busy machine.
SLACK_S = 5.0


@dataclass(frozen=True, slots=True)
class Settings:
    """How fast, and which."""

    speed: float = setting(1.0, at_least=1, help="How much faster than in a cluster it all is.")
    load: bool = setting(True, help="Also load models for 3 minutes.")
    bar: bool = setting(False, help="Exit with 1 when a bar is not met.")


async def measure(settings: Settings, directory: Path) -> tuple[Loading, Outcome]:
    """All of it."""
    model = write_model(directory / "model", letters=LETTERS, end=True, context=CONTEXT)
    loading, outcome = Loading(), Outcome()
    if settings.load:
        progress("models load")
        loading = await load_slowly(model, settings.speed)
    async with trial(model, settings.speed, outcome) as at:
        progress("a long prefill")
        await at.prefill()
        async with under_load(at, outcome):
            for what in (at.hang, at.stop, at.drain):
                progress(what.__name__)
                await what()
    return loading, outcome


def report_of(settings: Settings, loading: Loading, outcome: Outcome) -> Report:
    """The times, and the bars."""
    title = "Probes" if settings.speed == 1 else f"Probes, {settings.speed:g} times as fast"
    report = Report(title, ["what", "pod", "seconds", "allowed", "answer"])
    if settings.load:
        _report_loading(report, loading)
    _report_prefill(report, outcome)
    for kind, ended in (("engine hangs", outcome.hung), ("SIGSTOP", outcome.stopped)):
        for one in ended:
            report.rows.append([kind, one.pod, one.seconds, one.allowed_s, one.answer])
        late = ", ".join(one.pod for one in ended if one.seconds > one.allowed_s + SLACK_S)
        report.bars.append(Bar(f"{kind}: ended within what is allowed", not late, late))
        ready = ", ".join(one.pod for one in ended if not one.unready)
        report.bars.append(Bar(f"{kind}: not ready before that", not ready, ready))
    for drain in outcome.drained:
        said = f"ready: {drain.readiness}, alive: {drain.liveness}, exit code {drain.code}"
        report.rows.append(["deleted", drain.pod, "", "", said])
    in_order = all(drain.in_order for drain in outcome.drained)
    report.bars.append(Bar("deleted pods are alive, not ready, and end with 0", in_order))
    others = ", ".join(outcome.restarted_for_nothing)
    report.bars.append(Bar("nothing else is restarted", not others, others))
    load = outcome.load
    detail = f"of {len(load.said)}, {len(load.failed)} failed, {len(outcome.different)} differ"
    same = not load.failed and not load.torn and not outcome.different
    report.bars.append(Bar("every completion says what it said before", same, detail))
    report.figures |= {
        "prefill_s": outcome.prefill_s,
        "hung_s": {one.pod: one.seconds for one in outcome.hung},
        "stopped_s": {one.pod: one.seconds for one in outcome.stopped},
        "completions": len(load.said),
    }
    return report


def _report_loading(report: Report, loading: Loading) -> None:
    for pod, failed in loading.failed.items():
        report.rows.append([f"{LOAD_S:g} s of load", pod, "", "", f"{failed} failed probes"])
    report.rows.append(["loads for ever", "verify-0", loading.never_s, STARTUP_S, "ended"])
    waited = not loading.early and not loading.restarts
    report.bars.append(Bar("a load of 3 minutes is waited for, and not ready", waited))
    ended = STARTUP_S - SLACK_S <= loading.never_s <= STARTUP_S + SLACK_S
    report.bars.append(Bar("one that never ends is ended when it should be", ended))


def _report_prefill(report: Report, outcome: Outcome) -> None:
    report.rows.append(["long prefill", "", outcome.prefill_s, "", ""])
    failed = sum(outcome.failed_in_prefill.values())
    what = f"a prefill of {outcome.prefill_s:.0f} s fails no probe of {outcome.patience_s:.0f} s"
    well = not failed and outcome.prefill_s > 2 * outcome.patience_s
    report.bars.append(Bar(what, well, f"{failed} failed"))


def run(settings: Settings) -> None:
    """Measure and report."""
    with tempfile.TemporaryDirectory() as directory:
        loading, outcome = asyncio.run(measure(settings, Path(directory)))
    report = report_of(settings, loading, outcome)
    report.print()
    report.exit(enforce=settings.bar)
