"""Execute the notebooks and keep their outputs: `python notebooks/run.py [--fast] [--output DIR] [NOTEBOOK …]`.

Without `--output` they are written in place, whole or not at all. Each runs in a process and an empty folder of its own, so that no
output shows where that was. `--fast` takes the few steps that the tests take; its outputs are not for keeping.
"""

import argparse
import configparser
import os
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from traitlets.config import Config

HERE = Path(__file__).resolve().parent
# Longest that one cell may take, in seconds: only a cell that hangs reaches it
TIME_LIMIT = 7200
# IPython's tracebacks are coloured, logs are not
COLOURS = re.compile(r"\x1b\[[\d;]*m")
COLAB = re.compile(r"https://colab\.research\.google\.com/github/[^)]*")


def notebooks() -> list[Path]:
    return sorted(HERE.glob("*.ipynb"))


def repository() -> str:
    """`owner/name` on GitHub, from the `url` in setup.cfg; while there is none, with OWNER in the owner's place."""
    setup = configparser.ConfigParser(interpolation=None)
    setup.read(HERE.parent / "setup.cfg", encoding="utf-8")
    url = setup["metadata"].get("url", "https://github.com/OWNER/erpo_trl")
    return url.removeprefix("https://github.com/").rstrip("/")


def colab(path: Path) -> str:
    """Where Colab opens a notebook."""
    return f"https://colab.research.google.com/github/{repository()}/blob/main/notebooks/{path.name}"


def execute(path: Path, target: Path, fast: bool) -> None:
    """Run a notebook from its beginning in a new process and write it, with what it printed and drew, to `target`.

    Raises: CellExecutionError, with the cell and its traceback, for a cell that fails; nothing is written then.
    """
    notebook = nbformat.read(path, as_version=4)
    notebook.cells[0].source = COLAB.sub(colab(path), notebook.cells[0].source)
    # More threads gain nothing on a model this small
    environment = {**os.environ, "ERPO_NOTEBOOK_FAST": str(int(fast))}
    environment.setdefault("OMP_NUM_THREADS", "1")
    if shutil.which("nvidia-smi") is None:
        # Where DeepSpeed is installed it would print, with the time, that it finds no GPU
        environment.setdefault("DS_ACCELERATOR", "cpu")
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder) / "work"
        work.mkdir()
        # Sockets in files: no port that another notebook could take, and no warning about open ones
        config = Config(KernelManager={"transport": "ipc", "connection_file": f"{folder}/kernel.json"})
        client = NotebookClient(
            notebook,
            config=config,
            kernel_name="python3",
            timeout=TIME_LIMIT,
            resources={"metadata": {"path": str(work)}},
            record_timing=False,
            coalesce_streams=True,
        )
        client.execute(env=environment)
    # The version of the Python that ran it would change with every machine
    notebook.metadata["language_info"] = {"name": "python"}
    temporary = target.with_name(f".{target.name}.tmp")
    nbformat.write(notebook, temporary)
    os.replace(temporary, target)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("notebooks", nargs="*", type=Path, default=notebooks(), help="default: all")
    parser.add_argument("--fast", action="store_true", help="a few steps only")
    parser.add_argument("--output", type=Path, help="folder to write to. Default: in place")
    options = parser.parse_args()
    if options.output:
        options.output.mkdir(parents=True, exist_ok=True)
    for path in options.notebooks:
        start = time.perf_counter()
        try:
            execute(path, (options.output or path.parent) / path.name, options.fast)
        except CellExecutionError as error:
            print(f"{path.name} no longer runs:\n{COLOURS.sub('', str(error))}", file=sys.stderr)
            return 1
        print(f"{path.name}: {time.perf_counter() - start:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
