"""Becomes the command that it is given, and makes sure that it dies with its parent.

`python -I -S launcher.py PARENT_PID COMMAND [ARGUMENT]…`: asks the kernel (Linux; elsewhere
it does nothing) for SIGKILL when the parent ends, however it ends, then executes the command
in its own place. It imports nothing of Outrider, so that it costs a few milliseconds.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def launch(parent_pid: int, command: list[str]) -> None:
    """Become `command`; returns never."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it ended before we asked
        sys.exit(1)
    os.execvp(command[0], command)


if __name__ == "__main__":
    launch(int(sys.argv[1]), sys.argv[2:])
