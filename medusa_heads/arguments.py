"""Options that take a list: what --help says of one that is empty by default; refused where one is given twice."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, get_origin, get_type_hints

import tyro

OPTIONAL = tyro.conf.arg(help_behavior_hint="(optional)")  # annotates a list that is empty by default: tyro's hint would be "(default: )"


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
