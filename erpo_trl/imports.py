"""Functions by their import path: `package.module:function` or `path/to/file.py:function`."""

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterable
from pathlib import Path


def _import_module(location: str):
    """The module at a dotted name, or in a `.py` file."""
    if not location.endswith(".py"):
        return importlib.import_module(location)
    path = Path(location).resolve()
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}")
    name = f"erpo_trl_import_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]  # two functions of one file share its globals
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # so that what the file defines can be pickled
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def import_function(path: str, what: str, known: Iterable[str]) -> Callable:
    """The function at `package.module:function`, `package.module.function` or `path/to/file.py:function`.

    Args: path: where it is; what: what it is to be, for messages ("reward"); known: the names that stand for one without a
        path, for messages.
    Raises: ValueError that says what is wrong and lists `known`.
    """
    separator = ":" if ":" in path else "."
    location, _, attribute = path.rpartition(separator)
    options = f"Known names: {', '.join(sorted(known))}; or give package.module:function or path/to/file.py:function"
    if not location or not attribute or path.endswith(".py"):
        raise ValueError(f"{what} {path!r} is neither a known name nor names a function. {options}")
    try:
        module = _import_module(location)
    except (ImportError, FileNotFoundError) as error:
        raise ValueError(f"{what} {path!r}: cannot import {location!r} ({error}). {options}") from error
    function = getattr(module, attribute, None)
    if not callable(function):
        problem = "has no" if function is None else f"holds a {type(function).__name__}, not a function, as"
        raise ValueError(f"{what} {path!r}: {location!r} {problem} {attribute!r}. {options}")
    return function
