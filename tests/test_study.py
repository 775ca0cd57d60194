"""The study: its recipes, what a stopped or changed study leaves, and the numbers of its pages."""

import json
import math
import multiprocessing
import os
import shutil
import signal
import threading
from multiprocessing import forkserver
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from erpo_trl import cli
from erpo_trl.cli import InputError
from erpo_trl.demo import MODEL_DIR
from erpo_trl.locking import claimed, is_claimed
from erpo_trl.study import measure, plots
from erpo_trl.study.command import choose, distinct_runs, listing
from erpo_trl.study.recipe import RunSpec, read_questions
from erpo_trl.study.records import DIGITS, digits, find_records, read_record, rounded, thinned_log, write_record
from erpo_trl.study.runner import _start, expected_seconds, run_all
from erpo_trl.study.statistics import (
    Interval,
    log_interval,
    mean_interval,
    paired_difference,
    paired_ratio,
    t_quantile,
)
from erpo_trl.study.summary import gather, write_pages
from erpo_trl.study.tables import accuracy_table, cell, difference_table, end_table, gap_table
from erpo_trl.study.worker import Lab, run_once, train_once, write_data
from erpo_trl.trainer import ERPOTrainer

ROOT = Path(__file__).parents[1]
QUESTIONS = sorted((ROOT / "recipes" / "study").glob("*.yaml"))
ON_SMOLLM2 = sorted((ROOT / "recipes" / "study" / "smollm2").glob("*.yaml"))
TINY = {
    "train": {
        "model_name_or_path": "demo", "max_steps": 2, "per_device_train_batch_size": 8, "num_generations": 4,
        "max_completion_length": 8, "learning_rate": 3e-4, "lr_scheduler_type": "constant", "bf16": False, "logging_steps": 1,
        "query_log_steps": 0, "save_strategy": "no", "disable_tqdm": True,
    },
    "data": {"levels": [1], "train": 16, "held_out": 3, "seed": 0},
    "evaluation": {"temperatures": [1.0], "samples": 2, "responses": 1},
}  # fmt: skip


