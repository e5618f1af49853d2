"""What counts as a checkpoint."""

from pathlib import Path

import pytest

from outrider.errors import ConfigError
from outrider.model.describe import locate_checkpoint


def test_a_directory_with_one_gguf_file_stands_for_the_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no model at"):
        locate_checkpoint(str(tmp_path))
    file = tmp_path / "a.gguf"
    file.touch()
    assert locate_checkpoint(str(file)) == locate_checkpoint(str(tmp_path)) == file
    (tmp_path / "b.gguf").touch()
    with pytest.raises(ConfigError, match=r"2 \.gguf files, name one"):
        locate_checkpoint(str(tmp_path))
    (tmp_path / "config.json").touch()
    assert locate_checkpoint(str(tmp_path)) == tmp_path
