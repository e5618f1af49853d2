"""Peers are processes of their own: installed once, stopped when not asked, ended with us."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from bench.peers import Peer, PeerProcess, environment_dir, install
from outrider.errors import UnavailableError

SCRIPT = """
import json, os, sys
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
print("chatter that is no answer")
print(json.dumps({"version": "9.9"}), file=answers, flush=True)
for line in sys.stdin:
    command = json.loads(line)
    if command["new_tokens"] == 13:
        answer = {"error": "Unlucky: 13"}
    elif command["new_tokens"] == 14:
        sys.exit("gave up")
    else:
        said = [[ids[0]] * command["new_tokens"] for ids in command["prompts"]]
        answer = {"seconds": 0.5, "token_ids": said}
    print(json.dumps(answer), file=answers, flush=True)
"""
# Starts the peer and, once it is stopped, waits to be killed.
PARENT = """
import sys, time
from pathlib import Path
from bench.peers import Peer, PeerProcess
script, log = sys.argv[1:]
process = PeerProcess(Peer("p", "p", script, ""), Path(sys.executable), {}, log_path=Path(log))
with process:
    print(process._process.pid, flush=True)
    time.sleep(600)
"""


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline, "it never came to that"
        time.sleep(0.01)


def stopped(pid: int) -> bool:
    return psutil.Process(pid).status() == psutil.STATUS_STOPPED


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@pytest.fixture
def script(tmp_path: Path) -> str:
    file = tmp_path / "peer.py"
    file.write_text(SCRIPT)
    return str(file)


@pytest.fixture
def process(tmp_path: Path, script: str) -> Iterator[PeerProcess]:
    peer = Peer("made-up", "made-up==1", script, "no time")
    with PeerProcess(peer, Path(sys.executable), {}, log_path=tmp_path / "log") as running:
        yield running


def test_it_answers_whatever_else_it_prints(process: PeerProcess) -> None:
    assert process.version == "9.9"
    completed = process.complete([[4, 5], [6]], 3)
    assert completed.seconds == 0.5
    assert completed.token_ids == [[4, 4, 4], [6, 6, 6]]


def test_it_is_stopped_between_commands_and_gone_at_the_end(tmp_path: Path, script: str) -> None:
    peer = Peer("made-up", "made-up==1", script, "no time")
    before = set(psutil.Process().children())
    with PeerProcess(peer, Path(sys.executable), {}, log_path=tmp_path / "log") as running:
        (child,) = set(psutil.Process().children()) - before
        until(lambda: stopped(child.pid))
        running.complete([[1]], 1)
        until(lambda: stopped(child.pid))
    assert gone(child.pid)


def test_what_it_could_not_do_is_said(process: PeerProcess) -> None:
    with pytest.raises(UnavailableError, match="made-up: Unlucky: 13"):
        process.complete([[1]], 13)


def test_its_end_is_said_with_the_last_line_of_its_log(process: PeerProcess) -> None:
    with pytest.raises(UnavailableError, match="made-up ended: gave up"):
        process.complete([[1]], 14)


def test_a_stopped_peer_does_not_outlive_a_benchmark_that_is_killed(
    tmp_path: Path, script: str
) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, script, str(tmp_path / "log")],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[3],
    )
    assert parent.stdout is not None
    with parent.stdout as stdout:
        pid = int(stdout.readline())
    until(lambda: stopped(pid))
    try:
        parent.kill()
        parent.wait()
        until(lambda: gone(pid))
    finally:
        if not gone(pid):
            os.kill(pid, signal.SIGKILL)


def test_a_failed_installation_says_why_and_how_to_do_without(tmp_path: Path) -> None:
    peer = Peer("made-up", "made-up==1", "peer.py", "no time")
    with pytest.raises(UnavailableError, match=r"can't install made-up==1.*--without made-up"):
        install(peer, str(tmp_path), python="/bin/false")
    assert not (environment_dir(peer, str(tmp_path)) / "installed.json").exists()


def test_what_is_installed_is_not_installed_again_unless_it_should_be_another(
    tmp_path: Path,
) -> None:
    where = environment_dir(Peer("made-up", "", "", ""), str(tmp_path))
    where.mkdir(parents=True)
    (where / "installed.json").write_text('{"requirement": "made-up==1", "removed": []}')
    peer = Peer("made-up", "made-up==1", "peer.py", "no time")
    assert install(peer, str(tmp_path), python="/bin/false") == where / "bin" / "python"
    newer = Peer("made-up", "made-up==2", "peer.py", "no time")
    with pytest.raises(UnavailableError, match="made-up==2"):
        install(newer, str(tmp_path), python="/bin/false")