def write_study(folder: Path, base=None, **questions) -> list[Path]:
    """A base and questions as files. Args: base: what differs from `TINY`; questions: name -> keys that differ."""
    folder.mkdir(exist_ok=True)
    content = {key: {**part, **(base or {}).get(key, {})} for key, part in TINY.items()}
    (folder / "base.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    paths = []
    for name, keys in questions.items():
        question = {
            "question": name, "title": "Is it?", "claim": "It is.", "base": "base.yaml", "seeds": [0], "variants": {"erpo": {}},
        } | keys  # fmt: skip
        paths.append(folder / f"{name}.question.yaml")
        paths[-1].write_text(yaml.safe_dump(question, sort_keys=False))
    return paths


def runs_of(folder: Path, **keys) -> list[RunSpec]:
    questions, _ = read_questions(write_study(folder, q=keys))
    return distinct_runs(questions)


def fake_content(run: RunSpec, right=((1, 2), (0, 0)), questions=("q",), **content) -> dict:
    """A record's content with numbers of our own. Args: right: per temperature 0.5 and 1.0, of each problem's two samples."""
    temperatures = {t: {"samples": 2, "right": "".join(map(str, r))} for t, r in zip(("0.5", "1"), right)}
    return {
        "name": run.name, "hash": run.key, "seed": run.seed, "questions": list(questions), "settings": run.settings,
        "commit": "abc", "versions": {}, "seconds": {"train": 10.0}, "resumed": False,
        "log": thinned_log([{"step": 1, "reward": 0.5}]), "evaluations": [{"step": run.steps, "temperatures": temperatures}],
        "drift": {"query_kl_train": 0.1, "query_kl_held_out": 0.2, "policy_kl": 0.3, "entropy": 1.0},
        "nll": {"points": 2, "pearson": 0.5, "spearman": 0.5, "partial": 0.1},
    } | content  # fmt: skip


def fake_record(folder: Path, run: RunSpec, *args, **content) -> None:
    write_record(folder / f"{run.slug}.json", fake_content(run, *args, **content))


# ------------------------------------------------------------------------------------------------------------------ recipes
def test_shipped_questions_have_their_seeds_and_share_runs():
    questions, model = read_questions(QUESTIONS)
    assert [q.name for q in questions] == [
        "drift", "accuracy", "algorithms", "long_horizon", "ingredients", "staleness", "nll",
    ]  # fmt: skip
    assert model == "demo"
    seeds = {q.name: len(next(iter(q.runs.values()))) for q in questions}
    assert all(seeds[name] >= 5 for name in ("drift", "accuracy", "staleness")) and min(seeds.values()) >= 3
    for question in questions:
        assert question.summary["baseline"] in question.runs
        assert all(name in question.runs for pair in question.summary.get("pairs", ()) for name in pair)
        for runs in question.runs.values():
            assert runs[0].settings["data"]["held_out"] >= 500
            # Whole generation batches, or rows would be left over
            train = runs[0].settings["train"]
            queries = (
                train["per_device_train_batch_size"] * train.get("steps_per_generation", 1) // train["num_generations"]
            )
            assert runs[0].settings["data"]["train"] % queries == 0
    drift, accuracy = questions[:2]
    assert drift.runs["erpo"] == accuracy.runs["erpo"]
    every = sum(len(runs) for q in questions for runs in q.runs.values())
    shared = {run.slug for q in questions for runs in q.runs.values() for run in runs}
    assert len(distinct_runs(questions)) == len(shared) < every


def test_questions_on_a_real_model_are_of_its_own_base(monkeypatch):
    """Their weights are not here; everything else of the recipes is read as a study reads it."""
    monkeypatch.setattr("erpo_trl.study.recipe._weights", lambda model: "weights")
    questions, model = read_questions(ON_SMOLLM2)
    assert model == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert [q.name for q in questions] == ["drift", "accuracy", "staleness"]
    for question in questions:
        assert all(len(runs) == 2 for runs in question.runs.values())
        assert {bool(runs[0].settings["train"].get("use_peft")) for runs in question.runs.values()} == {True, False}
    runs = distinct_runs(questions)
    assert len(runs) == 24 and all(run.settings["model"] == "weights" for run in runs)
    assert questions[0].runs["lora-erpo"] == questions[1].runs["lora-erpo"]


def test_runs_of_one_setting_and_seed_are_one(tmp_path):
    """Whatever the question, and whether an option stands in the question or in the variant."""
    paths = write_study(
        tmp_path,
        a={"seeds": [0, 1], "variants": {"erpo": {}, "long": {"max_steps": 3}}},
        b={"seeds": [1, 2], "train": {"max_steps": 3}, "variants": {"long": {}}},
    )
    runs = distinct_runs(read_questions(paths)[0])
    assert [(run.name, run.seed) for run in runs] == [
        ("erpo", 0), ("long", 0), ("erpo", 1), ("long", 1), ("long", 2),
    ]  # fmt: skip
    assert len({run.key for run in runs}) == 2


def test_one_setting_under_two_names_is_refused(tmp_path):
    paths = write_study(tmp_path, a={}, b={"variants": {"other": {}}})
    with pytest.raises(InputError, match=r"b\.question\.yaml: 'other' has the settings of 'erpo'; call both 'erpo'"):
        read_questions(paths)


@pytest.mark.parametrize(
    "keys, message",
    [
        ({"variant": {}}, r"unknown key 'variant' \(did you mean variants\?\)"),
        ({"seeds": [0, 0]}, r"seeds must be a list of different whole numbers, found \[0, 0\]"),
        ({"variants": {"a b": {}}}, "a variant's name is part of file names: .*'a b'"),
        ({"variants": {"a": {"seed": 3}}}, "a: seed is the study's to set; take it out"),
        (
            {"variants": {"a": {"query_kl_coeff": 1}}},
            r"q\.question\.yaml, a: unknown option .*did you mean query_kl_coef\?",
        ),
        ({"variants": {"a": {"beta": "x"}}}, r"q\.question\.yaml, a: an option's value cannot be read, see above"),
        ({"evaluation": {"samples": 10}}, "evaluation: samples must be 1 to 9, found 10"),
        (
            {"evaluation": {"checkpoints": True}},
            "erpo: evaluation.checkpoints needs save_strategy: steps, and save_steps",
        ),
        ({"evaluation": {"temperatures": "warm"}}, "temperatures: 'warm' is neither a number nor a range"),
        ({"summary": {"baseline": "grpo"}}, "summary: there is no variant 'grpo'; there are erpo"),
        ({"base": "nowhere.yaml"}, r"no file .*nowhere\.yaml"),
        ({"base": 5}, r"q\.question\.yaml: base must be text, found 5"),
        ({"claim": 5}, "claim must be text, found 5"),
        ({"train": ["x"]}, r"q\.question\.yaml, train: must map names to values, found \['x'\]"),
        ({"train": "x"}, "train: must map names to values, found 'x'"),
        ({"summary": 5}, "summary: must map names to values, found 5"),
        ({"summary": {"pairs": ["ab"]}}, r"summary: lines must be a list .* found \[\] and \['ab'\]"),
        ({"variants": {"a": {"max_steps": "many"}}}, "a: max_steps must be a whole number >= 0, found 'many'"),
        ({"evaluation": {"temperatures": None}}, "evaluation: temperatures must be a list, found None"),
        ({"question": "../../evil"}, "a question's name is part of file names: .*evil"),
        ({"question": "index"}, "question 'index' would have the page that lists all questions"),
    ],
)
def test_a_wrong_question_is_refused_before_anything_runs(tmp_path, keys, message):
    with pytest.raises(InputError, match=message):
        read_questions(write_study(tmp_path, q=keys))


@pytest.mark.parametrize(
    "part, value, message",
    [
        ("data", None, r"base\.yaml, data: must map names to values, found None"),
        ("train", None, r"base\.yaml, train: must map names to values, found None"),
        ("evaluation", [1], r"base\.yaml, evaluation: must map names to values, found \[1\]"),
        ("data", {**TINY["data"], "levels": 1}, "levels must be of .*, found 1"),
        (
            "train",
            {"model_name_or_path": None, "max_steps": 1},
            "model_name_or_path must be a folder or hub id, found None",
        ),
    ],
)
def test_a_wrong_base_is_refused(tmp_path, part, value, message):
    paths = write_study(tmp_path, q={})
    (tmp_path / "base.yaml").write_text(yaml.safe_dump({**TINY, part: value}))
    with pytest.raises(InputError, match=message):
        read_questions(paths)


def test_a_recipe_in_another_encoding_is_named(tmp_path):
    [path] = write_study(tmp_path, q={})
    path.write_bytes(path.read_bytes() + "# é".encode("latin-1"))
    with pytest.raises(InputError, match=r"q\.question\.yaml is not in UTF-8"):
        read_questions([path])


def test_a_file_in_the_place_of_a_folder_is_named(tmp_path, capsys):
    [path] = write_study(tmp_path, q={})
    for option in ("--output", "--work", "--smoke"):
        assert cli.main(["study", "--config", str(path), "--summarise", option, str(path)]) == 2
        assert f"{option}: {path} is a file; give a folder" in capsys.readouterr().err


def test_a_missing_key_and_an_unknown_question_are_named(tmp_path):
    path = tmp_path / "q.yaml"
    path.write_text("question: q\n")
    with pytest.raises(InputError, match=r"q\.yaml: 'title' is missing"):
        read_questions([path])
    questions, _ = read_questions(write_study(tmp_path, a={}, b={}))
    with pytest.raises(InputError, match=r"--questions: there is no question 'c'; there are a, b"):
        choose(questions, ["c"])


def test_data_is_disjoint_and_different(tmp_path):
    run = runs_of(tmp_path / "q")[0]
    folder = write_data(run, tmp_path)
    texts = {
        name: [json.loads(line)["problem"] for line in (folder / f"{name}.jsonl").read_text().splitlines()]
        for name in ("train", "held_out")
    }
    assert {name: len(set(found)) for name, found in texts.items()} == {"train": 16, "held_out": 3}
    digits = [{"".join(c for c in text if c in "0123456789+-*") for text in found} for found in texts.values()]
    assert not set.intersection(*digits)
    settings = {**run.settings, "data": {**run.settings["data"], "held_out": 500}}
    with pytest.raises(ValueError, match=r"levels \[1\] do not offer 500 different held_out problems"):
        write_data(RunSpec("erpo", 0, settings), tmp_path)


# ------------------------------------------------------------------------------------------------------------------ records
def test_a_record_of_other_settings_is_named_and_not_used(tmp_path):
    [run] = runs_of(tmp_path / "q")
    fake_record(tmp_path, run)
    fake_record(tmp_path, RunSpec("erpo", 5, run.settings), questions=["elsewhere"])
    questions, _ = read_questions(write_study(tmp_path / "q", q={}))
    records, notes = find_records(tmp_path, questions)
    assert list(records) == [run.slug] and notes == []

    questions, _ = read_questions(write_study(tmp_path / "q", q={"train": {"max_steps": 3, "beta": 0.5}}))
    records, notes = find_records(tmp_path, questions)
    assert records == {}
    assert notes == [
        f"{tmp_path / run.slug}.json: it was run with other settings than the recipe's (train.max_steps 2, now 3; "
        "train.beta unset, now 0.5): not used"
    ]
    questions, _ = read_questions(write_study(tmp_path / "q", q={"variants": {"other": {}}}))
    assert find_records(tmp_path, questions)[1] == [
        f"{tmp_path / run.slug}.json: the recipe has no variant 'erpo' with seed 0 any more: not used"
    ]


def test_a_record_changed_by_hand_or_cut_off_is_not_used(tmp_path):
    [run] = runs_of(tmp_path / "q")
    fake_record(tmp_path, run)
    path = tmp_path / f"{run.slug}.json"
    text = path.read_text()
    path.write_text(text.replace('"max_steps": 2', '"max_steps": 4'))
    questions, _ = read_questions(write_study(tmp_path / "q", q={}))
    records, [note] = find_records(tmp_path, questions)
    assert records == {} and "not of its name: not used; was it changed or renamed by hand?" in note
    path.write_text(text[:-10])
    records, [note] = find_records(tmp_path, questions)
    assert records == {} and f"{path} is no record" in note and "delete it to run it anew" in note


def test_record_keeps_what_was_written(tmp_path):
    [run] = runs_of(tmp_path / "q")
    log = [{"step": s, "reward": s / 3, "loss": 1.0} for s in (1, 2, 3)] + [{"step": 2, "kl": float("nan")}]
    log.append({"step": 3, "query/kl": 1.23456789e-7, "num_tokens": 5})
    fake_record(tmp_path, run, ((2, 0), (1, 1)), log=thinned_log(log))
    record = read_record(tmp_path / f"{run.slug}.json")
    steps, values = record.series("nothing", "reward")
    assert steps.tolist() == [1, 2, 3] and values.tolist() == [0.33333, 0.66667, 1.0]
    assert record.series("query/kl")[1].tolist() == [1.2346e-7]
    assert not len(record.series("kl")[0]) and "num_tokens" not in record.content["log"]["series"]
    assert record.content["log"]["series"]["loss"][0] == record.content["log"]["series"]["reward"][0]
    assert record.right(0.5).tolist() == [1.0, 0.0] and record.right(1.0).tolist() == [0.5, 0.5]
    assert record.temperatures == [0.5, 1.0]


def test_counts_are_a_digit_each():
    assert digits([0, 4, 9]) == "049"
    for counts in ([1, 10], [-1], []):
        with pytest.raises(ValueError, match="counts must be 0 to 9"):
            digits(counts)


def test_rounding_keeps_five_digits_and_drops_what_json_lacks():
    found = rounded({"a": np.array([123456.7, 1e-9 / 3]), "b": (float("nan"), 7), "c": "0.123456789"})
    assert found == {"a": [123460.0, 3.3333e-10], "b": [None, 7], "c": "0.123456789"}
    assert DIGITS == 5


def test_expected_time_follows_the_runs_that_are_done(tmp_path):
    questions, _ = read_questions(
        write_study(
            tmp_path / "q", q={"seeds": [0, 1], "variants": {"short": {"max_steps": 50}, "long": {"max_steps": 350}}}
        )
    )
    short, long, short_1, long_1 = distinct_runs(questions)
    assert expected_seconds(long, []) == 400  # a second a step, and 50 steps' worth of everything else
    fake_record(tmp_path, short, seconds={"train": 30.0, "evaluate": 20.0})
    records, _ = find_records(tmp_path, questions)
    done = list(records.values())
    assert expected_seconds(short_1, done) == 50
    assert expected_seconds(long, done) == 0.5 * 400
    text = listing(
        questions, records, {run.slug: expected_seconds(run, done) for run in (short, short_1, long, long_1)}, 2
    )
    assert "q: 1 of 4 runs done, 0.1 core hours left" in text and "seeds 0+ 1-" in text
    assert (
        "In all 3 runs left, expected 0.1 core hours, 0.1 hours with 2 at a time (by the runs that are done)" in text
    )


# --------------------------------------------------------------------------------------------------------------------- runs
def test_a_run_that_broke_off_goes_on_from_its_checkpoint_as_if_nothing_had_been(tmp_path, monkeypatch):
    [run] = runs_of(
        tmp_path / "q",
        train={"max_steps": 4, "save_strategy": "steps", "save_steps": 2},
        evaluation={"checkpoints": True},
    )
    step = ERPOTrainer.training_step

    def failing(self, *args, **kwargs):
        if self.state.global_step == 3:
            raise RuntimeError("power cut")
        return step(self, *args, **kwargs)

    models, records = {}, {}
    for name in ("whole", "broken"):
        work, kept = tmp_path / name, tmp_path / f"records-{name}"
        folder = work / "runs" / run.slug
        folder.mkdir(parents=True)
        write_data(run, work)
        if name == "broken":
            with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="power cut"):
                patch.setattr(ERPOTrainer, "training_step", failing)
                run_once(run, "demo", work, kept, ["q"], "c")
            assert not kept.exists()
        run_once(run, "demo", work, kept, ["q"], "c")
        models[name] = (folder / "model" / "model.safetensors").read_bytes()
        records[name] = read_record(kept / f"{run.slug}.json").content
        assert records[name]["resumed"] == (name == "broken")
        assert [entry["step"] for entry in records[name]["evaluations"]] == [2, 4]
        assert not list((folder / "model").glob("checkpoint-*"))  # what is recorded need not fill the disk
        with monkeypatch.context() as patch:  # trained already: found, not done again
            patch.setattr("erpo_trl.study.worker.train", None)
            assert train_once(run, "demo", folder, work)[1] == (name == "broken")
    assert models["whole"] == models["broken"]
    for part in ("evaluations", "drift"):
        assert records["whole"][part] == records["broken"][part]
    assert records["whole"]["drift"]["query_kl_train"] > 1e-9 and records["whole"]["drift"]["policy_kl"] > 1e-9


