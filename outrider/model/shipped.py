"""The draft model that comes with Outrider, for its embedded model; see its README.md."""

from pathlib import Path

from outrider.model.embedded import EMBEDDED_MODEL

SHIPPED_DRAFT = f"{EMBEDDED_MODEL}-draft"


def shipped_draft() -> Path:
    """Its directory."""
    return Path(__file__).parent / SHIPPED_DRAFT
