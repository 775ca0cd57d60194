"""The docs name what there is. That they build without a broken link is `make docs`."""

import re
from pathlib import Path

import pytest

import erpo_trl
from erpo_trl.evaluation.benchmarks import known_benchmarks
from erpo_trl.policy.trust_region import REGIONS
from erpo_trl.query.weights import WEIGHT_SCHEMES

ROOT = Path(__file__).parents[1]


def test_every_public_name_has_its_place_in_the_reference():
    named = re.findall(
        r"^::: (\S+)$", "".join(p.read_text() for p in (ROOT / "docs" / "api").glob("*.md")), re.MULTILINE
    )
    assert len(named) == len(set(named))
    public = {f"erpo_trl.{module}.{name}" for name, module in erpo_trl._PUBLIC.items()}
    assert public - set(named) == set()


@pytest.mark.parametrize(
    "page", ["README.md", "CONTRIBUTING.md", *(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md"))]
)
def test_files_and_tests_that_a_page_names_exist(page):
    text = (ROOT / page).read_text()
    for name in re.findall(r"`((?:erpo_trl|tests|recipes|docs|notebooks)/[\w./-]*)", text):
        assert (ROOT / name).exists(), name
    tests = "".join(path.read_text() for path in (ROOT / "tests").glob("*.py"))
    for name in re.findall(r"`(test_\w+)`", text):
        assert f"def {name}(" in tests, name


@pytest.mark.parametrize(
    "page, names",
    [
        ("query_side.md", WEIGHT_SCHEMES),
        ("trust_regions.md", REGIONS),
        ("evaluation.md", known_benchmarks()),
    ],
)
def test_tables_of_choices_are_whole(page, names):
    text = (ROOT / "docs" / page).read_text()
    assert [name for name in names if not re.search(rf"[`| ]{name}[`| ]", text)] == []