def test_a_run_is_evaluated_on_prompts_rendered_as_in_training(tmp_path):
    model = tmp_path / "model"
    shutil.copytree(MODEL_DIR, model)
    template = model / "chat_template.jinja"
    template.write_text(template.read_text().replace("{%- for", "{%- if hint -%}{{- '1+1' -}}{%- endif -%}{%- for", 1))
    prompts = {}
    for name, options in {"plain": {}, "hint": {"chat_template_kwargs": {"hint": True}}}.items():
        [run] = runs_of(tmp_path / name, train={"model_name_or_path": str(model), **options})
        lab = Lab(run, str(model), write_data(run, tmp_path))
        lab.take(str(model))
        prompts[name] = {split: [lab.tokenizer.decode(row) for row in rows] for split, rows in lab.prompts.items()}
    assert all(prompts["plain"].values())
    assert prompts["hint"] == {split: ["1+1" + text for text in rows] for split, rows in prompts["plain"].items()}


def test_a_folder_belongs_to_one_process(tmp_path):
    assert not is_claimed(tmp_path)
    with claimed(tmp_path):
        assert is_claimed(tmp_path)
        with pytest.raises(RuntimeError, match="is at work in another process; wait for it, or end it"):
            with claimed(tmp_path, patience=0):
                pass
    assert not is_claimed(tmp_path)


