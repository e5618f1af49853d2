"""What Prometheus would say of a counter: pages read now and then, and the rate between them."""

import asyncio
import urllib.request
from collections import deque
from collections.abc import Sequence


async def read_counters(port: int, names: Sequence[str]) -> dict[str, float]:
    """The sum of each metric on the Prometheus page at 127.0.0.1:port, over its labels."""
    page = await asyncio.to_thread(_read, port)
    found = dict.fromkeys(names, 0.0)
    for line in page.splitlines():
        name = line.partition("{")[0].partition(" ")[0]
        if name in found:
            found[name] += float(line.rpartition(" ")[2])
    return found


def _read(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as reply:
        body: bytes = reply.read()
    return body.decode()


class Rate:
    """The rate of a counter over the last `window_s`, as `rate(…[window])`."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._samples: deque[tuple[float, float]] = deque()

    def add(self, now_s: float, value: float) -> float:
        """One more sample; the increase a second since the oldest one in the window."""
        self._samples.append((now_s, value))
        while now_s - self._samples[0][0] > self._window_s:
            self._samples.popleft()
        first_s, first = self._samples[0]
        return (value - first) / (now_s - first_s) if now_s > first_s else 0.0
