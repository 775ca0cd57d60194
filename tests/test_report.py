"""`erpo-trl report` on run folders written here: the numbers behind the plots, what is missing, and what the HTML holds."""

import base64
import html.parser
import json
import os

import numpy as np
import pytest
from report_helpers import line_log, queries, write_evaluation, write_run

pytest.importorskip("matplotlib")

from erpo_trl import cli, make_report
from erpo_trl.report import command
from erpo_trl.report.figures import band, bin_edges, histogram, live_images, ratio_clip_grid
from erpo_trl.report.grouping import group_key
from erpo_trl.report.query_log import read_queries
from erpo_trl.report.runs import distinct_names, load_run, shared_name

SERIES = {"entropy": lambda s: 0.5 + s / 100, "reward": lambda s: s / 100, "query/weight_ess": lambda s: 0.9}
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(autouse=True)
def quick(request, monkeypatch):
    """Drawing takes seconds a report; what is not about pictures goes without."""
    if "drawn" not in request.fixturenames:
        monkeypatch.setattr(command, "rendered", lambda plot: (PNG, b"<svg/>"))


@pytest.fixture
def drawn():
    """The test's plots are drawn."""


def two_seeds(tmp_path):
    """Two ERPO seeds, whose drift is 0.001 and 0.003 a step, and one run without a penalty, 0.01 a step."""
    erpo = [write_run(tmp_path / f"erpo-seed{s}", line_log(rise=0.001 + 0.002 * s, **SERIES), seed=s) for s in (0, 1)]
    grpo = write_run(tmp_path / "grpo", line_log(rise=0.01, **SERIES), query_kl_coef=0.0, beta=0.01)
    return [*erpo, grpo]


def lines(data, plot, panel=0):
    return {line["label"]: line for line in data["plots"][plot]["panels"][panel]["lines"]}


def test_seeds_become_a_line_and_a_band(tmp_path):
    """At step 20 the two seeds drift 0.02 and 0.06: mean 0.04, from 0.02 to 0.06."""
    data = make_report(two_seeds(tmp_path), tmp_path / "out")
    drift = lines(data, "drift")
    assert list(drift) == ["erpo (2 seeds)", "grpo"]
    erpo = drift["erpo (2 seeds)"]
    assert erpo["x"] == [10, 20, 30, 40]
    assert erpo["y"] == pytest.approx([0.02, 0.04, 0.06, 0.08])
    assert erpo["low"] == pytest.approx([0.01, 0.02, 0.03, 0.04])
    assert erpo["high"] == pytest.approx([0.03, 0.06, 0.09, 0.12])
    assert drift["grpo"]["y"] == pytest.approx([0.1, 0.2, 0.3, 0.4]) and drift["grpo"]["low"] == drift["grpo"]["high"]
    assert lines(data, "learning")["grpo"]["y"] == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert lines(data, "entropy")["grpo"]["y"] == pytest.approx([0.6, 0.7, 0.8, 0.9])
    assert lines(data, "weights")["grpo"]["y"] == [0.9] * 4
    # Table 3: over the last tenth of four logs, one of them
    numbers = {row["label"]: row for row in data["numbers"]}
    assert numbers["erpo (2 seeds)"]["query_kl"] == pytest.approx([0.04, 0.12])
    assert numbers["erpo (2 seeds)"]["query_kl_slope"] == pytest.approx([0.1, 0.3])
    assert numbers["grpo"]["policy_kl"] == [None] and numbers["grpo"]["entropy"] == pytest.approx([0.9])
    assert json.loads((tmp_path / "out" / "report.json").read_text()) == data
    text = (tmp_path / "out" / "report.md").read_text()
    assert "| erpo (2 seeds) | 0.08 [0.04, 0.12] |" in text
    assert "shaded: from the lowest to the highest seed" in text


@pytest.mark.parametrize("logged", ["policy/kl", "kl"])
def test_policy_kl_by_either_name(tmp_path, logged):
    log = line_log(**{logged: lambda s: s / 1000})
    if logged == "policy/kl":  # measured every other log, and TRL's beside it
        log = [{**entry, "kl": 9.0} for entry in log]
        del log[0]["policy/kl"], log[2]["policy/kl"]
    data = make_report([write_run(tmp_path / "run", log)], tmp_path / "out")
    line = lines(data, "drift", 1)["run"]
    steps = [20, 40] if logged == "policy/kl" else [10, 20, 30, 40]
    assert line["x"] == steps and line["y"] == pytest.approx([s / 1000 for s in steps])