def test_a_run_starts_though_the_process_that_forks_it_is_ending():
    """It takes the connection, then ends: stopped, with SIGTERM pending until it goes on."""
    context = multiprocessing.get_context("forkserver")
    first = context.Process(target=int)
    first.start()
    first.join()
    server = forkserver._forkserver._forkserver_pid
    os.kill(server, signal.SIGSTOP)
    os.waitpid(server, os.WUNTRACED)  # it has stopped; of two pending signals the other would come first
    os.kill(server, signal.SIGTERM)
    threading.Timer(0.3, os.kill, (server, signal.SIGCONT)).start()
    second = context.Process(target=int)
    _start(second)
    second.join()
    assert second.exitcode == 0 and forkserver._forkserver._forkserver_pid != server


@pytest.mark.distributed
def test_a_stopped_study_goes_on_and_runs_nothing_twice(tmp_path):
    """Killed, and told to stop: what is done stays, what was at work is made anew, and a failing run ends no other."""
    write_study(tmp_path / "q", q={})
    paths = write_study(
        tmp_path / "q", q={"seeds": [0, 1, 2], "variants": {"erpo": {}, "no-kl": {"query_kl_coef": 0}}}
    )
    questions, model = read_questions(paths)
    runs = distinct_runs(questions)
    expected = {run.slug: 1.0 for run in runs}
    asked = {run.slug: ["q"] for run in runs}
    work, records = tmp_path / "work", tmp_path / "records"
    said = []

    def call(say, **more):
        there, _ = find_records(records, questions)
        left = [run for run in runs if run.slug not in there]
        return left, run_all(left, expected, model, work, records, asked, "c", say=say, **more)

    def stop_at_the_first(line):
        said.append(line)
        if line.startswith("[1/6]"):
            # One run is killed outright, then whoever stops the process group ends the process that forks them, too
            for process in multiprocessing.active_children()[:1]:
                process.kill()
            os.kill(forkserver._forkserver._forkserver_pid, signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGINT)

    _, outcome = call(stop_at_the_first)
    assert outcome.stopped and outcome.failed == []
    assert len(outcome.done) + len(outcome.left) == 6 and outcome.left
    assert {path.stem for path in records.iterdir()} == set(outcome.done)  # and nothing half-written
    assert not any(is_claimed(folder) for folder in (work / "runs").iterdir())  # nothing goes on behind our back
    before = {path.name: path.stat().st_mtime_ns for path in records.iterdir()}

    # In the way of one run: a file where its folder should be
    broken = outcome.left[-1]
    folder = work / "runs" / broken
    if folder.is_dir():
        folder.rename(tmp_path / "aside")
    folder.parent.mkdir(parents=True, exist_ok=True)
    (work / "runs" / broken).mkdir()
    (work / "runs" / broken / "recipe.yaml").mkdir()
    left, outcome = call(said.append)
    assert [run.slug for run in left] == [run.slug for run in runs if f"{run.slug}.json" not in before]
    assert outcome.failed == [broken] and outcome.left == [] and not outcome.stopped
    assert any(line.startswith(f"{broken} failed: ") and "log.txt" in line for line in said)
    (work / "runs" / broken / "recipe.yaml").rmdir()

    left, outcome = call(said.append, max_hours=0.0)
    assert outcome.left == [broken] and outcome.done == []
    left, outcome = call(said.append)
    assert outcome.done == [broken]
    assert len(list(records.iterdir())) == 6
    assert all((records / name).stat().st_mtime_ns == at for name, at in before.items())
    # Two variants from one seed differ, two seeds of one variant too
    found, _ = find_records(records, questions)
    assert len({json.dumps(record.content["drift"]) for record in found.values()}) == 6
    assert all(record.content["commit"] == "c" and record.content["questions"] == ["q"] for record in found.values())


