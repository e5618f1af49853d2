"""Sizes in bytes as people write them, and how much memory this process may still take."""

import re
from pathlib import Path

from outrider.errors import ConfigError

_UNITS = {
    "": 1, "b": 1,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
}  # fmt: skip
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)", re.IGNORECASE)
# What a kernel reports where no limit is set (cgroup v1 rounds 2^63 down to a page).
_UNLIMITED = 2**62


def parse_bytes(text: str) -> int:
    """Bytes from a size such as 512MiB, 4GiB, 1.5 GB or 1048576.

    Raises:
        ConfigError: it is no size above 0.
    """
    match = _SIZE.fullmatch(text.strip())
    scale = _UNITS.get(match[2].lower()) if match else None
    size = int(float(match[1]) * scale) if match and scale else 0
    if size <= 0:
        raise ConfigError(f"{text!r} is not a size in bytes, such as 512MiB or 4GiB")
    return size


def format_bytes(size: float) -> str:
    """A size in the largest binary unit that it fills: 1.5 GiB."""
    for unit in ("GiB", "MiB", "KiB"):
        if size >= _UNITS[unit.lower()]:
            return f"{size / _UNITS[unit.lower()]:.1f} {unit}"
    return f"{size:.0f} B"


def available_bytes(root: Path = Path("/")) -> int:
    """Bytes that this process can take before the machine or its cgroups run out (Linux).

    The least of `MemAvailable` and, for every cgroup (v1 or v2) that the process is in, of its
    limit less what it holds and can't drop. `root` is where `proc` and `sys` are.

    Raises:
        ConfigError: this system does not say.
    """
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError as error:
        raise ConfigError("this system does not tell its free memory; name a size") from error
    found = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    if not found:
        raise ConfigError("this system does not tell its free memory; name a size")
    return max(min([*found, *_cgroup_rooms(root)]), 0)


def _cgroup_rooms(root: Path) -> list[int]:
    """What each cgroup that has a limit still has room for."""
    try:
        entries = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    rooms: list[int] = []
    for entry in entries:
        number, controllers, path = entry.split(":", 2)
        if number == "0":
            mount, limit, usage = "sys/fs/cgroup", "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            mount, limit = "sys/fs/cgroup/memory", "memory.limit_in_bytes"
            usage = "memory.usage_in_bytes"
        else:
            continue
        top = root / mount
        group = top / path.lstrip("/")
        # Inside a container the path can be one of the host's: the mount is then the group.
        for directory in (group, *group.parents):
            if not directory.is_relative_to(top):
                break
            room = _room(directory, limit, usage)
            if room is not None:
                rooms.append(room)
    return rooms


def _room(directory: Path, limit_file: str, usage_file: str) -> int | None:
    try:
        limit = (directory / limit_file).read_text().strip()
        usage = int((directory / usage_file).read_text())
        if limit == "max" or int(limit) >= _UNLIMITED:
            return None
        stat = (directory / "memory.stat").read_text().split()
    except (OSError, ValueError):
        return None
    # Clean file pages are given up before anything is killed.
    figures = dict(zip(stat[::2], stat[1::2], strict=False))
    droppable = int(figures.get("total_inactive_file", figures.get("inactive_file", 0)))
    return int(limit) - usage + droppable
