"""What a run shows and keeps while it goes on: live line, query files, trackers, collapse."""

import importlib.util
import io
import json
import math
import re
import sqlite3
import struct
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from helpers import logged, make_trainer, prompts_dataset, token_logps
from transformers import TrainerCallback, TrainerControl, TrainerState

from erpo_trl import CollapseCallback, LiveLine
from erpo_trl.report import live
from erpo_trl.report.analysis import BandRule
from erpo_trl.report.live import closing_table, duration, line, show_live_line
from erpo_trl.report.query_log import SCHEMA, read_queries


# --------------------------------------------------------------------------------------------------------------- live line
class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_line_by_hand():
    logs = {"reward": 0.25, "query/kl": 0.01234, "kl": 0.5, "policy/kl": 0.2, "entropy": None, "query/alpha": 0.01}
    assert line(7, 120, logs, 12345.6, 3723.4) == (
        "step   7/120  reward 0.25  query/kl 0.0123  policy/kl 0.2  α 0.01  12,346 tok/s  ETA 1:02:03"
    )
    assert line(0, 5, {}, None, None) == "step 0/5"
    assert [duration(s) for s in (0.4, 59.6, 3599, 3600)] == ["0:00", "1:00", "59:59", "1:00:00"]


def test_closing_table_by_hand():
    log = [{"step": s, "reward": s / 10, "query/kl": 0.1 * (3 - s)} for s in (1, 2, 3)] + [
        {"step": 3, "train_loss": 0}
    ]
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in closing_table(log).splitlines()]
    assert rows[0] == ["", "first", "end", "lowest", "highest"]
    assert rows[2:] == [["reward", "0.1", "0.3", "0.1", "0.3"], ["query/kl", "0.2", "0", "0", "0.2"]]
    assert closing_table([]) == ""


