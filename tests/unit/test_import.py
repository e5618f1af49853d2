"""What `import outrider` gives and what it costs."""

import subprocess
import sys

import pytest

import outrider


def test_public_names() -> None:
    assert sorted(outrider.__all__) == [
        "AsyncClient",
        "Chunk",
        "Client",
        "Completion",
        "OutriderError",
        "Piece",
        "Tls",
        "__version__",
    ]
    assert all(hasattr(outrider, name) for name in outrider.__all__)


@pytest.mark.parametrize(
    "module", ["outrider", "outrider.cli", "outrider.local.stack", "outrider.model.tokenizers"]
)
def test_importing_loads_nothing_heavy(module: str) -> None:
    code = (
        f"import sys, {module}; "
        "print([m for m in ('torch', 'redis', 'transformers', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