def test_groups_differ_in_nothing_but_the_seed(tmp_path):
    log = line_log()
    paths = [
        write_run(tmp_path / "a", log, seed=0),
        write_run(tmp_path / "b", log, seed=1, output_dir="elsewhere", save_steps=7, report_to=["wandb"]),
        write_run(tmp_path / "c", log, seed=1, learning_rate=2e-6),
        write_run(tmp_path / "d", log, state=False),
    ]
    keys = [load_run(path).group for path in paths]
    assert keys[0] == keys[1] != keys[2] and keys[3] is None
    assert list(lines(make_report(paths, tmp_path / "out"), "drift")) == ["a (2 seeds)", "c", "d"]
    named = make_report(paths, tmp_path / "out", names=["x", "y", "x", "y"])
    assert list(lines(named, "drift")) == ["x (2 seeds)", "y (2 seeds)"]
    other = json.loads((paths[0] / "erpo_state.json").read_text()) | {"data_fingerprint": "other"}
    assert group_key(other) != keys[0] and group_key({**other, "args": {}}) is None


def test_names_are_what_tells_paths_apart(tmp_path):
    one, two = tmp_path / "erpo" / "model", tmp_path / "grpo" / "model"
    assert distinct_names([one, two]) == ["erpo", "grpo"]
    assert distinct_names([one]) == ["model"]
    assert distinct_names([tmp_path / "run", tmp_path / "run" / "again"]) == ["run", "run/again"]


def test_band_reads_between_steps_and_keeps_to_what_all_have():
    found = band([(np.array([0, 10, 20]), np.array([0.0, 1.0, 2.0])), (np.array([5, 15]), np.array([3.0, 5.0]))])
    assert found["x"] == [5, 10, 15] and found["y"] == pytest.approx([1.75, 2.5, 3.25])
    assert found["low"] == pytest.approx([0.5, 1.0, 1.5]) and found["high"] == pytest.approx([3.0, 4.0, 5.0])
    empty = (np.array([], dtype=int), np.array([]))
    assert band([empty]) is None and band([empty, (np.array([3]), np.array([1.0]))])["y"] == [1.0]
    assert band([(np.array([1, 2]), np.ones(2)), (np.array([5, 6]), np.ones(2))]) is None


def test_accuracies_of_checkpoints(tmp_path):
    """Evaluations found in the run and given; of another model, left out with a sentence."""
    run = write_run(tmp_path / "run", line_log(**{"rewards/accuracy_reward/mean": lambda s: s / 100}))
    write_evaluation(run / "checkpoint-20" / "eval", run / "checkpoint-20", {"a": {"0.1": 0.2, "1": 0.1}})
    write_evaluation(run / "eval", run, {"a": {"0.1": 0.4, "1": 0.3}})
    given = write_evaluation(tmp_path / "e", run / "checkpoint-10", {"a": {"0.1": 0.1}})
    stranger = write_evaluation(tmp_path / "s", tmp_path / "base", {"a": {"0.1": 0.9}})
    data = make_report([run], tmp_path / "out", evaluations=[given, stranger, run / "eval"])
    [grid] = data["plots"]["grid"]["maps"]
    assert grid["steps"] == [10, 20, 40] and grid["temperatures"] == [0.1, 1.0]
    assert grid["values"] == [[0.1, None], [0.2, 0.1], [0.4, 0.3]]
    # Step 10 lacks a temperature, so its mean would be of something else
    accuracy = lines(data, "learning", 1)["run"]
    assert accuracy["x"] == [20, 40] and accuracy["y"] == pytest.approx([0.15, 0.35])
    [gap] = data["gaps"]
    assert [step for step, _ in gap["gaps"]] == [20, 40] and [g for _, g in gap["gaps"]] == pytest.approx([0.05, 0.05])
    assert (
        f"The evaluation {stranger} is left out: its model {tmp_path / 'base'}"
        in (tmp_path / "out" / "report.md").read_text()
    )


