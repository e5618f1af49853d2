"""The connection of the ranks of one model: with `nccl` all that calls torch.distributed.

Messages go over plain connections (`wires`), reports over gloo; tensors over NCCL on CUDA devices,
over gloo otherwise. A rank that is
killed closes its connections, and whatever waits for it fails at once; one that stands still
makes it fail after a time limit. Ranks that lost one another can't know who is how far, so a
group that failed once stays failed.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Self, TypeVar

import torch
from torch import distributed

from outrider.errors import RankLostError
from outrider.model.parallel import nccl
from outrider.model.parallel.watch import CudaQueue, Queue, Watch
from outrider.model.parallel.wires import Wires

T = TypeVar("T")
# Much of it has no type hints, or is only there where torch was built with it.
_DISTRIBUTED: Any = distributed

# What a rank can tell rank 0 of itself.
REPORT_BYTES = 4096
_LENGTH_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How long is waited for other ranks, in seconds.

    `start_s`: until all have joined, and until all have loaded. `step_s`: within a step, for the
    slowest rank. `idle_s`: how long rank 0 may say nothing; it says something each second.
    """

    start_s: float = 120.0
    step_s: float = 5.0
    idle_s: float = 60.0


class RankGroup:
    """One rank's side of the group; every rank makes the same calls in the same order.

    `queue` is the device's if tensors go over NCCL: sums and gathers return before they are done.

    Raises (all methods): RankLostError, when another rank is gone or stands still.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        control: Any,
        data: Any,
        device: torch.device,
        limits: Limits,
        wires: Wires | None = None,
        queue: Queue | None = None,
    ) -> None:
        self.rank = rank
        self.size = size
        self.device = device
        self._control = control
        self._data = data
        self._wires = wires
        self._watch = None if queue is None else Watch(queue, data.abort, limits.step_s)
        self._failed = ""
        self._start = timedelta(seconds=limits.start_s)
        self._step = timedelta(seconds=limits.step_s)
        self._idle = timedelta(seconds=limits.idle_s)
        # Of a sum or gather, for now.
        self._limit = self._step

    @classmethod
    def join(
        cls,
        store: Any,
        rank: int,
        size: int,
        *,
        address: str = "127.0.0.1",
        device: torch.device | None = None,
        limits: Limits | None = None,
    ) -> Self:
        """Meet the others at a store of torch.distributed; `address` is where they reach this rank.

        Raises:
            RankLostError: not all came in time.
        """
        device, limits = device or torch.device("cpu"), limits or Limits()
        start = timedelta(seconds=limits.start_s)
        store.set_timeout(start)
        try:
            control = _gloo(_DISTRIBUTED.PrefixStore("control", store), rank, size, address, start)
            data, queue = control, None
            if device.type == "cuda":
                torch.cuda.set_device(device)
                queue = CudaQueue(device)
                # Above all limits of ours: it is `watched` that finds out in time.
                most_s = limits.start_s + limits.step_s
                data_store = _DISTRIBUTED.PrefixStore("data", store)
                data = nccl.connect(data_store, rank, size, device, limits.start_s, most_s)
            wires = Wires.meet(store, rank, size, address, limits.start_s)
        except (RuntimeError, OSError) as error:
            raise RankLostError(
                f"rank {rank} of {size} did not meet all others within {limits.start_s:g} s: "
                f"{_first_line(error)}"
            ) from error
        return cls(rank, size, control, data, device, limits, wires, queue)

    def __del__(self) -> None:
        if self._watch is not None:
            self._watch.close()

    @property
    def failed(self) -> str:
        """Why the group can't be used any more, or nothing."""
        return self._failed

    def fail(self, reason: str) -> None:
        """From now on every call raises: this rank is out of step with the others.

        Its connections are closed, so that the others learn of it at once.
        """
        self._failed = self._failed or reason
        if self._watch is not None:
            # Else its kernels wait for the others for ever, and the device with them.
            self._watch.abort()
            self._watch.close()
        self._control = self._data = None
        if self._wires is not None:
            self._wires.close()

    # --- tensors ----------------------------------------------------------------------------

    def total(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' x, in its place, on every rank."""
        x = x.contiguous()
        options = _DISTRIBUTED.AllreduceOptions()
        self._bound(options)
        self._wait(lambda: self._data.allreduce([x], options))
        self._mark()
        return x

    def gather(self, x: torch.Tensor) -> list[torch.Tensor] | None:
        """Every rank's x, in the order of ranks, on rank 0; all are of one shape and type."""
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.size)] if self.rank == 0 else []
        options = _DISTRIBUTED.GatherOptions()
        options.rootRank = 0
        self._bound(options)
        self._wait(lambda: self._data.gather([parts] if parts else [], [x], options))
        self._mark()
        return parts or None

    @contextmanager
    def watched(self, *, starting: bool = False) -> Iterator[None]:
        """Within this the device may be waited for, in any way: that has an end if a rank is lost.

        On leaving it the device is done. On CUDA all of a step that needs other ranks has to be in
        one of these: a sum returns at once there, and its device stands still in place of it. More
        than `Limits.step_s` (`start_s` while `starting`, which all ranks have to be alike) at one
        sum or gather, on CUDA with the computing before it, is taken for a loss; see `Watch`.
        """
        before, self._limit = self._limit, self._start if starting else self._step
        try:
            if self._watch is None:
                yield  # sums and gathers have waited
            else:
                with self._over(self._watch, self._limit.total_seconds()):
                    yield
        finally:
            self._limit = before

    @contextmanager
    def _over(self, watch: Watch, limit_s: float) -> Iterator[None]:
        fault: Exception | None = None
        try:
            with watch.over(limit_s):
                yield
        except Exception as error:
            # What a device gives once its connection was given up may lead to anything.
            if not watch.expired:
                raise
            fault = error
        if watch.expired:
            self.fail(f"its device stood still for more than {limit_s:g} s")
            raise RankLostError(
                f"rank {self.rank} of {self.size} lost another one: {self._failed}"
            ) from fault

    # --- messages ---------------------------------------------------------------------------

    def send(self, message: bytes) -> None:
        """From rank 0 to all others; returns when it is on its way."""
        limit_s = self._step.total_seconds()
        self._guard(lambda: self._connected.send(message, limit_s))

    def receive(self, *, starting: bool = False) -> bytes:
        """The next message of rank 0, for which it has longer while `starting`."""
        limit_s = (self._start if starting else self._idle).total_seconds()
        return self._guard(lambda: self._connected.receive(limit_s))

    def collect(self, report: bytes) -> list[bytes] | None:
        """Every rank's report on rank 0, in the order of ranks; for when ranks start.

        Raises:
            ValueError: it is longer than REPORT_BYTES.
        """
        if len(report) > REPORT_BYTES:
            raise ValueError(f"a report of {len(report)} bytes")
        own = torch.zeros(REPORT_BYTES + _LENGTH_BYTES, dtype=torch.uint8)
        framed = len(report).to_bytes(_LENGTH_BYTES, "little") + report
        own[: len(framed)] = torch.frombuffer(bytearray(framed), dtype=torch.uint8)
        parts = [torch.empty_like(own) for _ in range(self.size)] if self.rank == 0 else []
        options = _DISTRIBUTED.GatherOptions()
        options.rootRank, options.timeout = 0, self._start
        self._wait(lambda: self._control.gather([parts] if parts else [], [own], options))
        return [_unframed(part.numpy().tobytes()) for part in parts] or None

    def meet(self, *, starting: bool = False) -> None:
        """Wait until every rank is here, for longer while `starting`."""
        options = _DISTRIBUTED.AllreduceOptions()
        options.timeout = self._start if starting else self._step
        here = torch.ones(1)
        self._wait(lambda: self._control.allreduce([here], options))

    @property
    def _connected(self) -> Wires:
        assert self._wires is not None, "this rank has joined"
        return self._wires

    def _bound(self, options: Any) -> None:
        # With a watch the time is that of the device, and not that since the call.
        if self._watch is None:
            options.timeout = self._limit

    def _mark(self) -> None:
        if self._watch is not None:
            self._watch.mark()

    def _wait(self, start: Callable[[], Any]) -> None:
        self._guard(lambda: start().wait())

    def _guard(self, call: Callable[[], T]) -> T:
        """What it gives; whatever goes wrong in it is the end of this group."""
        if self._failed:
            raise RankLostError(f"the ranks of this model are out of step: {self._failed}")
        try:
            return call()
        except (RuntimeError, OSError) as error:
            self.fail(_first_line(error))
            raise RankLostError(
                f"rank {self.rank} of {self.size} lost another one: {self._failed}"
            ) from error


