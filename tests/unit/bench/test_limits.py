"""The bytes of a checkpoint, and a rate of reading that is one."""

from pathlib import Path

from bench.limits import read_bandwidth, weight_bytes
from tests.support.models import save_model


def test_weight_bytes_are_those_of_the_files(tmp_path: Path) -> None:
    save_model(tmp_path)
    assert weight_bytes(str(tmp_path)) == (tmp_path / "model.safetensors").stat().st_size
    (tmp_path / "only").mkdir()
    file = tmp_path / "only" / "some.gguf"
    file.write_bytes(b"x" * 100)
    assert weight_bytes(str(file)) == weight_bytes(str(file.parent)) == 100


def test_a_buffer_is_read_at_some_rate() -> None:
    spread = read_bandwidth(1 << 22, repeats=3)
    assert spread.count == 3
    # Bytes, not kilobytes or seconds: no machine is outside of these.
    assert 1e6 < spread.low <= spread.median <= spread.high < 1e13
