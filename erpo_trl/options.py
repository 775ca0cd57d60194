"""Options of a command from its YAML file and its command line, on TRL's parser."""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import get_type_hints

import yaml
from trl import TrlParser

from .cli import InputError


def first_option(argv: Sequence[str], config: type, prog: str):
    """An instance of `config` from the same file and command line, whose other options are left alone: for an option that
    says which the others are.

    Raises: InputError: missing file, or a value that a field refuses.
    """
    return _read(argv, [config], prog, add_help=False)[0]


def parse_options(
    argv: Sequence[str], configs: Sequence[type], prog: str, elsewhere: Mapping[str, type] | None = None
) -> tuple:
    """Instances of dataclasses from `--config FILE` and the command line; the command line beats the file, the file the
    defaults.

    Args: argv: the command's arguments; configs: dataclasses, one instance of each is returned; prog: the command's name;
        elsewhere: of what -> a dataclass whose fields are no options here, named as such.
    Raises: InputError: unknown key (named, with the nearest known one), missing file, or a value that a field refuses.
    """
    *parsed, from_file, from_line = _read(argv, configs, prog)
    for where, unknown in (("config file", from_file), ("command line", from_line)):
        if unknown:
            name = unknown[0].removeprefix("--").replace("-", "_")
            homes = [of for of, config in (elsewhere or {}).items() if name in _names(config)]
            near = difflib.get_close_matches(name, [known for config in configs for known in _names(config)], n=1)
            hint = f" (an option of {homes[0]})" if homes else f" (did you mean {near[0]}?)" if near else ""
            raise InputError(f"unknown option in the {where}: {unknown[0].removeprefix('--')}{hint}")
    return tuple(parsed)


def _names(config: type) -> list[str]:
    return [field.name for field in fields(config)]


def _read(argv: Sequence[str], configs: Sequence[type], prog: str, **parser_options) -> tuple:
    """Instances of the dataclasses, then what the file and the command line hold beside their fields."""
    argv = [part for option in argv for part in (option.split("=", 1) if option.startswith("--config=") else [option])]
    if "--config" in argv:
        at = argv.index("--config") + 1
        if at == len(argv) or not Path(argv[at]).is_file():
            raise InputError(f"--config: no file {argv[at]!r}" if at < len(argv) else "--config needs a file")
    parser = TrlParser(configs, prog=prog, allow_abbrev=False, **parser_options)
    try:
        if "--config" in argv:
            _check_numbers(argv[at], configs)
        return parser.parse_args_and_config(argv, return_remaining_strings=True, separate_remaining_strings=True)
    except yaml.YAMLError as error:
        raise InputError(f"{argv[at]} is not YAML: {error}") from error
    except InputError:
        raise
    except UnicodeDecodeError as error:
        raise InputError(f"{argv[at]} is not in UTF-8: {error}") from error
    except ValueError as error:
        raise InputError(str(error)) from error


def _check_numbers(path: str, configs: Sequence[type]) -> None:
    """TRL's parser takes a file's values as they are: an empty one, or half a step, would end in an error of training's insides."""
    content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    kinds = {name: kind for config in configs for name, kind in get_type_hints(config).items()}
    for name, value in content.items() if isinstance(content, Mapping) else ():
        if value is None and kinds.get(name) in (int, float):
            raise InputError(f"{path}: {name} has no value; give it one, or take the line out")
        if isinstance(value, float) and kinds.get(name) is int:
            raise InputError(f"{path}: {name} must be a whole number, found {value}")
