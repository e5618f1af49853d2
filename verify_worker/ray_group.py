"""The ranks of a verify worker as Ray actors: with `ray_actors` the only place that calls Ray.

One placement group has room for all ranks. Rank 0 is the worker's own process; an actor that
does nothing holds its place. The others are actors that join the group of `outrider.model.parallel`
and stay in it: no step goes through Ray. When one ends or stands still the placement group is
removed, which ends all of them, and a new one is made.
"""

import os
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import ray
import torch
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from outrider import logs
from outrider.errors import ConfigError, RankLostError
from verify_worker.ranks import RankJob
from verify_worker.ray_actors import HoldingActor, RankActor, Seat

PACK, SPREAD = "pack", "spread"
STRATEGIES = {PACK: "STRICT_PACK", SPREAD: "SPREAD"}
# A local Ray stores no objects to speak of; this is about the least that it takes.
_STORE_BYTES = 128 * 2**20
# How long is waited for what Ray knows of a rank that is lost.
_CAUSE_S = 1.0
_CONNECT_S = 5.0
# How often it is seen whether further nodes have joined.
_LOOK_S = 0.25
_NODE_LABEL = "ray.io/node-id"
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Which Ray, and what is asked of it.

    `address` "" starts one on this machine, which ends with this process. Every rank is given
    one GPU if `cuda`, else `cpus`, and has so many threads. `start_s` bounds every start.
    """

    size: int
    address: str = ""
    strategy: str = PACK
    cuda: bool = False
    cpus: int = 1
    start_s: float = 120.0

    @property
    def resources(self) -> dict[str, float]:
        """Of one rank."""
        return {"GPU": 1.0} if self.cuda else {"CPU": float(self.cpus)}


class RayRanks:
    """The placement group and its actors; `close` ends them, and a Ray that was started here.

    Methods block, none is for the event loop. All raise RankLostError when Ray does not answer
    or loses an actor, with what Ray says of it.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._log = logs.get(__name__)
        self._group: Any = None
        self._actors: list[Any] = []
        self._running: dict[Any, int] = {}
        self._seats: tuple[Seat, ...] = ()

    @classmethod
    def connect(cls, cluster: Cluster) -> Self:
        """Connect to Ray, or start it on this machine.

        Raises:
            ConfigError: there is no Ray at the address, or it can't be started.
        """
        local = {
            "address": "local",
            "num_cpus": cluster.size * cluster.cpus,
            "object_store_memory": _STORE_BYTES,
            "include_dashboard": False,
            # Workers that yield to everything else, as Ray has them, would start slowly.
            "_system_config": {"worker_niceness": 0},
        }
        if cluster.address:
            _check_listening(cluster.address)
        # A Ray that is nobody else's reports to nobody; it inherits this.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        try:
            ray.init(
                **({"address": cluster.address} if cluster.address else local),
                log_to_driver=False,
                configure_logging=False,
            )
        except Exception as error:
            where = f"at {cluster.address}" if cluster.address else "on this machine"
            raise ConfigError(f"no Ray {where}: {_first_line(error)}") from error
        return cls(cluster)

    @property
    def address(self) -> str:
        """Where other ranks reach this process."""
        address: str = ray.util.get_node_ip_address()
        return address

    @property
    def threads(self) -> int:
        """Threads of torch of each rank; 0 leaves it to torch."""
        return 0 if self._cluster.cuda else self._cluster.cpus

    def place(self) -> torch.device:
        """Give every rank a place; rank 0's is on this host, and its device is returned.

        Raises:
            ConfigError: there are too few resources, with the figures.
        """
        cluster = self._cluster
        until_s = time.monotonic() + cluster.start_s
        self._await_resources(until_s)
        here = ray.get_runtime_context().get_node_id()
        self._group = placement_group(
            [cluster.resources] * cluster.size,
            strategy=STRATEGIES[cluster.strategy],
            bundle_label_selector=[{_NODE_LABEL: here}, *({} for _ in range(cluster.size - 1))],
        )
        if not self._group.wait(max(until_s - time.monotonic(), _LOOK_S)):
            self.clear()
            self._check_resources()  # a node may have gone meanwhile
            raise ConfigError(
                f"no room for {self._wanted} within {cluster.start_s:g} s: others have what is "
                f"there ({_figures(ray.available_resources())} free)"
            )
        self._actors = [self._actor(rank) for rank in range(cluster.size)]
        seats = self._ask(lambda: [actor.seat.remote(cuda=cluster.cuda) for actor in self._actors])
        self._seats = tuple(seats)
        for rank, seat in enumerate(self._seats):
            pid = os.getpid() if rank == 0 else seat.pid
            self._log.info("rank placed", rank=rank, host=seat.host, node=seat.node_id, pid=pid)
        return device_of(self._seats[0], self._cluster.cuda)

    def run(self, job: RankJob) -> None:
        """Have all ranks but 0 join and follow."""
        self._running = {
            actor.run.remote(job, rank): rank for rank, actor in enumerate(self._actors) if rank > 0
        }

    def ended(self) -> bool:
        """Whether one of the others has ended, or all were `clear`ed; does not wait for it."""
        refs = list(self._running)
        try:
            return not refs or bool(ray.wait(refs, num_returns=1, timeout=0)[0])
        except Exception:
            return True  # Ray itself is gone, and they with it

    def loss(self) -> str:
        """Which ranks have ended and why, as far as Ray knows within a few seconds."""
        refs = list(self._running)
        found: dict[int, str] = {}
        with suppress(Exception):
            ended, _ = ray.wait(refs, num_returns=1, timeout=_CAUSE_S)
            ended, _ = ray.wait(refs, num_returns=len(refs), timeout=0.2)
            for ref in ended:
                found[self._running[ref]] = _cause(ref)
        # Ranks that only lost another one tell nothing.
        causes = {r: why for r, why in found.items() if RankLostError.__name__ not in why} or found
        if not causes:
            return "no rank has ended, so that one stands still"
        return "; ".join(f"rank {rank}: {why}" for rank, why in sorted(causes.items()))

    def clear(self) -> None:
        """End all ranks, also those that stand still."""
        self._running, self._actors, self._seats = {}, [], ()
        if self._group is not None:
            with suppress(Exception):  # Ray itself is gone, and they with it
                remove_placement_group(self._group)
            self._group = None

    def close(self) -> None:
        """End all ranks and leave Ray."""
        self.clear()
        ray.shutdown()

    @property
    def _wanted(self) -> str:
        cluster = self._cluster
        where = "on this host" if cluster.strategy == PACK else "on the cluster"
        return f"{cluster.size} ranks of {_figures(cluster.resources)} each {where}"

    def _actor(self, rank: int) -> Any:
        resources = self._cluster.resources
        options = {
            "num_cpus": resources.get("CPU", 0),
            "num_gpus": resources.get("GPU", 0),
            "max_restarts": 0,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(self._group, rank),
        }
        kind = RankActor if rank else HoldingActor
        return ray.remote(kind).options(**options).remote()

    def _await_resources(self, until_s: float) -> None:
        """Refuse what can't be: at once, or where nodes may still join, at `until_s`."""
        cluster, said = self._cluster, False
        while True:
            try:
                return self._check_resources()
            except ConfigError as error:
                may_come = cluster.address and cluster.strategy == SPREAD
                if not may_come or time.monotonic() >= until_s:
                    raise
                if not said:
                    self._log.info("waiting for nodes", missing=error.message)
                said = True
            time.sleep(_LOOK_S)

    def _check_resources(self) -> None:
        """Refuse what can't be with the nodes that are there."""
        (name, each), *_ = self._cluster.resources.items()
        nodes = [node for node in ray.nodes() if node["Alive"]]
        here = ray.get_runtime_context().get_node_id()
        room = {node["NodeID"]: int(node["Resources"].get(name, 0) // each) for node in nodes}
        total = room[here] if self._cluster.strategy == PACK else sum(room.values())
        if total < self._cluster.size or not room[here]:
            places = ", ".join(
                f"{node['NodeManagerAddress']}{' (this host)' * (node['NodeID'] == here)}: "
                f"{node['Resources'].get(name, 0):g} {name}"
                for node in nodes
            )
            raise ConfigError(f"too few resources for {self._wanted}: {places}")

    def _ask(self, call: Callable[[], Sequence[Any]]) -> list[Any]:
        try:
            answers: list[Any] = ray.get(call(), timeout=self._cluster.start_s)
        except Exception as error:
            raise RankLostError(f"a rank did not start: {_first_line(error)}") from error
        return answers


def device_of(seat: Seat, cuda: bool) -> torch.device:
    """The device of a place, as this process numbers it.

    Raises:
        ConfigError: this process does not see that device.
    """
    if not cuda:
        return torch.device("cpu")
    for index in range(torch.cuda.device_count()):
        if str(torch.cuda.get_device_properties(index).uuid) == seat.gpu:
            return torch.device("cuda", index)
    raise ConfigError(f"Ray gave rank 0 the GPU {seat.gpu}, which this process does not see")


def _check_listening(address: str) -> None:
    """Ray itself would try for minutes."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdecimal():
        raise ConfigError(f"--ray-address {address!r} is not HOST:PORT")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()
    except OSError as error:
        raise ConfigError(f"no Ray at {address}: {error}") from error


def _cause(ref: Any) -> str:
    try:
        return f"ended after {ray.get(ref)} steps"
    except Exception as error:
        return _first_line(error)


def _first_line(error: Exception) -> str:
    """What happened; Ray puts whole traces into its messages."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, Exception):
        return f"{type(cause).__name__}: {cause}"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = [line for line in lines if "exit detail" in line or "exit type" in line]
    return f"{type(error).__name__}: {(told or lines or [''])[0][:300]}"


def _figures(resources: dict[str, float]) -> str:
    kept = {name: value for name, value in resources.items() if name in ("CPU", "GPU")}
    return ", ".join(f"{value:g} {name}" for name, value in kept.items()) or "nothing"