def test_evaluations_of_a_run_that_was_moved(tmp_path):
    """Their paths lead nowhere, and are told by their ends; a path that is there is taken at its word."""
    run = write_run(tmp_path / "run", line_log())
    for name, model, value in (
        ("a", "/gone/run/checkpoint-20", 0.2),
        ("b", "somewhere/run", 0.4),
        ("c", "/gone/other/checkpoint-30", 0.3),
        ("d", tmp_path, 0.9),
    ):
        write_evaluation(run / name, model, {"x": {"1": value}})
    assert [(a.step, a.value) for a in load_run(run).accuracies] == [(20, 0.2), (40, 0.4)]


def test_accuracies_as_the_callback_logs_them(tmp_path):
    log = line_log()
    log[1] |= {"eval/aime24/avg@8@T0.6": 0.25, "eval/aime24/avg@8@T1": 0.5, "eval/aime24/pass@8@T1": 0.9}
    [grid] = make_report([write_run(tmp_path / "run", log)], tmp_path / "out")["plots"]["grid"]["maps"]
    assert (grid["steps"], grid["temperatures"], grid["values"]) == ([20], [0.6, 1.0], [[0.25, 0.5]])


def test_queries_make_histogram_and_correlation(tmp_path):
    """Weights of distinct queries, not of rows; NLLs that lie on a line but for one pair, and a query without a response."""
    kept = {
        20: queries([1, 2, 3, 4], [2, 4, 6, np.nan], weight=[0.0, 1.0, 1.0, 2.0]),
        40: queries([1, 2, 3, 4], [2, 4, 6, 9], weight=[0.0, 1.0, 1.0, 2.0]),
    }
    data = make_report([write_run(tmp_path / "run", line_log(**SERIES), queries=kept)], tmp_path / "out")
    weights = data["plots"]["weights"]
    [shares] = weights["histograms"]
    assert weights["edges"][0] == 0.0 and weights["edges"][-1] == 2.0 and len(weights["edges"]) == 31
    assert shares["share"][0] == shares["share"][-1] == 0.25 and shares["share"][15] == 0.5
    [panel] = data["plots"]["nll"]["panels"]
    assert panel["x"] == [1, 2, 3, 1, 2, 3, 4] and panel["y"] == [2, 4, 6, 2, 4, 6, 9] and panel["points"] == 7
    assert panel["pearson"] == pytest.approx(np.corrcoef(panel["x"], panel["y"])[0, 1])
    # Ties are shared in both, and there is no other disorder; of one length, nothing is to be taken out
    assert panel["spearman"] == pytest.approx(1.0) and panel["partial"] == pytest.approx(panel["pearson"])


def test_weights_out_of_the_reference_table(tmp_path):
    """Without query files: NLLs 2, 4 and 8 under s̄ = 4 weigh 2, 1 and 0.5."""
    run = write_run(tmp_path / "run", line_log(), table=[2.0, 4.0, 8.0])
    assert sorted(load_run(run).weights) == pytest.approx([0.5, 1.0, 2.0])
    data = make_report([run], tmp_path / "out")
    assert data["plots"]["weights"]["histograms"][0]["share"][0] == pytest.approx(1 / 3)
    assert "Weights are those of every query in the reference table" in (tmp_path / "out" / "report.md").read_text()


def test_histogram_edges():
    assert histogram(np.array([0.0, 0.5, 1.0]), np.array([0.0, 0.5, 1.0])) == pytest.approx([1 / 3, 2 / 3])
    assert bin_edges([np.ones(3)], 2).tolist() == [0.5, 1.0, 1.5]