def run_line(stream, monkeypatch, main=True, disable_tqdm=False, first=0, before=0):
    """Three steps of a second each, logged at the last two; 100 tokens a step."""
    clock = [0.0]
    monkeypatch.setattr(live.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(live.shutil, "get_terminal_size", lambda: SimpleNamespace(columns=60))
    shown = LiveLine(stream)
    state = TrainerState(global_step=first, max_steps=10, is_world_process_zero=main)
    arguments = (SimpleNamespace(disable_tqdm=disable_tqdm), state, TrainerControl())
    shown.on_train_begin(*arguments)
    for step in range(first + 1, first + 4):
        clock[0] += 1.0
        state.global_step = step
        shown.on_step_end(*arguments)
        if step > first + 1:
            logs = {"loss": 0.0, "reward": step / 10, "num_tokens": before + 100.0 * (step - first)}
            state.log_history.append({**logs, "step": step})
            shown.on_log(*arguments, logs=logs)
            shown.on_log(*arguments, logs={"eval_reward": 1.0})
    shown.on_log(*arguments, logs={"train_runtime": 3.0})
    shown.on_train_end(*arguments)
    return stream.getvalue()


def test_plain_lines_where_there_is_no_terminal(monkeypatch):
    """Two logs, the first 200 tokens after two seconds and the second 100 after one; eight and seven seconds to go."""
    lines = run_line(io.StringIO(), monkeypatch).splitlines()
    assert lines[:2] == [
        "step  2/10  reward 0.2  100 tok/s  ETA 0:08",
        "step  3/10  reward 0.3  100 tok/s  ETA 0:07",
    ]
    assert lines[2].startswith("|") and lines[-1] == "3 steps in 0:03, 1.00 s a step" and len(lines) == 6
    assert "\x1b" not in "".join(lines)
    assert run_line(Terminal(), monkeypatch, disable_tqdm=True).splitlines() == lines


def test_a_terminal_has_one_line(monkeypatch):
    text = run_line(Terminal(), monkeypatch)
    shown = text.split("\r\x1b[K")
    assert shown[1] == "step  1/10  ETA 0:09" and shown[-2].startswith("step  3/10  reward 0.3")
    assert shown[-1].startswith("|"), "the line is cleared before the table"
    assert all("\n" not in part and len(part) <= 59 for part in shown[:-1])


def test_silent_on_other_processes_and_right_after_a_resume(monkeypatch):
    assert run_line(io.StringIO(), monkeypatch, main=False) == run_line(Terminal(), monkeypatch, main=False) == ""
    lines = run_line(io.StringIO(), monkeypatch, first=4, before=5000).splitlines()
    # 5200 tokens are no rate of this run's; the time is that of its own steps
    assert lines[:2] == ["step  6/10  reward 0.6  ETA 0:04", "step  7/10  reward 0.7  100 tok/s  ETA 0:03"]
    assert lines[-1] == "3 steps in 0:03, 1.00 s a step"


def test_it_stands_in_for_what_transformers_prints(tmp_path, capsys):
    trainer = make_trainer(tmp_path, max_steps=2)
    show_live_line(trainer)
    trainer.train()
    text = capsys.readouterr().out
    assert re.search(r"^step 2/2  reward \S+  query/kl \S+  entropy \S+  α 0.01  \S+ tok/s  ETA 0:00$", text, re.M)
    assert "{'loss'" not in text and text.rstrip().splitlines()[-1].startswith("2 steps in ")


# ------------------------------------------------------------------------------------------------------------- query files
class Batches(TrainerCallback):
    """The micro-batches of each step, as the loss saw them."""

    def __init__(self, trainer):
        self.steps, compute = [[]], trainer.compute_loss

        def keep(model, inputs, *args, **kwargs):
            self.steps[-1].append({name: inputs[name] for name in ("prompt_ids", "prompt_mask", "completion_ids")})
            self.steps[-1][-1]["mask"] = inputs["completion_mask"]
            self.steps[-1][-1]["model"] = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
            return compute(model, inputs, *args, **kwargs)

        trainer.compute_loss = keep

    def on_step_end(self, args, state, control, **kwargs):
        self.steps.append([])


def test_query_files_hold_nlls_of_prompts_and_responses(tmp_path):
    """Against a forward of each row by itself, under the weights of that step."""
    trainer = make_trainer(
        tmp_path, max_steps=3, query_log_steps=2, gradient_accumulation_steps=2, learning_rate=0.5, temperature=0.7
    )
    batches = Batches(trainer)
    trainer.add_callback(batches)
    trainer.train()
    folder = Path(trainer.args.output_dir)
    assert sorted(path.name for path in (folder / "queries").iterdir()) == [
        "queries_00001-00002.parquet",
        "queries_00003-00003.parquet",
    ]
    assert pq.read_schema(folder / "queries" / "queries_00001-00002.parquet") == SCHEMA
    kept = read_queries(folder)
    final = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    seen = set()
    for step, batch in enumerate(batches.steps[:3], start=1):
        expected: dict[tuple, list] = {}
        for micro in batch:
            trainer.model.load_state_dict(micro["model"], strict=False)
            for ids, mask, response, counted in zip(
                micro["prompt_ids"], micro["prompt_mask"], micro["completion_ids"], micro["mask"]
            ):
                prompt, response = ids[mask.bool()].tolist(), response[counted.bool()].tolist()
                logps = token_logps(trainer.model, prompt + response, temperature=0.7)
                nll, own = -logps[: len(prompt) - 1].sum(), -logps[len(prompt) - 1 :].sum()
                expected.setdefault(tuple(prompt), []).append((nll.item(), own.item(), len(response)))
        rows = np.flatnonzero(kept["step"] == step)
        assert len(rows) == len(expected)
        found = sorted(zip(*(kept[n][rows] for n in ("nll", "tokens", "response_nll", "response_tokens"))))
        wanted = sorted(
            (e[0][0], len(prompt) - 1, np.mean([x[1] for x in e]), np.mean([x[2] for x in e]))
            for prompt, e in expected.items()
        )
        np.testing.assert_allclose(found, wanted, rtol=2e-4)
        seen |= set(expected)
    trainer.model.load_state_dict(final, strict=False)
    assert len(seen) == len(set(kept["key"])) > 1
    # The logged means are those of the rows kept
    for step, kl in zip((1, 2, 3), logged(trainer, "query/kl")):
        assert kept["kl"][kept["step"] == step].mean() == pytest.approx(kl, rel=1e-5)


def test_a_resumed_run_keeps_what_was_written_before(tmp_path):
    """Stopped at step 3 with a checkpoint at 2, and resumed: each step once, step 3 as it was made last."""
    make_trainer(tmp_path, max_steps=3, query_log_steps=5, save_strategy="steps", save_steps=2).train()
    trainer = make_trainer(tmp_path, max_steps=4, query_log_steps=5)
    trainer.train(resume_from_checkpoint=str(Path(trainer.args.output_dir) / "checkpoint-2"))
    folder = Path(trainer.args.output_dir)
    assert {path.name for path in (folder / "queries").iterdir()} == {
        "queries_00001-00002.parquet",  # with the checkpoint
        "queries_00003-00003.parquet",
        "queries_00003-00004.parquet",
    }
    kept = read_queries(folder)
    steps, counts = np.unique(kept["step"], return_counts=True)
    assert steps.tolist() == [1, 2, 3, 4] and len(set(counts)) == 1
    assert set(read_queries(folder, last=2)["step"]) == {1, 2} and read_queries(folder, last=0) == {}


def test_query_log_steps_off_and_refused(tmp_path, config):
    trainer = make_trainer(tmp_path, query_log_steps=0)
    trainer.train()
    assert not (Path(trainer.args.output_dir) / "queries").exists()
    with pytest.raises(ValueError, match=r"query_log_steps must be a whole number of steps >= 0, found -1"):
        config(query_log_steps=-1)


def test_a_run_leaves_its_settings(tmp_path):
    trainer = make_trainer(tmp_path, query_kl_coef=0.02)
    trainer.train()
    trainer.save_state()
    state = json.loads((Path(trainer.args.output_dir) / "erpo_state.json").read_text())
    assert (
        state["args"]["query_kl_coef"] == 0.02 and state["fingerprint"] == trainer.dataset_mapper.reference.fingerprint
    )
    assert state["mean_nll"] > 0


# ---------------------------------------------------------------------------------------------------------------- trackers
def short_run(tmp_path, **settings):
    trainer = make_trainer(tmp_path, max_steps=3, query_log_steps=2, query_kl_coef=0.02, **settings)
    trainer.train()
    return trainer


def test_tensorboard_gets_histograms_and_images(tmp_path):
    pytest.importorskip("tensorboard")
    pytest.importorskip("matplotlib")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trainer = short_run(tmp_path, report_to="tensorboard")
    [events] = Path(trainer.args.output_dir).rglob("events.out.tfevents*")
    found = EventAccumulator(str(events), size_guidance={"images": 0, "histograms": 0})
    found.Reload()
    names = {"query/weight_histogram", "query/kl_histogram", "query/nll_drift_histogram"}
    assert names <= set(found.Tags()["histograms"]) and {"plots/curves", "plots/queries"} <= set(
        found.Tags()["images"]
    )
    # After step 2, and what was left at the end
    first, last = found.Histograms("query/weight_histogram")
    kept = read_queries(Path(trainer.args.output_dir))
    assert (first.step, last.step) == (2, 3)
    weights = kept["weight"][kept["step"] <= 2]
    assert first.histogram_value.num == len(weights) and first.histogram_value.sum == pytest.approx(weights.sum())
    image = found.Images("plots/queries")[0]
    assert image.encoded_image_string.startswith(b"\x89PNG") and image.width > 1000
    assert "train/query/kl" in found.Tags()["scalars"]


def test_wandb_offline_asks_nothing_and_keeps_group_config_and_plots(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    pytest.importorskip("matplotlib")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setattr("sys.stdin", io.StringIO())  # a question would find an end of file
    trainer = short_run(tmp_path, report_to="wandb", run_name="mine")
    wandb.finish()
    wandb.teardown()  # its service writes the end of the file as it goes
    run, config, history = offline_run(tmp_path)
    assert run.display_name == "mine" and re.fullmatch(r"\S+-alpha0\.02-nll_ratio-beta0-[0-9a-f]{8}", run.run_group)
    assert config["query_kl_coef"] == 0.02 and config["query_weight_clip"] == [0.0, 2.0]
    histograms = [row for row in history if "query/weight_histogram" in row]
    assert [row["train/global_step"] for row in histograms] == [2, 3]
    kept = read_queries(Path(trainer.args.output_dir))
    assert sum(histograms[0]["query/weight_histogram"]["values"]) == (kept["step"] <= 2).sum()
    images = [row["plots/curves"] for row in history if "plots/curves" in row]
    assert len(images) == 2 and all(image["_type"] == "image-file" for image in images)
    [folder] = tmp_path.glob("wandb/offline-run-*")
    assert (folder / "files" / images[0]["path"]).read_bytes().startswith(b"\x89PNG")
    assert [row["train/query/kl"] for row in history if "train/query/kl" in row] == pytest.approx(
        logged(trainer, "query/kl")
    )


def records(path):
    """The records of a W&B file: seven bytes of head, then LevelDB's log format of 32 KiB blocks, chunks of which carry seven
    bytes of checksum, length and kind (1 whole, 2 first, 3 middle, 4 last)."""
    data, at, parts = path.read_bytes(), 7, b""
    assert data.startswith(b":W&B")
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:  # padding
            at += left
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield parts
            parts = b""


def offline_run(folder):
    """Run record, config and history rows of the one offline W&B run below a folder, read from its own file."""
    from wandb.proto import wandb_internal_pb2

    [path] = folder.glob("wandb/offline-run-*/*.wandb")
    run, config, history = None, {}, []
    for data in records(path):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        kind = record.WhichOneof("record_type")
        if kind == "run":
            run = record.run
        items = {"run": record.run.config.update, "config": record.config.update}.get(kind, ())
        config |= {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items}
        if kind == "history":
            history.append({})
            for item in record.history.item:
                *outer, last = item.nested_key or [item.key]
                target = history[-1]
                for key in outer:
                    target = target.setdefault(key, {})
                target[last] = json.loads(item.value_json)
    return run, config, history


def test_trackio_gets_histograms_and_images(tmp_path, monkeypatch):
    """A local project, read back from its own database."""
    pytest.importorskip("trackio")
    pytest.importorskip("matplotlib")
    # Read from the environment when it is imported, which TRL has done by now
    places = {"TRACKIO_DIR": tmp_path / "trackio", "MEDIA_DIR": tmp_path / "trackio" / "media"}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "trackio":
            for constant in places.keys() & vars(module).keys():
                monkeypatch.setattr(module, constant, places[constant])
    trainer = short_run(tmp_path, report_to="trackio", project="erpo")
    database = sqlite3.connect(tmp_path / "trackio" / "erpo.db")
    rows = [json.loads(row) for (row,) in database.execute("select metrics from metrics order by id")]
    shown = [row for row in rows if "query/weight_histogram" in row]
    assert [row["train/global_step"] for row in shown] == [2, 3]
    kept = read_queries(Path(trainer.args.output_dir))
    assert sum(shown[0]["query/kl_histogram"]["values"]) == (kept["step"] <= 2).sum()
    image = tmp_path / "trackio" / "media" / shown[1]["plots/queries"]["file_path"]
    assert image.read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_the_histograms_still_go(tmp_path, monkeypatch, caplog):
    sent = []
    monkeypatch.setattr("erpo_trl.report.query_log.TRACKERS", {"tensorboard": lambda *content: sent.append(content)})
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "matplotlib" else find(name, *a))
    pytest.importorskip("tensorboard")
    short_run(tmp_path, report_to="tensorboard")
    assert [(step, len(histograms), images) for _, step, histograms, images in sent] == [(2, 3, {}), (3, 3, {})]
    assert sum("Without matplotlib no plots" in record.message for record in caplog.records) == 1


def test_what_is_not_finite_is_not_sent(tmp_path, monkeypatch):
    """W&B raises for one NaN: a drift that overflows once must not end the training it is shown of."""
    pytest.importorskip("tensorboard")
    sent = []
    monkeypatch.setattr("erpo_trl.report.query_log.TRACKERS", {"tensorboard": lambda *content: sent.append(content)})
    trainer = make_trainer(tmp_path, max_steps=1, query_log_steps=1, report_to="tensorboard")
    close = trainer._query_metrics["train"].close

    def broken(rows):
        mean, latest = close(rows), trainer.latest_queries
        latest.kl[0], latest.nll_drift[:] = math.inf, math.nan
        return mean

    trainer._query_metrics["train"].close = broken
    trainer.train()
    [(_, _, histograms, images)] = sent
    assert set(histograms) == {"query/weight_histogram", "query/kl_histogram"}
    assert len(histograms["query/kl_histogram"]) == len(histograms["query/weight_histogram"]) - 1 > 0
    assert "plots/queries" in images
    kept = read_queries(Path(trainer.args.output_dir))
    assert np.isinf(kept["kl"]).sum() == 1  # the file keeps it


# ---------------------------------------------------------------------------------------------------------------- collapse
RULE = BandRule(window=3, width=4.0, least=0.25, patience=2)


class Script(TrainerCallback):
    """Entropies as the log should have them, in place of the run's; stands before the callback under test."""

    def __init__(self, entropies):
        self.entropies = entropies

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            logs["entropy"] = state.log_history[-1]["entropy"] = self.entropies[state.global_step - 1]
            logs["reward"] = state.log_history[-1]["reward"] = 1.0


def collapsing(tmp_path, on_collapse, entropies=(1, 1, 1, 1, 5, 5, 5, 5), **settings):
    callback = CollapseCallback(on_collapse, RULE)
    trainer = make_trainer(
        tmp_path, max_steps=len(entropies), callbacks=[Script(entropies), callback], query_log_steps=0, **settings
    )
    return trainer, callback


def test_collapse_warns_once_and_goes_on(tmp_path, caplog):
    trainer, callback = collapsing(tmp_path, "warn")
    trainer.train()
    assert [(c.kind, c.step, c.noticed) for c in callback.found] == [("entropy jump", 5, 6)]
    assert trainer.state.global_step == 8
    warnings = [record.message for record in caplog.records if "may be collapsing" in record.message]
    assert warnings == [
        "The run may be collapsing: entropy jump at step 5: entropy 5 at step 6, after 1 on average (its running band ends at 1.25)."
    ]


def test_an_evaluation_before_training_is_no_collapse(tmp_path):
    trainer, callback = collapsing(tmp_path, "stop", trainer_kwargs={"eval_dataset": prompts_dataset()})
    trainer.evaluate()
    assert callback.found == []


def test_collapse_stops_with_a_checkpoint(tmp_path):
    trainer, _ = collapsing(tmp_path, "stop", save_strategy="steps", save_steps=100)
    trainer.train()
    assert trainer.state.global_step == 6
    assert (Path(trainer.args.output_dir) / "checkpoint-6" / "erpo_state.json").is_file()


def test_collapse_stops_where_the_run_can_be_resumed(tmp_path):
    """Two updates a generation: noticed at step 7, the first of two, it goes on to the end of the generation, and the checkpoint of
    step 6 is not given up for one inside it.
    """
    fields = {"num_iterations": 2, "save_strategy": "steps", "save_steps": 2, "save_total_limit": 1}
    trainer, callback = collapsing(tmp_path, "stop", entropies=(1, 1, 1, 1, 1, 5, 5, 5, 5, 5), **fields)
    trainer.train()
    assert callback.found[0].noticed == 7 and trainer.state.global_step == 8
    assert [path.name for path in Path(trainer.args.output_dir).glob("checkpoint-*")] == ["checkpoint-8"]
    collapsing(tmp_path, "warn", entropies=(1,) * 10, **fields)[0].train(resume_from_checkpoint=True)


def test_collapse_calls_a_function(tmp_path):
    called = []
    trainer, _ = collapsing(tmp_path, lambda collapse, control: called.append((collapse.noticed, type(control))))
    trainer.train()
    assert called == [(6, TrainerControl)]


def test_a_resumed_run_knows_its_band(tmp_path):
    """The log before the resume makes the band, and its own collapse is not told again."""
    callback = CollapseCallback(rule=RULE)
    log = [{"step": s, "entropy": e, "loss": 0.0} for s, e in enumerate((1, 1, 1, 5, 5, 1, 1, 1), start=1)]
    state = TrainerState(global_step=8, log_history=log)
    callback.on_train_begin(None, state, TrainerControl())
    for step in (9, 10):
        state.global_step = step
        callback.on_log(None, state, TrainerControl(), logs={"entropy": 7.0, "reward": None})
    assert [(c.step, c.noticed, c.mean) for c in callback.found] == [(9, 10, 1.0)]


def test_what_else_on_collapse_may_be():
    with pytest.raises(ValueError, match="on_collapse must be 'warn', 'stop' or a function, found 'halt'"):
        CollapseCallback("halt")


def test_nothing_of_all_this_changes_training(tmp_path):
    """Weights after three steps, to the bit, with and without query files, line and watch."""
    ends = []
    for folder, steps in (("a", 0), ("b", 1)):
        trainer = make_trainer(tmp_path / folder, max_steps=3, query_log_steps=steps)
        if steps:
            show_live_line(trainer)
            trainer.add_callback(CollapseCallback())
        trainer.train()
        ends.append(trainer.model.state_dict())
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])
