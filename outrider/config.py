"""Settings: one frozen dataclass a command, read once from flags and the environment.

A field declared with `setting` becomes the flag `--field-name` and the environment variable
`OUTRIDER_FIELD_NAME`; the flag wins. Unknown flags and bad values are refused by name.
Nothing else in Outrider reads the environment.
"""

import dataclasses
import math
import os
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import click

from outrider.errors import ConfigError

S = TypeVar("S")
ENV_PREFIX = "OUTRIDER"
CACHE = "~/.cache/outrider"
REQUIRED: Any = dataclasses.MISSING


def setting(
    default: Any = REQUIRED,
    *,
    help: str,  # noqa: A002 - the word that click and argparse use
    choices: Sequence[str] | None = None,
    at_least: float | None = None,
    at_most: float | None = None,
    argument: bool = False,
    many: bool = False,
    env: bool = True,
    secret: bool = False,
) -> Any:
    """Declare a field of a settings class.

    `at_least` and `at_most` bound numbers. `argument` makes it positional instead of a flag.
    `many` accepts the flag several times (the field is a tuple). Without `env` the environment
    does not set it: for what would be done by accident otherwise. A `secret` is never shown.
    """
    metadata = {
        "help": help,
        "choices": choices,
        "at_least": at_least,
        "at_most": at_most,
        "argument": argument,
        "many": many,
        "env": env,
    }
    return dataclasses.field(default=default, metadata=metadata, repr=not secret)


class _FiniteFloatRange(click.FloatRange):
    """Neither infinite nor NaN, which is within any bounds by comparison."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number", param, ctx)
        return number


def _plain_type(hint: Any) -> Any:
    """The type of a field's value: T for `T | None` and for `tuple[T, ...]`."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return next(arg for arg in typing.get_args(hint) if arg is not type(None))
    if typing.get_origin(hint) is tuple:
        return typing.get_args(hint)[0]
    return hint


def _click_type(kind: Any, metadata: Mapping[str, Any]) -> "click.ParamType[Any]":
    low, high = metadata["at_least"], metadata["at_most"]
    if metadata["choices"]:
        return click.Choice(list(metadata["choices"]))
    if kind is int:
        return click.IntRange(low, high)
    if kind is float:
        return _FiniteFloatRange(low, high)
    return click.BOOL if kind is bool else click.STRING


def _parameter(field: dataclasses.Field[Any], hint: Any) -> click.Parameter:
    metadata = field.metadata
    kind = _plain_type(hint)
    required = field.default is dataclasses.MISSING
    # A default of None would count as given, and nothing would be required.
    default: dict[str, Any] = {} if required else {"default": field.default}
    value_type = _click_type(kind, metadata)
    if metadata["argument"]:
        return click.Argument([field.name], type=value_type, required=required, **default)
    flag = field.name.replace("_", "-")
    names = [f"--{flag}/--no-{flag}"] if kind is bool else [f"--{flag}"]
    return click.Option(
        [*names, field.name],
        type=None if kind is bool else value_type,
        required=required,
        **default,
        show_default=not required and field.default not in (None, "", ()),
        multiple=metadata["many"],
        help=metadata["help"],
        envvar=f"{ENV_PREFIX}_{field.name.upper()}" if metadata["env"] else None,
        show_envvar=metadata["env"],
    )


def command(settings: type[S], run: Callable[[S], None], *, name: str) -> click.Command:
    """A click command that builds `settings` and calls `run`; its help is run's docstring."""
    hints = typing.get_type_hints(settings)
    every = dataclasses.fields(settings)  # type: ignore[arg-type]  # S is a dataclass
    # What only this command has comes first in its help.
    fields = sorted(every, key=lambda field: field.name not in settings.__annotations__)
    params = [_parameter(field, hints[field.name]) for field in fields]

    def invoke(**values: Any) -> None:
        try:
            built = settings(**values)
        except ConfigError as error:
            raise click.UsageError(error.message) from error
        run(built)

    return click.Command(
        name,
        callback=invoke,
        params=params,
        help=run.__doc__,
        context_settings={"help_option_names": ["-h", "--help"]},
    )


def child_environment() -> dict[str, str]:
    """The environment for a child process: this one, less the settings of this command.

    A child gets its settings as flags; a variable that was meant for the parent (a port)
    would be wrong for it.
    """
    return {k: v for k, v in os.environ.items() if not k.startswith(f"{ENV_PREFIX}_")}


@contextmanager
def variables(values: Mapping[str, str]) -> Iterator[None]:
    """Within this the environment has these: for a library that has no other way to be set."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
