"""`[--config FILE] [flags]` -> a command's options: a YAML file of options, and flags that win over it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import yaml

from medusa_heads.arguments import refuse_repeated_lists
from medusa_heads.suggest import unknown_keys_error

Command = TypeVar("Command")
SWITCH = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}  # YAML 1.1


class AsWritten(yaml.SafeLoader):
    """Reads text, lists and null, and leaves numbers and the like as they are written: a revision 0123 is not 83."""

    yaml_implicit_resolvers = {  # noqa: RUF012
        first: [(tag, pattern) for tag, pattern in known if tag.endswith((":null", ":merge"))]
        for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Raises yaml.YAMLError for a key that is given twice: the parser would keep the last and drop the others."""
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        if repeated := next((key for key in keys if keys.count(key) > 1), None):
            raise yaml.YAMLError(f"{repeated} is given twice")
        return super().construct_mapping(node, deep)


def parse_command(command: type[Command], argv: list[str], *, prog: str) -> Command:
    """command: a dataclass whose fields are the options. Flags win over the file wherever they stand.

    Raises ValueError when the file cannot be read or holds something else.
    """
    import tyro

    arguments = [part for argument in argv for part in (argument.split("=", 1) if argument.startswith("--config=") else [argument])]
    from_file: list[str] = []
    while "--config" in arguments:
        at = arguments.index("--config")
        if at + 1 == len(arguments):
            raise ValueError("--config needs a file name")
        from_file += yaml_arguments(command, arguments[at + 1])
        del arguments[at : at + 2]
    refuse_repeated_lists(command, arguments)
    return tyro.cli(command, args=from_file + arguments, prog=prog)


def yaml_arguments(command: type[Any], path: str | Path) -> list[str]:
    """A YAML file -> the command-line arguments it stands for.

    Raises ValueError on unknown keys, with a suggestion, and on anything but a flat mapping.
    """
    try:
        values = yaml.load(Path(path).read_text(), Loader=AsWritten)
    except FileNotFoundError:
        raise ValueError(f"--config {path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--config {path} cannot be read: {error}") from None
    except (yaml.YAMLError, ValueError, AttributeError, RecursionError) as error:  # the latter of values that are not what their tags say
        raise ValueError(f"--config {path} is not valid YAML: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"--config {path}: expected `option: value` lines")
    names = ["null" if key is None else str(key) for key in values]
    if problem := unknown_keys_error(names, [f.name for f in dataclasses.fields(command)], where=f"--config {path}"):
        raise ValueError(problem)
    types, arguments = get_type_hints(command), []
    for name, value in values.items():
        flag = "--" + name.replace("_", "-")
        if value is None:  # as if it were not written
            continue
        if any(isinstance(part, (dict, list)) for part in (value if isinstance(value, list) else [value])):
            raise ValueError(f"--config {path}: {name} must be a plain value or a list of plain values")
        if isinstance(value, list):
            arguments += [flag, *map(str, value)]
        elif types[name] is bool and (word := str(value).lower()) in SWITCH:
            arguments.append(flag if SWITCH[word] else flag.replace("--", "--no-", 1))
        else:
            arguments.append(f"{flag}={value}")
    return arguments