# Variants that stand for their question in CI; `--smoke` itself makes all of them, see the slow test
SMOKED = {
    "drift": ["grpo", "erpo"],
    "accuracy": ["grpo", "erpo", "base"],
    "algorithms": ["rloo-erpo"],
    "long_horizon": ["grpo"],
    "ingredients": ["erpo"],
    "staleness": ["updates-16-drpo-0.5"],
    "nll": ["base", "grpo", "erpo"],
}


@pytest.mark.distributed
def test_smoke_of_all_questions(tmp_path, capsys, monkeypatch):
    """From the shipped questions to their pages, two steps, two seeds."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "study"
    folder.mkdir()
    for path in QUESTIONS:
        content = yaml.safe_load(path.read_text())
        content["base"] = str(path.parent / content["base"])
        kept = SMOKED[content["question"]]
        content["variants"] = {name: content["variants"][name] for name in kept}
        content["summary"] = {"baseline": kept[0]}
        (folder / path.name).write_text(yaml.safe_dump(content, sort_keys=False))
    out = tmp_path / "out"
    files = [str(folder / path.name) for path in QUESTIONS]
    assert cli.main(["study", "--config", *files, "--smoke", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "0 failed, 0 left" in printed
    for path in QUESTIONS:
        name = yaml.safe_load(path.read_text())["question"]
        text = (out / f"{name}.md").read_text()
        assert "Not run yet" not in text
        for picture in ["training", "temperature", *["differences"][: len(SMOKED[name]) - 1]]:
            assert (out / f"{name}-{picture}.png").read_bytes().startswith(b"\x89PNG")
    assert "Signs of collapse" in (out / "long_horizon.md").read_text()
    assert (out / "nll-nll.png").is_file()
    records = [read_record(path) for path in (out / "runs").glob("*.json")]
    assert {record.seed for record in records} == {0, 1}
    base = next(record for record in records if record.name == "base")
    assert base.content["drift"]["query_kl_train"] == 0 and len(base.content["nll"]["prompt"]) == 4
    assert "| [What breaks first" in (out / "index.md").read_text()
    assert cli.main(["study", "--config", *files, "--smoke", str(out), "--list"]) == 0
    assert "In all 0 runs left" in capsys.readouterr().out


@pytest.mark.distributed
def test_smoke_of_the_real_model_s_recipes_on_another(tmp_path, capsys, monkeypatch):
    """With LoRA and worked examples in the prompt; the embedded model stands in for the real one."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "study"
    folder.mkdir()
    content = yaml.safe_load(ON_SMOLLM2[1].read_text())
    content["base"] = str(ON_SMOLLM2[1].parent / content["base"])
    content["variants"] = {name: content["variants"][name] for name in ("base", "lora-erpo")}
    content["summary"] = {"baseline": "base"}
    # The stand-in is seldom right with such a prompt, and without one right answer nothing would be learnt in two steps
    content["variants"]["lora-erpo"]["reward_funcs"] = [f"{Path(__file__).with_name('helpers.py')}:checksum_reward"]
    (folder / "accuracy.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    out = tmp_path / "out"
    asked = ["study", "--config", str(folder / "accuracy.yaml"), "--model", "demo", "--smoke", str(out)]
    assert cli.main(asked) == 0
    assert "4 runs done, 0 failed, 0 left" in capsys.readouterr().out
    records = {
        (record.name, record.seed): record.content for record in map(read_record, (out / "runs").glob("*.json"))
    }
    assert sorted(records) == [("base", 0), ("base", 1), ("lora-erpo", 0), ("lora-erpo", 1)]
    for seed in (0, 1):
        assert records["base", seed]["drift"]["query_kl_train"] == 0
        assert records["lora-erpo", seed]["drift"]["query_kl_train"] > 0
        # Two worked examples stand before each problem
        assert min(records["base", seed]["nll"]["prompt_tokens"]) > 30


@pytest.mark.slow
def test_smoke_of_all_variants(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    assert cli.main(["study", "--config", *map(str, QUESTIONS), "--smoke", str(tmp_path / "out")]) == 0
    assert "0 failed, 0 left" in capsys.readouterr().out


# ------------------------------------------------------------------------------------------------------------- measurements
def test_drifts_against_sums_by_hand():
    """k3 and NLL of prompts, and the whole KL on responses, against a loop over tokens without padding or batches."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from erpo_trl.evaluation.backends import TransformersBackend

    base = AutoModelForCausalLM.from_pretrained(MODEL_DIR).eval()
    model = AutoModelForCausalLM.from_pretrained(MODEL_DIR).eval()
    with torch.no_grad():
        torch.manual_seed(0)
        for parameter in model.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR, padding_side="left")
    prompts = [tuple(tokenizer(text)["input_ids"]) for text in ("1+2", "What is 3*4-5?", "7-7=?")]
    found = measure.prompt_drift(model, base, prompts, tokenizer.pad_token_id)

    def logps(m, ids):
        with torch.no_grad():
            return m(torch.tensor([ids])).logits[0].double().log_softmax(-1)

    kl, nll = [], []
    for ids in prompts:
        now, before = (logps(m, ids)[range(len(ids) - 1), list(ids[1:])] for m in (model, base))
        x = before - now
        kl.append((x.exp() - x - 1).mean().item())
        nll.append(-now.sum().item())
    assert found.query_kl == pytest.approx(sum(kl) / 3, rel=1e-4) and found.query_kl > 1e-4
    assert found.nll.tolist() == pytest.approx(nll, rel=1e-5)
    assert found.tokens.tolist() == [len(ids) - 1 for ids in prompts]

    backend = TransformersBackend(model, tokenizer, 1000)
    drift = measure.response_drift(model, base, prompts, backend, 2, 0, 6)
    requests = measure.make_requests(measure.BENCHMARK, prompts, 1.0, 2, 0, 6, None, own_draw=False)
    total, count, response_nll = 0.0, 0, []
    for request in requests:
        [draw] = backend.generate([request])
        ids, first = [*request.prompt_ids, *draw.token_ids], len(request.prompt_ids)
        now, before = (logps(m, ids)[first - 1 : -1] for m in (model, base))
        total += (now.exp() * (now - before)).sum().item()
        count += len(draw.token_ids)
        response_nll.append(-now[range(len(draw.token_ids)), draw.token_ids].sum().item())
    assert drift.policy_kl == pytest.approx(total / count, rel=1e-3)
    pairs = np.array(response_nll).reshape(3, 2).mean(1)
    assert drift.nll.tolist() == pytest.approx(pairs.tolist(), rel=1e-4, abs=1e-5)
    same = measure.response_drift(base, base, prompts, TransformersBackend(base, tokenizer, 1000), 1, 0, 6)
    assert same.policy_kl == 0


def test_batches_keep_to_tokens_and_logits():
    """Padding counts; a row that is too long by itself stands alone."""
    rows = [(0,) * n for n in (3, 1, 2, 9)]
    assert measure.batches(rows, 10) == [[1, 2, 0, 3]]
    assert measure.batches(rows, measure.MOST_LOGITS // 6) == [[1, 2], [0], [3]]


# --------------------------------------------------------------------------------------------------------------- statistics
def test_t_quantiles_are_those_of_the_tables():
    table = {1: 12.7062, 2: 4.30265, 3: 3.18245, 4: 2.77645, 9: 2.26216, 29: 2.04523, 1000: 1.96234}
    assert {n: round(t_quantile(n), 5) for n in table} == pytest.approx(table, abs=6e-5)
    assert t_quantile(4, 0.99) == pytest.approx(4.60409, abs=1e-5)


def test_interval_by_hand():
    """1, 2, 3, 4, 5: mean 3, s = sqrt(2.5), half-width 2.77645 * sqrt(2.5 / 5) = 1.96324."""
    found = mean_interval([1, 2, 3, 4, 5])
    assert (found.count, found.mean) == (5, 3)
    assert (found.low, found.high) == pytest.approx((1.03676, 4.96324), abs=1e-5)
    assert math.isnan(mean_interval([7]).low) and mean_interval([7]).mean == 7
    assert mean_interval([]).count == 0
    # Logarithms 0, 1 and 2: mean 1, half-width 4.30265 * sqrt(1 / 3)
    found = log_interval([1, math.e, math.e**2])
    assert found.mean == pytest.approx(math.e)
    assert (math.log(found.low), math.log(found.high)) == pytest.approx((1 - 2.48414, 1 + 2.48414), abs=1e-4)


def test_two_values_are_given_themselves():
    """The interval of 3 and 5 would be 4 ± 12.7."""
    assert mean_interval([5, 3]) == Interval(2, 4.0, 3.0, 5.0)
    found = log_interval([4, 1])
    assert (found.count, found.mean, found.low, found.high) == (2, *map(pytest.approx, (2, 1, 4)))
    assert cell(mean_interval([5, 3]), 2) == "4 {3; 5}" and cell(mean_interval([5, 3]), 3) == "4 {3; 5} (of 2)"
    assert cell(mean_interval([1, 2, 3]), 3) == "2 [-0.484, 4.48]"


def test_axes_follow_the_means():
    assert plots.limits([1.0, 3.0], log=False) == pytest.approx((0.5, 3.5))
    assert plots.limits([1e-2, 1e2], log=True) == pytest.approx((1e-3, 1e3))
    assert plots.limits([2.0], log=False) == pytest.approx((1.9, 2.1))


def test_pairs_are_by_seed():
    """What a seed does to both drops out: 10, 20, 30 against 9, 18, 29 differ by 1, 2, 1."""
    a, b = {0: 10, 1: 20, 2: 30, 7: 99}, {2: 29, 1: 18, 0: 9, 8: 1}
    found = paired_difference(a, b)
    half = 4.30265 * math.sqrt((2 * (1 / 3) ** 2 + (2 / 3) ** 2) / 2 / 3)
    assert (found.count, found.mean) == (3, pytest.approx(4 / 3))
    assert found.high - found.mean == pytest.approx(half, abs=1e-5)
    assert paired_ratio({0: 2, 1: 8}, {0: 1, 1: 1}).mean == pytest.approx(4)


# -------------------------------------------------------------------------------------------------------------------- pages
def test_tables_hold_the_numbers_of_the_records(tmp_path):
    keys = {"seeds": [0, 1], "variants": {"grpo": {}, "erpo": {"beta": 0.5}}, "summary": {"baseline": "grpo"}}
    [question], _ = read_questions(write_study(tmp_path / "q", q=keys))
    right = {
        ("grpo", 0): ((1, 1), (0, 0)),
        ("grpo", 1): ((2, 1), (0, 0)),
        ("erpo", 0): ((2, 2), (0, 1)),
        ("erpo", 1): ((2, 2), (1, 1)),
    }
    kl = {("grpo", 0): 1.0, ("grpo", 1): math.e**2, ("erpo", 0): 0.1, ("erpo", 1): 0.1 * math.e**2}
    for runs in question.runs.values():
        for run in runs:
            drift = {
                "query_kl_train": kl[run.name, run.seed],
                "query_kl_held_out": None,
                "policy_kl": 0.0,
                "entropy": 1.0,
            }
            fake_record(tmp_path / "runs", run, right[run.name, run.seed], drift=drift)
    records, _ = find_records(tmp_path / "runs", [question])
    found = gather(question, records)
    # At T=0.5 grpo has 50 and 75 %, at T=1 0; in the mean 25 and 37.5
    assert accuracy_table(found, [0.5, 1.0])[1] == [
        "grpo", "2", "62.5 {50.0; 75.0}", "0.0 {0.0; 0.0}", "31.2 {25.0; 37.5}",
    ]  # fmt: skip
    end = dict(zip(*end_table(found)[:2]))
    assert end["Query-KL, training prompts"] == "2.72 {1; 7.39}"
    assert end["Query-KL, held-out prompts"] == "–" and end["Policy-KL"] == "0 {0; 0}"
    assert end["training reward, %"] == "50 {50; 50}"
    # A run that broke has no number, and the cell says so
    record = records[question.runs["grpo"][0].slug]
    record.content["drift"]["query_kl_train"] = None
    end = dict(zip(*end_table(found)[:2]))
    assert (end["seeds"], end["Query-KL, training prompts"]) == ("2", "7.39 (of 1)")
    record.content["drift"]["query_kl_train"] = 1.0
    # erpo − grpo in the mean: (100 + 25)/2 − 25 = 37.5 and (100 + 50)/2 − 37.5 = 37.5
    head, row = difference_table(question, found, [0.5, 1.0])
    cells = dict(zip(head, row))
    assert row[0] == "erpo against grpo"
    assert cells["Query-KL, training prompts, ratio"] == "0.1 {0.1; 0.1}"
    assert cells["accuracy mean, points"] == "+37.5 {+37.5; +37.5}"


def test_gap_is_training_minus_held_out_at_each_checkpoint(tmp_path):
    keys = {"evaluation": {"checkpoints": True}, "train": {"save_strategy": "steps", "save_steps": 1}}
    [question], _ = read_questions(write_study(tmp_path / "q", q=keys))
    [run] = question.runs["erpo"]
    log = thinned_log([{"step": s, "reward": r} for s, r in ((1, 0.25), (2, 1.0))])
    evaluations = [{"step": s, "temperatures": {"1": {"samples": 2, "right": t}}} for s, t in ((1, "10"), (2, "11"))]
    fake_record(tmp_path / "runs", run, log=log, evaluations=evaluations)
    found = gather(question, find_records(tmp_path / "runs", [question])[0])
    assert gap_table(found)[1] == ["erpo", "1", "1: 0.0; 2: 50.0", "25.0"]


def test_pages_name_what_is_missing_and_where_numbers_come_from(tmp_path):
    keys = {"seeds": [0, 1], "variants": {"grpo": {}, "erpo": {"beta": 0.5}}, "summary": {"baseline": "grpo"}}
    [question], _ = read_questions(write_study(tmp_path / "q", q=keys))
    write_pages(tmp_path / "none", [question], [question], {})
    text = (tmp_path / "none" / "q.md").read_text()
    assert "> Not run yet, and in none of the numbers below: grpo (seeds 0, 1); erpo (seeds 0, 1)." in text
    assert "0 of 4 runs are done." in text and "> Not written yet." in text

    out = tmp_path / "out"
    for run in (question.runs["grpo"][0], question.runs["erpo"][0], question.runs["erpo"][1]):
        fake_record(out / "runs", run, commit="0123456789abcdef+changes")
    (out / "findings").mkdir()
    (out / "findings" / "q.md").write_text("It is not.\n")
    records, _ = find_records(out / "runs", [question])
    write_pages(out, [question], [question], records)
    text = (out / "q.md").read_text()
    assert "> Not run yet, and in none of the numbers below: grpo (seeds 1)." in text
    assert "It is not." in text and "Not written yet" not in text
    slug = question.runs["erpo"][1].slug
    assert f"[{slug}](runs/{slug}.json)" in text and "0123456789 + changes" in text
    assert "`beta: 0.5`" in text
    index = (out / "index.md").read_text()
    assert "[Is it?](q.md) | It is. | 3 of 4" in index
    assert "No record holds what this plot shows." in text  # a pair needs two seeds
    again = {path.name: path.read_bytes() for path in out.glob("q*")}
    write_pages(out, [question], [question], records)
    assert {path.name: path.read_bytes() for path in out.glob("q*")} == again


def test_pages_of_one_question_leave_the_others_in_the_list(tmp_path):
    """In their places and as they stand; until the page is taken away."""
    paths = write_study(tmp_path / "q", a={"title": "a|b?"}, b={}, c={"title": "Is (this)?"})
    every = read_questions(paths)[0]
    out = tmp_path / "out"
    write_pages(out, every, every, {})
    index = (out / "index.md").read_text()
    [b], _ = read_questions(write_study(tmp_path / "q", b={"seeds": [0, 1]}))
    write_pages(out, [b], [b], {})
    lines = [line for line in (out / "index.md").read_text().splitlines() if ".md)" in line]
    assert [line.partition("](")[2].partition(".md")[0] for line in lines] == ["a", "b", "c"]
    assert "0 of 2" in lines[1]
    kept = [line for line in index.splitlines() if ".md)" in line]
    assert [lines[0], lines[2]] == [kept[0], kept[2]]
    (out / "a.md").unlink()
    write_pages(out, [b], [b], {})
    assert "a.md" not in (out / "index.md").read_text() and "(c.md)" in (out / "index.md").read_text()


@pytest.mark.parametrize("folder, recipes", [(".", QUESTIONS), ("smollm2", ON_SMOLLM2)], ids=["embedded", "smollm2"])
def test_committed_pages_are_those_of_the_committed_records(tmp_path, monkeypatch, folder, recipes):
    """Every record is of a run that a question asks for, and no number of a page is of another record, or of another time."""
    study = ROOT / "docs" / "study" / folder
    if folder != ".":  # weights that are not here: the records say which they were, all of them the same
        [weights] = {json.loads(path.read_text())["settings"]["model"] for path in (study / "runs").iterdir()}
        monkeypatch.setattr("erpo_trl.study.recipe._weights", lambda model: weights)
    questions, _ = read_questions(recipes)
    records, notes = find_records(study / "runs", questions)
    assert notes == [] and len(records) == len(list((study / "runs").iterdir())) > 0
    shutil.copytree(study / "findings", tmp_path / "findings")
    names = write_pages(tmp_path, questions, questions, records)
    assert sorted(names) == sorted(path.name for path in study.iterdir() if path.is_file())
    for page in (name for name in names if name.endswith(".md")):
        assert (tmp_path / page).read_text(encoding="utf-8") == (study / page).read_text(encoding="utf-8"), page