def test_regions_that_the_runs_trained_with(tmp_path):
    drpo = write_run(tmp_path / "drpo", line_log(), trust_region="drpo", trust_region_delta=0.5)
    topk = write_run(tmp_path / "topk", line_log(), trust_region="dppo_topk_tv", trust_region_delta=0.5)
    data = make_report([write_run(tmp_path / "clip", line_log()), drpo, topk], tmp_path / "out")
    clip, region = data["plots"]["trust_region"]["regions"]
    assert (clip["title"], clip["runs"]) == ("ratio_clip, ε=0.2", ["clip"]) and region["title"] == "drpo, δ=0.5"
    # DRPO: 1 - |π - μ| / δ for A > 0 and π > μ; at π = 100.5/101, μ = 50.5/101
    assert region["weights"][0][100][50] == pytest.approx(1 - (50 / 101) / 0.5, abs=1e-5)
    assert "that of topk, dppo_topk_tv, depends on tokens" in (tmp_path / "out" / "report.md").read_text()
    pairs = write_run(tmp_path / "dpo", line_log())
    state = json.loads((pairs / "erpo_state.json").read_text())
    state["args"] = {
        name: value for name, value in state["args"].items() if "trust" not in name and "epsilon" not in name
    }
    (pairs / "erpo_state.json").write_text(json.dumps(state))
    assert make_report([pairs], tmp_path / "out")["plots"]["trust_region"] is None
    assert "dpo has none, as its trainer samples nothing" in (tmp_path / "out" / "report.md").read_text()
    grid = ratio_clip_grid(1.0, 0.1, 0.3, points=10)
    assert grid[5, 4] == 1 and grid[6, 4] == 0 and grid[0, 9] == 1  # 5.5/4.5 = 1.22, 6.5/4.5 = 1.44
    grid = ratio_clip_grid(-1.0, 0.1, 0.3, points=10)
    assert grid[9, 9] == 1 and grid[8, 9] == 0 and grid[9, 0] == 1  # 8.5/9.5 = 0.89


def test_collapse_and_lag_are_told(tmp_path):
    steps = range(1, 41)
    jump = lambda s: 0.5 if s <= 30 else 3.0  # noqa: E731
    log = line_log(steps, entropy=lambda s: jump(s) + 0.001 * (s % 2), reward=lambda s: 0.5 + 0.01 * (s % 2))
    for entry in log:
        entry["rewards/accuracy_reward/mean"] = entry["reward"]
    data = make_report([write_run(tmp_path / "run", log)], tmp_path / "out")
    assert data["collapses"] == [{"label": "run", "kind": "entropy jump", "step": 31, "noticed": 32}]
    assert lines(data, "entropy")["run"]["marked"] == [31]
    assert "run: entropy jump at step 31: entropy 3" in (tmp_path / "out" / "report.md").read_text()
    curve = {entry["with"]: dict(entry["curve"]) for entry in data["cross_lag"]}
    x, y = [e["query/kl"] for e in log], [e["entropy"] for e in log]
    assert set(curve) == {"entropy", "accuracy"} and curve["entropy"][4.0] == pytest.approx(
        np.corrcoef(x[:-4], y[4:])[0, 1]
    )


# ---------------------------------------------------------------------------------------------------- what may be missing
def test_a_run_of_another_trainer_leaves_sentences(tmp_path):
    """A log with a loss and nothing else: no plot is drawn, and each says what is missing."""
    run = write_run(tmp_path / "plain", [{"step": 5, "loss": 1.0}], state=False)
    data = make_report([run], tmp_path / "out")
    assert set(data["plots"].values()) == {None}
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["report.html", "report.json", "report.md"]
    text = (tmp_path / "out" / "report.md").read_text()
    for sentence in (
        "plain: No erpo_state.json: not a run of an ERPO trainer",
        "plain: No query files",
        "Query-KL: nothing known of plain.",
        "Policy-KL: nothing known of plain.",
        "Evaluation accuracy: nothing known of plain.",
        "No evaluations of plain: run erpo-trl eval",
        "Weights of the queries: not known for plain.",
        "Prompt-NLL against response-NLL: plain kept no queries with responses.",
        "Trust region: the settings of plain are not known.",
        "Gap: plain has no evaluated checkpoint",
        "Cross-lag: too few logs of Query-KL and entropy in plain.",
    ):
        assert f"> {sentence}" in text
    assert "plain: none found." in text


def test_an_empty_log(tmp_path):
    make_report([write_run(tmp_path / "run", [])], tmp_path / "out")
    assert "> run: The log is empty" in (tmp_path / "out" / "report.md").read_text()


def test_one_run_of_a_group_lacks_something(tmp_path):
    full, bare = line_log(entropy=lambda s: 0.1), line_log()
    paths = [write_run(tmp_path / "s0", full, seed=0), write_run(tmp_path / "s1", bare, seed=1)]
    data = make_report(paths, tmp_path / "out")
    assert lines(data, "entropy")["s0 (2 seeds)"]["y"] == [0.1] * 4
    assert "> Entropy: nothing known of s1." in (tmp_path / "out" / "report.md").read_text()


