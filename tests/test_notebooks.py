"""The notebooks run, and what is kept of them is whole."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

FOLDER = Path(__file__).parents[1] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
# Where a path begins that would show the machine on which a notebook was run
MACHINE = re.compile(r"(?<![\w.:/])/(tmp|home|root|work|usr|opt|var|Users|private|content)\b|site-packages|[A-Z]:\\\\")
each = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def run(*arguments: str, folder: Path) -> subprocess.CompletedProcess:
    """`notebooks/run.py`, with caches and IPython's history below `folder`."""
    environment = {**os.environ, "HF_HOME": str(folder / "hf"), "IPYTHONDIR": str(folder / "ipython")}
    command = [sys.executable, str(FOLDER / "run.py"), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)


def texts(cell) -> list[str]:
    """What a cell printed, showed and warned of, without pictures."""
    shown = []
    for output in cell.outputs:
        shown += [output.text] if output.output_type == "stream" else [str(v) for v in output.get("data", {}).values()]
    return shown


@each
def test_notebook_runs_with_few_steps(path, tmp_path):
    done = run("--fast", "--output", str(tmp_path / "out"), str(path), folder=tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]
    made = nbformat.read(tmp_path / "out" / path.name, as_version=4)
    assert [cell.source for cell in made.cells] == [cell.source for cell in nbformat.read(path, as_version=4).cells]
    for cell in made.cells:
        if cell.cell_type == "code":
            assert not [o for o in cell.outputs if o.get("name") == "stderr"], cell.outputs
    assert any("image/png" in o.get("data", {}) for cell in made.cells for o in cell.get("outputs", ()))


def test_a_notebook_that_fails_is_named_with_its_cell_and_leaves_nothing(tmp_path):
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell("#"), nbformat.v4.new_code_cell("1 / 0")])
    nbformat.write(notebook, tmp_path / "broken.ipynb")
    done = run("--output", str(tmp_path / "out"), str(tmp_path / "broken.ipynb"), folder=tmp_path)
    assert done.returncode == 1
    assert "broken.ipynb no longer runs:" in done.stderr
    assert "1 / 0" in done.stderr and "ZeroDivisionError: division by zero" in done.stderr
    assert list((tmp_path / "out").iterdir()) == []


@each
def test_what_is_kept_is_a_whole_run(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    # Run from the beginning in one go
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    for cell in code:
        assert not [o for o in cell.outputs if o.output_type == "error" or o.get("name") == "stderr"], cell.outputs
        for text in texts(cell):
            assert not MACHINE.search(text), text
    assert path.stat().st_size < 600_000


@each
def test_it_opens_with_a_badge_and_an_install_cell(path):
    spec = importlib.util.spec_from_file_location("run_notebooks", FOLDER / "run.py")
    runner = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(runner)
    first, install, *_ = nbformat.read(path, as_version=4).cells
    assert first.source.startswith("[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]")
    assert f"]({runner.colab(path)})" in first.source.splitlines()[0]
    assert 'if importlib.util.find_spec("erpo_trl") is None:' in install.source
    assert install.outputs == []
