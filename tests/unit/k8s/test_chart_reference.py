"""Every value is documented, and what is generated from values and settings is up to date."""

import json
import re
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from outrider.cli.redis_acl import command
from scripts import chart_reference
from tests.support.chart import CHART, ROLES

VALUES = (CHART / "values.yaml").read_text()


def test_the_reference_is_up_to_date() -> None:
    assert chart_reference.REFERENCE.read_text() == chart_reference.reference_text()


def test_the_schema_has_the_flags_of_the_services() -> None:
    schema = CHART / "values.schema.json"
    assert schema.read_text() == chart_reference.schema_text()
    flags = json.loads(schema.read_text())["$defs"]["verifyFlags"]["properties"]
    assert flags["max-sessions"] == {"type": "integer", "minimum": 1}
    assert flags["dtype"]["enum"] == ["float32", "bfloat16", "float16"]
    assert "redis-url" not in flags


def test_the_users_of_redis_are_those_that_the_command_prints() -> None:
    printed = CliRunner().invoke(command, []).stdout
    assert printed == chart_reference.USERS.read_text() == chart_reference.users_text()


def leaves(values: dict[str, Any], path: str = "") -> list[str]:
    found = []
    for key, value in values.items():
        name = f"{path}{key}"
        whole = name.endswith((".behavior", ".strategy", "ashboards.labels", ".flags"))
        found += (
            leaves(value, f"{name}.") if isinstance(value, dict) and value and not whole else [name]
        )
    return found


def test_every_value_has_a_meaning() -> None:
    documented = {path: meaning for path, _, meaning in chart_reference.documented(VALUES)}
    assert set(leaves(yaml.safe_load(VALUES))) <= set(documented)
    assert all(documented.values())


@pytest.mark.parametrize("name", ["kubernetes.md"])
def test_values_named_in_the_docs_exist(name: str) -> None:
    text = (chart_reference.ROOT / "docs" / name).read_text()
    known = {path for path, _, _ in chart_reference.documented(VALUES)}
    # Keys of Secrets, and names in certificates.
    known |= {"tls.crt", "tls.key", *ROLES.values()}
    known |= {path.rpartition(".")[0] for path in known}
    parts = (
        "coordinator|verify|draft|tls|auth|redis|telemetry|monitoring|scaling|networkPolicy|ingress"
        "|route"
    )
    for path in re.findall(rf"`((?:{parts})\.[A-Za-z.]+)`", text):
        assert path in known