def test_the_newest_state_is_read(tmp_path):
    """A run stopped and resumed: its folder holds the end of the first part, a checkpoint goes further."""
    run = write_run(tmp_path / "run", line_log((10, 20)))
    write_run(run, line_log((10, 20, 30)), checkpoint=30)
    write_run(run, line_log((10,)), checkpoint=9, learning_rate=1.0)
    found = load_run(run)
    assert found.steps == 30 and len(found.log) == 3 and found.args["learning_rate"] == 1e-6
    assert load_run(run / "checkpoint-9").steps == 9


@pytest.mark.parametrize("root_is_newer", [True, False])
def test_another_runs_state_in_the_folder_is_told_apart(tmp_path, root_is_newer):
    """A longer run left its checkpoint behind, or was begun in the folder of a shorter one: the log that is newer counts."""
    run = write_run(tmp_path / "run", line_log((10, 20), reward=lambda s: 0.9))
    write_run(run, line_log((10, 20, 30), reward=lambda s: 0.1), checkpoint=30)
    os.utime((run if root_is_newer else run / "checkpoint-30") / "trainer_state.json", (2e9, 2e9))
    found = load_run(run)
    assert (found.steps, found.log[0]["reward"]) == ((20, 0.9) if root_is_newer else (30, 0.1))
    [note] = [note for note in found.notes if "of another run in the same folder" in note]
    assert ("checkpoint-30" in note) == root_is_newer


def test_a_run_killed_while_saving_is_read_from_the_checkpoint_before(tmp_path):
    run = write_run(tmp_path / "run", line_log((10,)), checkpoint=10)
    (run / "checkpoint-20").mkdir()
    (run / "checkpoint-30").mkdir()
    (run / "checkpoint-30" / "trainer_state.json").write_text('{"log_hist')
    assert load_run(run).steps == 10
    (run / "checkpoint-10" / "trainer_state.json").unlink()
    with pytest.raises(ValueError, match=r"checkpoint-30.trainer_state\.json cannot be read as JSON"):
        load_run(run)


@pytest.mark.parametrize(
    ("names", "label"),
    [
        (["erpo-seed0", "erpo-seed1"], "erpo"),
        (["erpo-seed10", "erpo-seed11"], "erpo"),
        (["runs1", "runs2"], "runs"),
        (["bias0", "bias1"], "bias"),
        (["weights-1", "weights-2"], "weights"),
        (["run_s1", "run_s12"], "run"),
        (["2026-12-01", "2026-12-02"], "2026-12"),
        (["erpo2", "erpo2b"], "erpo2"),
        (["a-erpo", "b-erpo"], "erpo"),
        (["0", "1"], ""),
    ],
)
def test_what_names_of_seeds_share(names, label):
    assert shared_name(names) == label


def test_other_rewards_are_no_accuracy(tmp_path):
    """A mean reward of 1.7 beside an accuracy of 0.4 is no gap of 130 points."""
    run = write_run(tmp_path / "run", line_log(range(1, 13), reward=lambda s: 1.7 + 0.01 * (s % 3)))
    write_evaluation(run / "eval", run, {"a": {"1": 0.4}})
    data = make_report([run], tmp_path / "out")
    assert data["gaps"] == [] and all(entry["with"] == "entropy" for entry in data["cross_lag"])
    text = (tmp_path / "out" / "report.md").read_text()
    assert "run has no evaluated checkpoint, or was not trained with accuracy_reward" in text
    assert "too few logs of Query-KL and accuracy in run" in text


def test_a_checkpoint_evaluated_twice_hides_no_other(tmp_path):
    run = write_run(tmp_path / "run", line_log())
    write_evaluation(run / "e10", run / "checkpoint-10", {"a": {"1": 0.1}})
    write_evaluation(run / "e20", run / "checkpoint-20", {"a": {"1": 0.2}})
    write_evaluation(run / "again", run / "checkpoint-20", {"a": {"1": 0.4}}, samples=8)
    accuracy = lines(make_report([run], tmp_path / "out"), "learning", 1)["run"]
    assert accuracy["x"] == [10, 20] and accuracy["y"] == pytest.approx([0.1, 0.3])


