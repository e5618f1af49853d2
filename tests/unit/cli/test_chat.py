"""`outrider chat` against a scripted coordinator."""

from collections.abc import Iterator

import pytest
from click.testing import CliRunner, Result

from outrider.cli import chat, main
from outrider.cli.display import write_chunk
from outrider.client import Chunk
from outrider.errors import InvalidRequestError
from tests.support.fake_coordinator import (
    SCRIPT,
    FakeCoordinator,
    serving_in_thread,
    started,
)


@pytest.fixture
def fake() -> Iterator[FakeCoordinator]:
    with serving_in_thread(SCRIPT) as coordinator:
        yield coordinator


def talk(fake: FakeCoordinator, typed: str, *arguments: str) -> Result:
    command = ["chat", "--coordinator", fake.address, *arguments]
    return CliRunner().invoke(main, command, input=typed)


def said(fake: FakeCoordinator, index: int) -> list[tuple[str, str]]:
    return [(m.role, m.content) for m in fake.requests[index].messages.messages]


def test_the_conversation_is_kept_until_reset(fake: FakeCoordinator) -> None:
    result = talk(fake, "one\n\ntwo\n/reset\nthree\n/quit\nnever\n", "--system", "Be brief.")
    assert result.exit_code == 0
    assert result.stdout.count("Hello w!") == 3
    system = ("system", "Be brief.")
    assert said(fake, 0) == [system, ("user", "one")]
    assert said(fake, 1) == [
        system, ("user", "one"), ("assistant", "Hello w!"), ("user", "two"),
    ]  # fmt: skip
    assert said(fake, 2) == [system, ("user", "three")]
    assert len(fake.requests) == 3


def test_end_of_input_leaves(fake: FakeCoordinator) -> None:
    result = talk(fake, "one")
    assert result.exit_code == 0
    assert len(fake.requests) == 1


def test_a_refused_message_is_forgotten_and_the_chat_goes_on(fake: FakeCoordinator) -> None:
    fake.script = [started(), InvalidRequestError("the prompt is too long")]
    result = talk(fake, "one\ntwo\n")
    assert result.exit_code == 0
    assert "outrider: the prompt is too long" in result.stderr
    assert said(fake, 1) == [("user", "two")]


def test_ctrl_c_ends_the_answer_only(
    fake: FakeCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted: list[str] = []

    def write(chunk: Chunk, *, color: bool) -> None:
        write_chunk(chunk, color=color)
        if not interrupted:
            interrupted.append(chunk.text)
            raise KeyboardInterrupt

    monkeypatch.setattr(chat, "write_chunk", write)
    result = talk(fake, "one\ntwo\n")
    assert result.exit_code == 0
    assert interrupted == ["Hel"]
    assert said(fake, 1) == [("user", "one"), ("assistant", "Hel"), ("user", "two")]
    assert "Hello w!" in result.stdout


def test_nothing_listening() -> None:
    result = CliRunner().invoke(main, ["chat", "--coordinator", "127.0.0.1:1"], input="one\n")
    assert result.exit_code == 1
    assert "outrider up" in result.stderr
