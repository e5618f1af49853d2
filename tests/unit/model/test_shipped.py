"""The draft model that comes with Outrider is whole, small, and says where it comes from."""

import hashlib
import json

from safetensors import safe_open

from outrider.model.draft_config import read_draft_config
from outrider.model.shipped import shipped_draft

MOST_BYTES = 16 * 1024 * 1024


def test_it_fits_in_16_mb() -> None:
    assert sum(file.stat().st_size for file in shipped_draft().iterdir()) < MOST_BYTES


def test_it_is_a_drafter_for_the_embedded_model() -> None:
    draft = read_draft_config(str(shipped_draft()))
    assert draft is not None
    assert draft.target == "smollm2-135m-instruct"
    assert (draft.target_hidden, draft.target_layers) == (576, 30)
    assert draft.reads_hidden
    with safe_open(shipped_draft() / "model.safetensors", "pt") as weights:
        assert {"d2t", "t2d", "fuse.weight"} <= set(weights.keys())
        assert weights.get_slice("t2d").get_shape() == [49152]


def test_its_report_shows_that_it_learned() -> None:
    report = json.loads((shipped_draft() / "report.json").read_text())
    losses, looks = report["losses"], report["looks"]
    assert len(losses) == report["about"]["steps"]
    assert sum(losses[-100:]) < 0.5 * sum(losses[:100])
    assert looks[-1][1] > looks[0][1] + 0.3
    card = (shipped_draft() / "README.md").read_text()
    assert report["about"]["command"] in card
    assert report["about"]["texts_sha256"] in card


def test_its_weights_are_those_that_the_docs_name() -> None:
    digest = hashlib.sha256((shipped_draft() / "model.safetensors").read_bytes()).hexdigest()
    docs = shipped_draft().parents[2] / "docs" / "training.md"
    assert digest in docs.read_text()
