"""The command `erpo-trl`: a name, a help line and a lazily imported function per subcommand."""

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

# Name -> (module, function, help). Imported when called: `--help` must not wait for torch.
COMMANDS = {
    "train": ("train", "main", "train a model with ERPO from a YAML recipe and command-line options"),
    "score": ("score", "main", "make the reference table of a recipe, without training"),
    "eval": ("evaluation.run", "main", "evaluate a model at many temperatures: Avg@k, Pass@k, Pass@1"),
    "compare": ("evaluation.compare", "main", "compare evaluations, with paired bootstrap and the paper's tables"),
    "bench": ("bench.run", "main", "measure what ERPO costs, against TRL's GRPO and others, on this machine"),
    "study": ("study.command", "main", "make the runs of a study, over several seeds, and sum them up"),
    "report": ("report.command", "main", "compare training runs: drift, entropy, weights, evaluations, collapse"),
    "demo": ("demo.run", "main", "train the embedded model with ERPO and with GRPO, and compare them"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; its own options are parsed by it.

    Returns: process exit status; 2 for wrong usage or bad input, with one line on stderr that says what to do.
    """
    from . import __version__

    width = max(map(len, COMMANDS))
    parser = argparse.ArgumentParser(
        prog="erpo-trl",
        description="ERPO (Environment-Regularized Policy Optimization) on Hugging Face TRL.",
        epilog="commands:\n"
        + "\n".join(f"  {name:<{width}}  {help_line}" for name, (_, _, help_line) in COMMANDS.items())
        + "\n\n`erpo-trl COMMAND --help` lists a command's options.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"erpo-trl {__version__}")
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help="one of: " + ", ".join(COMMANDS))
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="the command's own options")
    options = parser.parse_args(argv)

    module, function, _ = COMMANDS[options.command]
    command = getattr(importlib.import_module(f".{module}", __package__), function)
    try:
        command(options.arguments)
    except InputError as error:
        print(f"erpo-trl {options.command}: {error}", file=sys.stderr)
        return 2
    return 0


class InputError(ValueError):
    """Something the user gave is wrong; the message is all they need, no traceback."""


def check_folder(path: str | Path, option: str) -> None:
    """Before the work whose results go there. Raises: InputError where there cannot be a folder, since a file is in its place."""
    path = Path(path)
    there = next((folder for folder in (path, *path.parents) if folder.exists()), None)
    if there is not None and not there.is_dir():
        raise InputError(f"{option}: {there} is a file; give a folder")


if __name__ == "__main__":
    # Under `-m`, this file is `__main__` and the package's copy, whose InputError the commands raise, is another module
    sys.exit(importlib.import_module("erpo_trl.cli").main())
