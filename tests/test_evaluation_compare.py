"""Comparison of evaluations: paired differences, what may be compared, the paper's rows."""

import numpy as np
import pytest
from evaluation_helpers import StubBackend, problems, run

from erpo_trl import cli
from erpo_trl.evaluation.compare import compare, interval, paper_tables

GOLDS = [str(index % 2) for index in range(40)]


def evaluation(output, right_rows, golds=GOLDS, name="math500", **settings):
    """A run whose samples are right on the first `right_rows` problems."""
    answer = lambda r: f"\\boxed{{{golds[r.row] if r.row < right_rows else 7}}}"  # noqa: E731
    run(
        output,
        StubBackend(answer, size=100),
        problems(golds, name=name),
        **{"temperatures": [0.1, 1.0, 1.5]} | settings,
    )
    return str(output)


def rows_of(text, table):
    lines = text[text.index(f"| {table} ") :].split("\n\n")[0].splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    return {row[0]: dict(zip(cells[0][1:], row[1:])) for row in cells[2:]}


def test_interval_of_a_paired_difference():
    """Against the normal interval of the mean difference; unpaired it would be several times as wide."""
    rng = np.random.default_rng(0)
    base = rng.random(200)
    better = base + rng.normal(0.05, 0.02, 200)
    difference, low, high = interval({"x": better}, {"x": base}, 4000)
    half = 1.96 * (better - base).std() / np.sqrt(200)
    assert difference == pytest.approx((better - base).mean())
    assert (high - low) / 2 == pytest.approx(half, rel=0.1) and low < difference < high
    # Over two benchmarks of equal spread the interval of the average shrinks by the root of two
    a, b = {"x": better, "y": better}, {"x": base, "y": base}
    assert (np.diff(interval(a, b, 4000)[1:]) / (high - low))[0] == pytest.approx(2**-0.5, rel=0.1)


def test_tables_by_hand(tmp_path):
    """30 of 40 right against 20 of 40, the same at each temperature: +0.25, and its bootstrap interval."""
    base, better = evaluation(tmp_path / "base", 20), evaluation(tmp_path / "better", 30)
    text, curves = compare([base, better], names=["GRPO", "ERPO"])
    for metric in ("avg@2", "pass@2", "pass@1"):
        table = rows_of(text, metric)
        assert table["GRPO"] == {"math500": "0.500"} and table["ERPO"] == {"math500": "0.750"}
        difference, low, high = interval({"math500": np.repeat([0, 1, 0], [20, 10, 10])}, {"math500": np.zeros(40)})
        assert (
            table["ERPO − GRPO"] == {"math500": f"+{difference:.3f} [+{low:.3f}, +{high:.3f}]"} and difference == 0.25
        )
    table = rows_of(text, "Pass@1 in percent")
    assert list(table["GRPO"]) == ["T=0.1", "T=1.0", "T=1.5", "mean T≤1.0", "mean T 1.2–1.5"]
    assert set(table["ERPO"].values()) == {"75.0"}
    assert table["ERPO − GRPO"]["T=1.5"].startswith("+25.0 [+12")
    assert curves["avg@2"]["math500"]["ERPO"]["1.5"]["avg@2"]["value"] == 0.75
    assert "paper" not in text


def test_only_what_all_runs_have_is_compared(tmp_path):
    base = evaluation(tmp_path / "base", 20)
    run(tmp_path / "base", StubBackend(lambda r: "", size=100), problems(["1"], name="extra"), temperatures=[0.1])
    other = evaluation(tmp_path / "other", 20, temperatures=[0.1, 1.2])
    text, _ = compare([base, other])
    assert "extra is left out: not every run has it." in text
    assert "math500: not every run has T=1, 1.2, 1.5; left out." in text
    assert list(rows_of(text, "Pass@1 in percent")["base"]) == ["T=0.1", "mean T≤1.0"]


def test_what_cannot_be_compared_is_refused(tmp_path):
    base = evaluation(tmp_path / "base", 20)
    with pytest.raises(ValueError, match="math500: the runs were scored on different problems"):
        compare([base, evaluation(tmp_path / "keys", 20, golds=GOLDS[1:] + ["5"])])
    with pytest.raises(ValueError, match=r"different numbers of samples.*'base': 2, 'three': 3"):
        compare([base, evaluation(tmp_path / "three", 20, samples=3)])
    with pytest.raises(ValueError, match="two runs are called alike"):
        compare([base, base])
    with pytest.raises(ValueError, match="share no benchmark and temperature: math500 is left out"):
        compare([base, evaluation(tmp_path / "own", 20, name="own")])
    with pytest.raises(ValueError, match="names must be as many as folders: found 1 and 2"):
        compare([base, base], names=["a"])


