"""A Ray cluster of two nodes on this machine, and what happens to ranks that run there."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group


@dataclass(frozen=True, slots=True)
class Placed:
    """One rank, as its worker's log tells it."""

    rank: int
    node: str
    pid: int


@contextmanager
def two_nodes(*, spare: int = 0) -> Iterator[str]:
    """The address of a cluster of two nodes with one CPU each, and so many that are spare."""
    made: Any = Cluster
    node = {"num_cpus": 1, "object_store_memory": 80 * 2**20}
    head = {**node, "include_dashboard": False, "_system_config": {"worker_niceness": 0}}
    cluster = made(initialize_head=True, head_node_args=head)
    try:
        for _ in range(1 + spare):
            cluster.add_node(**node)
        cluster.wait_for_nodes()
        yield str(cluster.address)
    finally:
        cluster.shutdown()


@contextmanager
def all_taken(address: str) -> Iterator[None]:
    """Somebody else has both CPUs."""
    ray.init(address=address, log_to_driver=False, configure_logging=False)
    try:
        group = placement_group([{"CPU": 1.0}] * 2)
        assert group.wait(60)
        yield
    finally:
        ray.shutdown()


def events(log: Path, name: str) -> list[dict[str, Any]]:
    """The log lines of that event so far."""
    lines = [line for line in log.read_text().splitlines() if line.startswith("{")]
    return [entry for entry in map(json.loads, lines) if entry.get("event") == name]


def placed(log: Path) -> list[Placed]:
    """Where the ranks are now, in their order."""
    entries = events(log, "rank placed")
    last = max(i for i, entry in enumerate(entries) if entry["rank"] == 0)
    return [Placed(entry["rank"], entry["node"], entry["pid"]) for entry in entries[last:]]
