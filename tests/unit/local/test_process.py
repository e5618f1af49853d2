"""Child processes end when they should, and never outlive their parent."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

from outrider.local.process import ChildProcess

DEADLINE_S = 30
SLEEP = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"]
IGNORES_SIGTERM = [
    sys.executable,
    "-c",
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    "print('up', flush=True); time.sleep(600)",
]


async def until_up(child: ChildProcess) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while True:
            if "up" in child.log_tail():
                return
            await asyncio.sleep(0.02)


async def test_output_goes_to_the_log_and_the_exit_code_is_kept(tmp_path: Path) -> None:
    code = "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)"
    child = await ChildProcess.start("one", [sys.executable, "-c", code], tmp_path / "log")
    assert await child.wait() == 3
    assert (child.running, child.exit_code) == (False, 3)
    assert sorted(child.log_tail().splitlines()) == ["err", "out"]
    assert child.log_tail(1) in ("err", "out")
    await child.stop(1.0)  # does nothing any more
    await child.kill()


async def test_stop_is_sigterm(tmp_path: Path) -> None:
    child = await ChildProcess.start("one", SLEEP, tmp_path / "log")
    await until_up(child)
    await child.stop(DEADLINE_S)
    assert child.exit_code == -signal.SIGTERM


async def test_stop_ends_in_sigkill(tmp_path: Path) -> None:
    child = await ChildProcess.start("one", IGNORES_SIGTERM, tmp_path / "log")
    await until_up(child)
    await child.stop(0.2)
    assert child.exit_code == -signal.SIGKILL


async def test_pid_is_that_of_the_command_in_a_session_of_its_own(tmp_path: Path) -> None:
    code = "import os; print('up', os.getpid(), os.getsid(0))"
    child = await ChildProcess.start("one", [sys.executable, "-c", code], tmp_path / "log")
    await child.wait()
    assert child.log_tail().split() == ["up", str(child.pid), str(child.pid)]


async def test_settings_of_the_parent_are_not_inherited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_PORT", "1")
    code = "import os; print([k for k in os.environ if k.startswith('OUTRIDER_')])"
    child = await ChildProcess.start("one", [sys.executable, "-c", code], tmp_path / "log")
    assert await child.wait() == 0
    assert child.log_tail() == "[]"


@pytest.mark.skipif(sys.platform != "linux", reason="needs PR_SET_PDEATHSIG")
def test_child_dies_with_a_killed_parent(tmp_path: Path) -> None:
    parent_code = f"""
        import asyncio
        from pathlib import Path
        from outrider.local.process import ChildProcess

        async def main():
            child = await ChildProcess.start("one", {SLEEP!r}, Path({str(tmp_path / "log")!r}))
            while "up" not in child.log_tail():
                await asyncio.sleep(0.02)
            print(child.pid, flush=True)
            await child.wait()

        asyncio.run(main())
    """
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(parent_code)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        child = psutil.Process(pid)
        assert child.is_running()
        os.kill(parent.pid, signal.SIGKILL)
        assert psutil.wait_procs([child], timeout=DEADLINE_S)[1] == []
    finally:
        parent.kill()
        parent.wait()
        if parent.stdout:
            parent.stdout.close()