def test_papers_rows_stand_beside_ones_own(tmp_path):
    text, _ = compare([evaluation(tmp_path / "mine", 20)], paper=True)
    table = rows_of(text, "avg@2")
    assert table["paper: erpo (avg@32)"] == {"math500": "0.677"} and table["mine"] == {"math500": "0.500"}
    table = rows_of(text, "Pass@1 in percent")
    assert table["paper: Qwen2.5-32B, erpo, c=0.01, K=8, w"]["T=1.5"] == "80.8"
    assert table["paper: rloo+erpo"]["mean T 1.2–1.5"] == "40.8"
    assert table["mine"]["mean T≤1.0"] == "50.0"
    assert rows_of(text, "Train–eval gap in points")["paper: erpo"]["mean"] == "3.14"


def test_command_prints_and_writes(tmp_path, capsys):
    base, better = evaluation(tmp_path / "base", 20), evaluation(tmp_path / "better", 30)
    assert cli.main(["compare", base, better, "--output", str(tmp_path / "out")]) == 0
    text = (tmp_path / "out" / "compare.md").read_text()
    assert text in capsys.readouterr().out and "better − base" in text
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"compare.md", "avg_at_2.png", "pass_at_2.png", "pass_at_1.png"}
    assert cli.main(["compare", "--paper"]) == 0
    printed = rows_of(capsys.readouterr().out, "pass@32")
    assert list(map(float, printed["paper: grpo"].values())) == paper_tables()["table1"]["pass@32"]["grpo"]


@pytest.mark.parametrize(
    "arguments, message",
    [([], "give output folders of erpo-trl eval, or --paper"), (["nowhere"], "nowhere has no metrics.json")],
)
def test_command_refuses_in_one_line(arguments, message, capsys):
    assert cli.main(["compare", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_other_settings_and_prompts_are_named(tmp_path):
    base = evaluation(tmp_path / "base", 20)
    assert "differ" not in compare([base, evaluation(tmp_path / "same", 30, seed=5)])[0].partition("##")[0]
    other = evaluation(tmp_path / "other", 20, max_new_tokens=24, system_prompt="Think.", dtype="float16")
    text, _ = compare([base, other])
    assert (
        "The runs have different max_new_tokens (base: 60, other: 24): their differences may come from that." in text
    )
    assert "different system_prompt (base: None, other: 'Think.')" in text
    assert "different dtype (base: 'auto', other: 'float16')" in text and "prompts differ" not in text
    prompts = [f"another {index}" for index in range(len(GOLDS))]
    run(
        tmp_path / "prompts",
        StubBackend(lambda r: "", size=100),
        problems(GOLDS, prompts, "math500"),
        temperatures=[0.1],
    )
    text, _ = compare([base, tmp_path / "prompts"])
    assert "math500: the runs' prompts differ in their tokens" in text


def test_labels_are_text(tmp_path):
    """A bar ends no cell of a table, and a dollar begins no formula in a plot."""
    base, better = evaluation(tmp_path / "base", 20), evaluation(tmp_path / "better", 30)
    names = ["a|b", "$\\frac{$"]
    assert cli.main(["compare", base, better, "--names", *names, "--output", str(tmp_path / "out")]) == 0
    lines = (tmp_path / "out" / "compare.md").read_text().splitlines()
    assert any(line.startswith("| a\\|b ") for line in lines) and not any("a|b" in line for line in lines)
    assert (tmp_path / "out" / "pass_at_1.png").is_file()


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("metrics.json", "{}", "metrics.json is not what erpo-trl eval writes, or not all of it (without 'settings')"),
        ("metrics.json", '{"settings": {"samp', "metrics.json is not what erpo-trl eval writes, or not all of it (Unterminated"),
        ("metrics.json", '{"settings": {"samples": "x"}}', "(samples is 'x'): run erpo-trl eval again, into that folder"),
        ("samples.parquet", "nothing", "samples.parquet cannot be read (Parquet file size is 7 bytes"),
        ("samples.parquet", None, "has no samples.parquet, or one without samples"),
    ],
)  # fmt: skip
def test_broken_files_of_an_evaluation_are_named(tmp_path, name, content, message, capsys):
    base = evaluation(tmp_path / "base", 20)
    (tmp_path / "base" / name).unlink()
    if content is not None:
        (tmp_path / "base" / name).write_text(content)
    assert cli.main(["compare", base]) == 2
    error = capsys.readouterr().err
    assert message in error and base in error


def test_output_that_would_do_harm_is_refused_before_the_work(tmp_path, capsys, monkeypatch):
    base = evaluation(tmp_path / "base", 20)
    monkeypatch.setattr("erpo_trl.evaluation.compare.compare", None)
    (tmp_path / "file").write_text("")
    for output in ("file", "file/below"):
        assert cli.main(["compare", base, "--output", str(tmp_path / output)]) == 2
        assert f"--output: {tmp_path / 'file'} is a file; give a folder" in capsys.readouterr().err
    assert cli.main(["compare", base, "--output", base]) == 2
    assert f"--output: {base} is the folder of an evaluation, whose plots" in capsys.readouterr().err
