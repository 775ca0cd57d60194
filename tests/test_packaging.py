"""The wheel and the sdist: what a user installs must hold the demo's model and data."""

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
DEMO_FILES = {
    "model/model.safetensors",
    "model/config.json",
    "model/tokenizer.json",
    "model/chat_template.jinja",
    "demo.yaml",
}


def test_wheel_and_sdist_build_and_hold_the_demo(tmp_path):
    """Package data is easily forgotten; without it the demo fails only at the user's."""
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    source = tmp_path / "source"
    for name in filter(None, tracked.split("\0")):
        target = source / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((ROOT / name).read_bytes())
    subprocess.run([sys.executable, "-m", "build", "--outdir", str(tmp_path / "dist"), str(source)], check=True)
    [wheel] = (tmp_path / "dist").glob("*.whl")
    [sdist] = (tmp_path / "dist").glob("*.tar.gz")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {f"erpo_trl/demo/{name}" for name in DEMO_FILES} <= names
    assert {"erpo_trl/evaluation/paper.yaml", "erpo_trl/cli.py", "erpo_trl/query/regularizer.py"} <= names
    assert not any(name.startswith(("tests/", "recipes/")) for name in names)
    assert wheel.stat().st_size < 6e6
    with tarfile.open(sdist) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    assert {f"erpo_trl/demo/{name}" for name in DEMO_FILES} <= packed