def test_numbers_that_are_not_finite_are_left_out_and_counted(tmp_path):
    """An overflow in one query must not take the report, nor the images of a run that goes on."""
    nan, inf = float("nan"), float("inf")
    kept = {40: queries([nan, 2, inf, 3], [1, 2, 3, 4], weight=[nan, 1.0, 0.5, inf])}
    run = write_run(tmp_path / "run", line_log(**SERIES), queries=kept)
    data = make_report([run], tmp_path / "out")
    assert data["plots"]["nll"]["panels"][0]["x"] == [2, 3]
    assert data["plots"]["weights"]["edges"][0] == 0.5 and data["plots"]["weights"]["edges"][-1] == 1.0
    assert "Weights of 2 of 4 queries are no finite numbers" in (tmp_path / "out" / "report.md").read_text()
    columns = {name: np.array([nan, 1.0, inf], dtype=np.float32) for name in ("weight", "nll_drift")}
    images = live_images(line_log(), {"step": np.array([1, 1, 1]), "kl": np.full(3, nan), **columns})
    assert set(images) == {"plots/curves", "plots/queries"}


def test_many_files_of_queries_are_read_once(tmp_path, monkeypatch):
    """Not each against all before it: a run that writes one a step has thousands."""
    run = write_run(tmp_path / "run", line_log(), queries={step: queries([step], [1]) for step in range(1, 41)})
    reads, isin = [], np.isin
    monkeypatch.setattr(np, "isin", lambda steps, known: reads.append(len(steps)) or isin(steps, known))
    assert read_queries(run)["nll"].tolist() == list(range(1, 41))
    assert sum(reads) == 40


def test_a_later_file_of_queries_replaces_the_steps_of_an_earlier(tmp_path):
    run = write_run(tmp_path / "run", line_log(), queries={10: queries([1], [1])})
    write_run(tmp_path / "more", line_log(), queries={10: queries([5], [5])})
    (tmp_path / "more" / "queries" / "queries_00010-00010.parquet").rename(run / "queries" / "queries_00012.parquet")
    assert read_queries(run)["nll"].tolist() == [5]
    (run / "queries" / "queries_00012.parquet").write_bytes(b"PAR1 but no more")
    with pytest.raises(ValueError, match=r"queries_00012\.parquet cannot be read"):
        read_queries(run)


# ------------------------------------------------------------------------------------------------------- command and files
class Outside(html.parser.HTMLParser):
    """Everything in a page that a browser would fetch or run."""

    def __init__(self):
        super().__init__()
        self.tags, self.references, self.images = set(), [], []

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        for name, value in attributes:
            if name in ("src", "href", "srcset", "data", "poster", "action", "background") or name.startswith("on"):
                (self.images if (value or "").startswith("data:image/png;base64,") else self.references).append(value)


def test_html_needs_nothing_else(tmp_path, drawn):
    runs = two_seeds(tmp_path)
    kept = {40: queries([1, 2, 3, 4], [2, 4, 6, 9], weight=[0.0, 1.0, 1.0, 2.0])}
    evil = write_run(tmp_path / "_$\\x{<script src=x>&|", line_log(**SERIES), queries=kept)
    write_evaluation(evil / "eval", evil, {"a": {"0.1": 0.4, "1": 0.4}})
    make_report([*runs, evil], tmp_path / "out")
    page = (tmp_path / "out" / "report.html").read_text()
    found = Outside()
    found.feed(page)
    assert found.references == ["data:,"]  # no icon is fetched
    assert not found.tags & {"script", "iframe", "object", "embed", "base", "form"}
    assert "@import" not in page and "url(" not in page and "http" not in page
    pictures = [base64.b64decode(image.partition(",")[2]) for image in found.images]
    stored = [path.read_bytes() for path in (tmp_path / "out").glob("*.png")]
    assert pictures and sorted(pictures) == sorted(stored) and all(picture.startswith(PNG) for picture in pictures)
    assert (
        "&lt;script src=x&gt;&amp;|" in page
        and "&lt;script src=x>&\\|" in (tmp_path / "out" / "report.md").read_text()
    )
    assert {path.suffix for path in (tmp_path / "out").iterdir()} == {".png", ".svg", ".html", ".md", ".json"}


