"""What options of several commands share: lists that may be empty, lists given twice, sizes below 1."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, get_origin, get_type_hints

import tyro

OPTIONAL = tyro.conf.arg(help_behavior_hint="(optional)")  # annotates a list that is empty by default: tyro's hint would be "(default: )"


def require_positive(**options: int | None) -> None:
    """Raises ValueError naming the first of the options, by field name, that is below 1; None is not given."""
    for name, value in options.items():
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} {value}: must be at least 1")


def refuse_repeated_lists(command: type[Any], arguments: Sequence[str]) -> None:
    """Raises ValueError naming the option: the parser would keep the last list and drop the others.

    command: the dataclass that `arguments` are parsed into.
    """
    types = get_type_hints(command)
    given = [argument.partition("=")[0].replace("_", "-") for argument in arguments]
    for field in dataclasses.fields(command):
        flag = "--" + field.name.replace("_", "-")
        if get_origin(types[field.name]) in (list, tuple) and given.count(flag) > 1:
            raise ValueError(f"{flag} is given {given.count(flag)} times: give it once, with all its values behind it ({flag} A B)")
