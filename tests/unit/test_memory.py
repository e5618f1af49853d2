"""Sizes in words, and the memory that is left, in and out of cgroups."""

from pathlib import Path

import pytest

from outrider.errors import ConfigError
from outrider.memory import available_bytes, format_bytes, parse_bytes

GIB = 2**30


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("512MiB", 512 * 2**20),
        ("4GiB", 4 * GIB),
        ("1.5 gib", 3 * GIB // 2),
        ("2GB", 2_000_000_000),
        ("100 kb", 100_000),
        ("4096", 4096),
        ("1TiB", 2**40),
    ],
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "auto", "4 G", "-1GiB", "0", "0MiB", "GiB", "1e3", "nan"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a size"):
        parse_bytes(text)


def test_sizes_are_written_in_the_unit_they_fill() -> None:
    assert [format_bytes(size) for size in (12, 2048, 3 * 2**20, 1.5 * GIB)] == [
        "12 B",
        "2.0 KiB",
        "3.0 MiB",
        "1.5 GiB",
    ]


def machine(root: Path, files: dict[str, str]) -> Path:
    """A file system that says what `files` say, and that 8 GiB are free."""
    files = {"proc/meminfo": f"MemTotal: 9999 kB\nMemAvailable: {8 * 2**20} kB\n"} | files
    for name, text in files.items():
        where = root / name
        where.parent.mkdir(parents=True, exist_ok=True)
        where.write_text(text)
    return root


def test_without_cgroups_the_machine_decides(tmp_path: Path) -> None:
    assert available_bytes(machine(tmp_path, {})) == 8 * GIB


def test_the_limit_of_any_cgroup_above_counts(tmp_path: Path) -> None:
    group = "sys/fs/cgroup"
    root = machine(
        tmp_path,
        {
            "proc/self/cgroup": "0::/pod/box\n",
            f"{group}/pod/memory.max": f"{2 * GIB}\n",
            f"{group}/pod/memory.current": f"{GIB}\n",
            f"{group}/pod/memory.stat": f"anon 1\ninactive_file {GIB // 2}\n",
            f"{group}/pod/box/memory.max": "max\n",
            f"{group}/pod/box/memory.current": "0\n",
        },
    )
    # File pages that are not in use would be given up.
    assert available_bytes(root) == 3 * GIB // 2


def test_the_first_version_of_cgroups_counts_too(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/memory/docker/x"
    root = machine(
        tmp_path,
        {
            "proc/self/cgroup": "5:cpu,cpuacct:/docker/x\n4:memory:/docker/x\n0::/\n",
            f"{group}/memory.limit_in_bytes": f"{GIB}\n",
            f"{group}/memory.usage_in_bytes": f"{GIB // 4}\n",
            f"{group}/memory.stat": "total_inactive_file 0\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "1\n",
            "sys/fs/cgroup/memory/memory.stat": "total_inactive_file 0\n",
        },
    )
    assert available_bytes(root) == 3 * GIB // 4


def test_a_container_that_sees_its_group_as_the_root(tmp_path: Path) -> None:
    root = machine(
        tmp_path,
        {
            "proc/self/cgroup": "0::/../../host/path\n",
            "sys/fs/cgroup/memory.max": f"{GIB}\n",
            "sys/fs/cgroup/memory.current": "0\n",
            "sys/fs/cgroup/memory.stat": "inactive_file 0\n",
        },
    )
    assert available_bytes(root) == GIB


def test_a_system_that_does_not_tell_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="name a size"):
        available_bytes(tmp_path)


def test_this_machine_tells() -> None:
    assert available_bytes() > 2**20
