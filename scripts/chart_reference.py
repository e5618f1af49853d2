"""Keep what repeats the chart's values and the services' settings true to them.

    docs/kubernetes-values.md        from k8s/outrider/values.yaml and its comments
    k8s/outrider/values.schema.json  its `…Flags` definitions, from the services' settings
    k8s/outrider/files/users.acl     the Redis users, as `outrider redis-acl` prints them

`--check` changes nothing and exits with 1 when something is out of date.
"""

import dataclasses
import json
import sys
import typing
from pathlib import Path
from typing import Any

import yaml

import coordinator.config
import draft_worker.config
import verify_worker.config
from outrider.session.acl import RIGHTS, acl_line

ROOT = Path(__file__).resolve().parent.parent
CHART = ROOT / "k8s" / "outrider"
USERS = CHART / "files" / "users.acl"
REFERENCE = ROOT / "docs" / "kubernetes-values.md"
SETTINGS = {
    "coordinator": coordinator.config.Settings,
    "verify": verify_worker.config.Settings,
    "draft": draft_worker.config.Settings,
}
# Flags that the chart's templates give themselves.
OWNED = {
    "advertise-host",
    "draft-model",
    "draft-worker-name",
    "drafter",
    "drain-timeout-s",
    "group",
    "host",
    "log-level",
    "metrics-port",
    "model",
    "otlp-endpoint",
    "port",
    "redis-ca",
    "redis-cert",
    "redis-key",
    "redis-password-file",
    "redis-url",
    "served-name",
    "target",
    "tls-ca",
    "tls-cert",
    "tls-client-auth",
    "tls-key",
    "tokens",
    "verify-worker-name",
    "worker-id",
}
HEAD = """# Values of the Helm chart

Generated from `k8s/outrider/values.yaml` by `python scripts/chart_reference.py`. How to use
them is in [kubernetes.md](kubernetes.md).

| value | default | meaning |
|---|---|---|
"""


def flag_schema(settings: type[Any]) -> dict[str, Any]:
    """The JSON schema of a map from flags of a service to their values."""
    hints = typing.get_type_hints(settings)
    flags = {
        name: _value_schema(hints[field.name], field.metadata)
        for field in dataclasses.fields(settings)
        if (name := field.name.replace("_", "-")) not in OWNED
    }
    return {"type": "object", "additionalProperties": False, "properties": flags}


def _value_schema(hint: Any, metadata: Any) -> dict[str, Any]:
    if typing.get_origin(hint) is tuple:
        return {"type": "array", "items": {"type": "string"}}
    if metadata["choices"]:
        return {"enum": list(metadata["choices"])}
    names = {bool: "boolean", int: "integer", float: "number"}
    schema: dict[str, Any] = {"type": names.get(hint, "string")}
    for bound, word in (("at_least", "minimum"), ("at_most", "maximum")):
        if metadata[bound] is not None:
            schema[word] = metadata[bound]
    return schema


def schema_text() -> str:
    """values.schema.json as it should be."""
    schema = json.loads((CHART / "values.schema.json").read_text())
    for part, settings in SETTINGS.items():
        schema["$defs"][f"{part}Flags"] = flag_schema(settings)
    return json.dumps(schema, indent=2) + "\n"


def documented(text: str) -> list[tuple[str, str, str]]:
    """Every value of values.yaml that has a comment: path, default, meaning."""
    rows: list[tuple[str, str, str]] = []
    path: list[tuple[int, str]] = []
    comment: list[str] = []
    values = yaml.safe_load(text)
    within: int | None = None  # the indent of a documented value with lines of its own
    for line in text.splitlines():
        stripped = line.strip()
        indent = len(line) - len(line.lstrip())
        if within is not None and stripped and (indent > within or stripped.startswith("- ")):
            continue
        within = None
        if not stripped:
            comment = []
        elif stripped.startswith("#"):
            comment.append(stripped.lstrip("# "))
        else:
            key, _, value = stripped.partition(":")
            path = [(depth, name) for depth, name in path if depth < indent] + [(indent, key)]
            dotted, said = ".".join(name for _, name in path), " ".join(comment)
            comment = []
            if value.strip():
                rows.append((dotted, value.strip(), said))
            elif said and key not in PARENTS:
                within = indent
                found = values
                for _, name in path:
                    found = found[name]
                rows.append((dotted, json.dumps(found), said))
            elif said:
                rows.append((dotted, "", said))
    return rows


# Values with a comment of their own and documented values below.
PARENTS = {"models"}


def reference_text() -> str:
    """docs/kubernetes-values.md as it should be."""
    rows = documented((CHART / "values.yaml").read_text())
    body = "".join(
        f"| `{path}` | {f'`{_cell(default)}`' if default else ''} | {_cell(meaning)} |\n"
        for path, default, meaning in rows
    )
    return HEAD + body


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def users_text() -> str:
    """files/users.acl as it should be."""
    return "".join(f"{acl_line(part)}\n" for part in RIGHTS)


def main() -> None:
    """Write all of them, or with --check say which is out of date."""
    wanted = {
        CHART / "values.schema.json": schema_text(),
        REFERENCE: reference_text(),
        USERS: users_text(),
    }
    stale = [path for path, text in wanted.items() if not path.exists() or path.read_text() != text]
    for path in stale:
        if "--check" in sys.argv:
            print(f"{path.relative_to(ROOT)} is out of date; python scripts/chart_reference.py")
        else:
            path.write_text(wanted[path])
    sys.exit(1 if stale and "--check" in sys.argv else 0)


if __name__ == "__main__":
    main()
