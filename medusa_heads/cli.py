"""medusa-heads: one subcommand per job, each a dataclass of options with a `run` method."""

from __future__ import annotations

import importlib
import os
import sys
import warnings

from medusa_heads.suggest import suggest
from medusa_heads.versions import commit, versions

COMMANDS = {
    "inspect-data": ("train.inspect_data:InspectData", "print decoded training rows with supervised spans coloured"),
    "regenerate": ("train.regenerate:Regenerate", "let the base model answer prompts (or write its own first)"),
    "estimate": ("train.estimate:Estimate", "print what a training run will cost, before anything starts"),
    "generate": ("infer.commands:Generate", "answer one prompt"),
    "chat": ("infer.commands:Chat", "talk to the model, turn by turn"),
    "bench": ("infer.bench.command:Bench", "compare drafters with the base model on the same prompts"),
    "tree": ("infer.tune.tune_tree:TuneTree", "choose the fastest tree for these heads on this machine and store it with them"),
    "merge": ("medusa_heads.merge:Merge", "write the tuned base that heads trained with an adapter belong to"),
    "export": ("medusa_heads.formats.export:Export", "write heads in another engine's format"),
}


def main(argv: list[str] | None = None) -> int:
    """Runs one subcommand; user errors (ValueError) become one line and exit status 2."""
    try:
        try:
            return run(sys.argv[1:] if argv is None else argv)
        finally:
            print(end="", flush=True)  # what is left in the buffer may meet a closed pipe too
    except BrokenPipeError:  # the reader, `| head` for one, has seen enough: end as the shell's own tools do
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for Python's own flush at the end
        return 141  # 128 + SIGPIPE


def run(arguments: list[str]) -> int:
    """Finds the subcommand and runs it, or prints what there is."""
    if arguments == ["--version"]:
        print(program_version())
        return 0
    if not arguments or arguments[0] in ("-h", "--help"):
        print("usage: medusa-heads COMMAND [options]   (medusa-heads COMMAND --help lists them; medusa-heads --version)\n")
        for name, (_, summary) in COMMANDS.items():
            print(f"  {name:14s} {summary}")
        print("\ntraining: accelerate launch --quiet -m train --config configs/train/smollm2_medusa.yaml")
        return 0 if arguments else 2
    name, *rest = arguments
    if name not in COMMANDS:
        print(f"error: unknown command {name!r}{suggest(name, COMMANDS)}; known are {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    return run_command(COMMANDS[name][0], rest, prog=f"medusa-heads {name}")


def program_version() -> str:
    """The name, the version and, in a checkout, the commit."""
    found = commit()
    return f"medusa-heads {versions().get('medusa-heads', '(not installed)')}" + (f" (commit {found})" if found else "")


def run_command(target: str, arguments: list[str], *, prog: str) -> int:
    """Parses `arguments` into the dataclass `module:Class` and runs it."""
    from medusa_heads import base_model
    from train.command_line import parse_command

    base_model.quiet_transformers()
    module, _, attribute = target.partition(":")
    command_type = getattr(importlib.import_module(module), attribute)
    try:
        command = parse_command(command_type, arguments, prog=prog)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            return command.run() or 0
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted (given again, regenerate, tree and training go on where they were)", file=sys.stderr)
        return 130


if __name__ == "__main__":
    raise SystemExit(main())
