"""Becomes a command inside a network namespace, with a resolver of its own.

`python -I -S enter_namespace.py NAMESPACE RESOLV_CONF COMMAND [ARGUMENT]…`: NAMESPACE is a file
that stands for it; RESOLV_CONF is seen as /etc/resolv.conf by the command alone.
"""

import ctypes
import os
import sys

CLONE_NEWNS, CLONE_NEWNET = 0x00020000, 0x40000000
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 0x40000
RESOLV_CONF = "/etc/resolv.conf"


def enter(namespace: str, resolv_conf: str, command: list[str]) -> None:
    """Become `command`; returns never."""
    libc = ctypes.CDLL(None, use_errno=True)

    def call(name: str, *arguments: object) -> None:
        if getattr(libc, name)(*arguments):
            raise OSError(ctypes.get_errno(), name)

    call("setns", os.open(namespace, os.O_RDONLY | os.O_CLOEXEC), CLONE_NEWNET)
    call("unshare", CLONE_NEWNS)
    call("mount", b"none", b"/", None, MS_REC | MS_PRIVATE, None)
    where = os.path.realpath(RESOLV_CONF)
    call("mount", resolv_conf.encode(), where.encode(), None, MS_BIND, None)
    os.execvp(command[0], command)


if __name__ == "__main__":
    enter(sys.argv[1], sys.argv[2], sys.argv[3:])
