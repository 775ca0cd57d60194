"""`erpo-trl demo` and the demo recipe, from start to written files, with two steps in place of the real length."""

import json

import pytest

from erpo_trl import cli
from erpo_trl.demo import regions
from erpo_trl.demo.run import METHODS, TEMPERATURES, table
from erpo_trl.train import main as train

QUICK = ["--max_steps", "2", "--per_device_train_batch_size", "64", "--logging_steps", "1"]


@pytest.mark.slow
def test_demo_writes_what_it_measured(tmp_path, capsys, monkeypatch):
    """Both methods train in processes of their own; table, plot, logs and models are left behind."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    out = tmp_path / "demo"
    assert cli.main(["demo", "--output", str(out), "--held_out", "4", *QUICK]) == 0
    metrics = json.loads((out / "metrics.json").read_text())
    assert set(metrics["after"]) == set(METHODS)
    for method, result in metrics["after"].items():
        assert result["steps"] == 2
        assert [point["step"] for point in result["drift"]] == [0, 2]
        assert result["drift"][0] == {
            "step": 0,
            "query_kl": pytest.approx(0, abs=1e-9),
            "policy_kl": pytest.approx(0, abs=1e-6),
        }
        assert result["query_kl"] > 1e-9
        folder = out / method.lower()
        assert (folder / "model" / "model.safetensors").stat().st_size > 0
        logs = [log for log in json.loads((folder / "log_history.json").read_text()) if "query/alpha" in log]
        assert {log["query/alpha"] for log in logs} == {0.01 if method == "ERPO" else 0.0}
        assert ("kl" in logs[0]) == (method == "GRPO")
    assert (out / "drift.png").read_bytes().startswith(b"\x89PNG")
    text = (out / "table.md").read_text()
    assert text.strip() in capsys.readouterr().out
    assert "after ERPO" in text and "after GRPO" in text


def test_a_file_in_the_place_of_the_folder_is_named(capsys):
    assert cli.main(["demo", "--output", __file__]) == 2
    assert f"--output: {__file__} is a file; give a folder" in capsys.readouterr().err


def test_table_prints_the_results():
    """Every cell comes from the results."""
    before = dict.fromkeys(TEMPERATURES, 0.25)
    result = {
        "accuracy": {str(t): 0.5 for t in TEMPERATURES},
        "query_kl": 0.0123,
        "policy_kl": 0.4567,
        "seconds_per_step": 1.5,
        "peak_memory_mb": 700.4,
    }
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table(before, {"ERPO": result}).splitlines()]
    assert rows[2] == ["before", *["0.250"] * 4, "0", "0", "", ""]
    assert rows[3] == ["after ERPO", *["0.500"] * 4, "0.0123", "0.4567", "1.50", "700"]


def test_demo_recipe_runs(tmp_path):
    """The shipped recipe, shortened on the command line as a user would."""
    from pathlib import Path

    recipe = Path(__file__).parents[1] / "recipes" / "demo.yaml"
    paths = ["--output_dir", str(tmp_path / "out"), "--reference_cache_dir", str(tmp_path / "reference")]
    train(["--config", str(recipe), *QUICK, *paths])
    assert (tmp_path / "out" / "model.safetensors").stat().st_size > 0


def test_every_kind_of_region_runs_off_policy(tmp_path, capsys):
    """The comparison behind docs/trust_regions.md: a region, one that needs the likeliest tokens, and TRL's clip."""
    rows = ["drpo", "dppo_topk_kl", "ratio_clip"]
    regions.main(
        ["--output", str(tmp_path), "--held_out", "2", "--only", *rows, "--max_steps", "4", "--use_cpu", "true"]
        + ["--per_device_train_batch_size", "16", "--reference_cache_dir", str(tmp_path / "reference")]
    )
    results = json.loads((tmp_path / "results.json").read_text())["results"]
    assert list(results) == rows
    for name in rows[:2]:
        assert results[name]["shift_max"] > 0 and results[name]["weight_max"] >= 1
    lines = (tmp_path / "table.md").read_text().splitlines()
    assert [line.split("|")[1].strip() for line in lines[2:]] == rows
    assert "delta 0.05" in lines[3]
