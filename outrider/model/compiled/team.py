"""The threads that run a step: those of torch's own OpenMP runtime.

A second pool of threads would take turns with torch's, each waiting in a busy loop while the
other works. So a step runs as an OpenMP parallel region of the runtime that torch has loaded,
through the functions that compilers call (the GNU ABI, which other runtimes offer as well).
"""

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch

_RUNTIMES = ("libgomp*", "libiomp5*", "libomp*")


@dataclass(frozen=True, slots=True)
class Team:
    """Runs C functions in several threads; the rest are addresses of `f(void)` for their code.

    `barrier` waits for all threads of the region, `thread_index` and `team_size` are ints.
    """

    barrier: int
    thread_index: int
    team_size: int
    _parallel: Any

    @classmethod
    def of_torch(cls) -> Self | None:
        """The team of the runtime that torch uses; None where there is none that is known."""
        for path in _libraries():
            library = ctypes.CDLL(str(path))
            try:
                parallel = library.GOMP_parallel
                barrier, index, size = (
                    ctypes.cast(function, ctypes.c_void_p).value or 0
                    for function in (
                        library.GOMP_barrier,
                        library.omp_get_thread_num,
                        library.omp_get_num_threads,
                    )
                )
            except AttributeError:
                continue
            parallel.argtypes = [
                ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint,
            ]  # fmt: skip
            parallel.restype = None
            return cls(barrier, index, size, parallel)
        return None

    def run(self, function: int, argument: int) -> None:
        """Call the C function at an address with `argument` in as many threads as torch uses."""
        self._parallel(function, argument, torch.get_num_threads(), 0)


def _libraries() -> Iterator[Path]:
    """OpenMP runtimes that came with torch."""
    package = Path(torch.__file__).parent
    for folder in (package / "lib", package.parent / "torch.libs"):
        for pattern in _RUNTIMES:
            yield from sorted(folder.glob(pattern))