def open_store(address: str, port: int, size: int, *, leads: bool, limits: Limits) -> Any:
    """Where ranks meet, over TCP: rank 0 `leads` and listens (0: on a free port, its `port`).

    Raises:
        RankLostError: there is nobody at the address in time, or the port is taken.
    """
    try:
        return _DISTRIBUTED.TCPStore(
            address,
            port,
            size,
            leads,
            timeout=timedelta(seconds=limits.start_s),
            wait_for_workers=False,
        )
    except RuntimeError as error:
        what = "can't listen" if leads else "found nobody"
        raise RankLostError(f"a rank {what} at {address}:{port}: {_first_line(error)}") from error


def _unframed(message: bytes) -> bytes:
    size = int.from_bytes(message[:_LENGTH_BYTES], "little")
    return message[_LENGTH_BYTES : _LENGTH_BYTES + size]


def _gloo(store: Any, rank: int, size: int, address: str, start: timedelta) -> Any:
    # Not through the global group of torch: it is one a process, and its checks cost as much
    # as a small sum.
    gloo = _DISTRIBUTED.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=address)]
    options._timeout, options._threads = start, 1
    return gloo(store, rank, size, options)


def _first_line(error: Exception) -> str:
    """What happened, without where in gloo's sources and without its advice."""
    text = (str(error).splitlines() or [type(error).__name__])[0]
    text = text.rsplit("] ", 1)[-1] if text.startswith("[/") else text
    return text.split(". This is typically")[0]
