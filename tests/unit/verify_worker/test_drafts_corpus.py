"""Whose outputs a session may be drafted from, as the draft worker is told."""

from outrider.messages import AssignDrafter, OpenDraft
from tests.support.scheduling import OTHER, Worker


def test_a_tenant_is_drafted_from_its_own_outputs_only() -> None:
    worker = Worker(corpus="model")
    tenants = {"a": "x", "b": "y", "c": "x", "d": "", "e": ""}
    for sid, tenant in tenants.items():
        worker.start(sid, tenant=tenant)
    opened = worker.commands(OpenDraft)
    assert [command.corpus for command in opened[2:]] == [opened[0].corpus, *["model/"] * 2]
    assert len({command.corpus for command in opened}) == 3
    # Nor is one with a name like the model's, at another model.
    other = Worker(corpus="mode")
    other.start(tenant="l")
    assert other.commands(OpenDraft)[0].corpus not in {command.corpus for command in opened}
    # Another draft worker is told the same.
    assign = AssignDrafter(session_id="a", epoch=1, drafter=OTHER)
    worker.take(worker.scheduler.drafts.assign(assign))
    assert worker.commands(OpenDraft)[-1].corpus == opened[0].corpus


def test_without_a_name_of_the_model_no_outputs_are_shared() -> None:
    worker = Worker(corpus="")
    worker.start(tenant="x")
    assert worker.commands(OpenDraft)[0].corpus == ""