def test_command_writes_and_writes_again(tmp_path, capsys):
    runs = [str(path) for path in two_seeds(tmp_path)]
    output = tmp_path / "deep" / "out"
    assert cli.main(["report", *runs, "--output", str(output)]) == 0
    assert f"Written to {output}" in capsys.readouterr().out
    # A plot that this run has not the data for goes; what a user put beside the report stays
    assert (output / "entropy.png").exists()
    (output / "mine").mkdir()
    (output / "mine" / "notes.txt").write_text("mine")
    bare = write_run(tmp_path / "bare", line_log())
    assert cli.main(["report", str(bare), "--output", str(output), "--names", "alone"]) == 0
    assert not (output / "entropy.png").exists() and "alone" in (output / "report.md").read_text()
    assert (output / "mine" / "notes.txt").read_text() == "mine"
    assert [path.name for path in output.parent.iterdir()] == ["out"]


def test_an_output_below_a_file_is_refused_before_the_work(tmp_path, monkeypatch):
    run = write_run(tmp_path / "run", line_log())
    (tmp_path / "file").touch()
    monkeypatch.setattr(command, "build", lambda *args: 1 / 0)
    with pytest.raises(ValueError, match=r"file/out cannot be made: .*file is no folder"):
        make_report([run], tmp_path / "file" / "out")


def test_a_report_is_whole_or_not_there(tmp_path, monkeypatch):
    runs = two_seeds(tmp_path)
    make_report(runs, tmp_path / "out")
    before = (tmp_path / "out" / "report.html").read_bytes()
    monkeypatch.setattr(command, "as_markdown", lambda *args: 1 / 0)
    for output in ("out", "new"):
        with pytest.raises(ZeroDivisionError):
            make_report(runs[:1], tmp_path / output)
    assert (tmp_path / "out" / "report.html").read_bytes() == before
    assert not (tmp_path / "new").exists() and not list(tmp_path.glob(".*"))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("trainer_state.json", "{", "trainer_state.json cannot be read as JSON"),
        ("trainer_state.json", "[]", "trainer_state.json holds no JSON object but a list"),
        ("trainer_state.json", '{"log_history": [{"loss": 1}]}', "log_history must be a list of entries with a step"),
        ("erpo_state.json", "nonsense", "erpo_state.json cannot be read as JSON"),
        ("eval/metrics.json", "{'a'}", "metrics.json cannot be read as JSON"),
        ("eval/metrics.json", '{"model": 3}', "eval is not an output folder of erpo-trl eval"),
    ],
)
def test_broken_files_are_named(tmp_path, capsys, name, content, message):
    run = write_run(tmp_path / "run", line_log())
    (run / "eval").mkdir()
    (run / "eval" / "samples.parquet").touch()
    (run / name).write_text(content)
    assert cli.main(["report", str(run), "--output", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert message in error and str(run) in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_refusals(tmp_path, capsys):
    run = write_run(tmp_path / "run", line_log())
    (tmp_path / "empty").mkdir()
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "notes.txt").write_text("keep me")
    for arguments, message in (
        ([tmp_path / "nowhere"], "nowhere is no folder"),
        ([tmp_path / "empty"], "empty has no trainer_state.json, nor has a checkpoint in it"),
        ([run, run], "a run is given twice"),
        ([run, "--names", "a", "b"], "names must be as many as runs: found 2 and 1"),
        ([run, "--evaluations", mine], "mine is not an output folder of erpo-trl eval"),
        ([run, "--output", mine], "mine exists and is no report"),
    ):
        assert cli.main(["report", "--output", str(tmp_path / "out"), *map(str, arguments)]) == 2
        assert message in capsys.readouterr().err
    assert (mine / "notes.txt").read_text() == "keep me" and not (tmp_path / "out").exists()


def test_a_checkpoint_has_the_queries_up_to_its_step(tmp_path):
    """They lie in the run's folder, beside it."""
    steps = {step: queries([2.0, 3.0], [1.0, 1.5]) for step in (10, 20)}
    write_run(tmp_path / "run", line_log((10, 20)), queries=steps)
    write_run(tmp_path / "run", line_log((10,)), checkpoint=10)
    run = load_run(tmp_path / "run" / "checkpoint-10")
    assert run.queries["step"].tolist() == [10, 10] and not any("query_log_steps" in note for note in run.notes)
