"""One run of a study, in a process of its own: train, evaluate, measure, write the record."""

import gc
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
import transformers
import yaml
from transformers import AutoModelForCausalLM

from .._version import __version__
from ..data import resolve_dataset
from ..demo.arithmetic import make_problems
from ..evaluation.backends import TransformersBackend
from ..evaluation.model_source import load_tokenizer, resolve_model
from ..evaluation.protocol import complete_table, drawn_table, make_requests, score_table, tokenize_prompts
from ..evaluation.results import write_atomically
from ..locking import claimed
from ..query.checkpoint import checkpoint_step, last_whole_checkpoint
from ..report.analysis import nll_correlation
from ..rewards import TIME_LIMIT_S
from ..train import main as train
from . import measure
from .recipe import RunSpec, data_folder, train_options
from .records import digits, thinned_log, write_record

TRAINED = "trained.json"  # written when training is done: seconds it took
LOG = "log.txt"
# For another process, which may be saving its checkpoint
PATIENCE_SECONDS = 120.0
BATCH_TOKENS = 65536


def write_data(run: RunSpec, work: Path) -> Path:
    """The problems of a run as two files, `train.jsonl` and `held_out.jsonl`, which share no expression; their folder.

    Raises: ValueError where there are not so many different problems.
    """
    folder, data = data_folder(run, work), run.settings["data"]
    turns = example_turns(data)
    for split, name in (("train", "train"), ("test", "held_out")):
        problems = make_problems(data[name], data["seed"], levels=data["levels"], split=split)
        if len({problem["problem"] for problem in problems}) < len(problems):
            raise ValueError(f"data: levels {data['levels']} do not offer {data[name]} different {name} problems")
        for problem in problems if turns else ():
            problem["problem"] = [*turns, {"role": "user", "content": problem["problem"]}]
        text = "".join(json.dumps(problem) + "\n" for problem in problems)
        write_atomically(folder / f"{name}.jsonl", lambda temporary, text=text: temporary.write_text(text))
    return folder


def example_turns(data: Mapping) -> list[dict]:
    """Worked examples as chat turns, for a model that does not box its answers unasked; of the training split."""
    turns = []
    for problem in make_problems(data.get("examples", 0), data["seed"] + 1, levels=data["levels"]):
        turns.append({"role": "user", "content": problem["problem"]})
        turns.append({"role": "assistant", "content": f"\\boxed{{{problem['answer']}}}"})
    return turns


def main(run: RunSpec, model: str, work: str, records: str, questions: list[str], commit: str) -> None:
    """The process of a run, with its output in `log.txt` of the run's folder. Exit status 0: the record is written."""
    # Ctrl-C reaches every process of a terminal; the one that started this decides what is to end
    os.setsid()
    # What the imports made stays for good: training begins with a garbage collection, which need not look at it again
    gc.freeze()
    folder = Path(work) / "runs" / run.slug
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / LOG, "a", buffering=1) as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        with claimed(folder, PATIENCE_SECONDS):
            run_once(run, model, Path(work), Path(records), questions, commit)


def run_once(run: RunSpec, model: str, work: Path, records: Path, questions: list[str], commit: str) -> None:
    """Everything that one run takes; what an earlier try left whole is taken up."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)))
    transformers.utils.logging.disable_progress_bar()
    folder = work / "runs" / run.slug
    if run.steps:
        trained, resumed = train_once(run, model, folder, work)
        states = {run.steps: folder / "model"}
        if run.settings["evaluation"]["checkpoints"]:
            every = run.settings["train"]["save_steps"]  # a stopped run leaves one more, wherever it was
            found = {checkpoint_step(path): path for path in (folder / "model").glob("checkpoint-*")}
            states = {step: path for step, path in found.items() if step % every == 0} | states
        log = json.loads((folder / "model" / "trainer_state.json").read_text())["log_history"]
    else:
        trained, resumed, states, log = 0.0, False, {0: model}, []
    start = time.perf_counter()
    lab = Lab(run, model, data_folder(run, work))
    evaluations = []
    for step, path in sorted(states.items()):
        lab.take(str(path))  # the last one stays for the measurements
        evaluations.append({"step": step, "temperatures": lab.accuracies()})
    evaluated = time.perf_counter()
    measured = lab.measurements()
    write_record(
        records / f"{run.slug}.json",
        {
            "name": run.name,
            "hash": run.key,
            "seed": run.seed,
            "questions": questions,
            "commit": commit,
            "versions": {"erpo_trl": __version__, **{n: version(n) for n in ("torch", "transformers", "trl", "peft")}},
            "settings": run.settings,
            "seconds": {"train": trained, "evaluate": evaluated - start, "measure": time.perf_counter() - evaluated},
            "resumed": resumed,
            "evaluations": evaluations,
            **measured,
            "log": thinned_log(log),
        },
    )
    # The record holds what is needed; the weights of hundreds of runs would fill a disk
    for path in (folder / "model").glob("checkpoint-*"):
        shutil.rmtree(path)


def train_once(run: RunSpec, model: str, folder: Path, work: Path) -> tuple[float, bool]:
    """Trains, or goes on where an earlier try left a checkpoint, or finds the training done.

    Returns: seconds that training took, over all tries that left a checkpoint; whether it was resumed.
    """
    output, done = folder / "model", folder / TRAINED
    if done.is_file():
        found = json.loads(done.read_text())
        return found["seconds"], found["resumed"]
    options = train_options(run, model, folder, work)
    try:
        checkpoint = last_whole_checkpoint(str(output))
    except ValueError:
        # What a killed process left is not to be taken for a part of this run
        checkpoint = None
        shutil.rmtree(output, ignore_errors=True)
    recipe = folder / "recipe.yaml"
    text = yaml.safe_dump(options, sort_keys=False)
    write_atomically(recipe, lambda temporary: temporary.write_text(text))
    before = 0.0
    if checkpoint is not None:
        before = json.loads((folder / "seconds.json").read_text()) if (folder / "seconds.json").is_file() else 0.0
    start = time.perf_counter()
    try:
        train(["--config", str(recipe), *(["--resume_from_checkpoint", checkpoint] if checkpoint else [])])
    finally:
        seconds = before + time.perf_counter() - start
        write_json(folder / "seconds.json", seconds)
    write_json(done, {"seconds": seconds, "resumed": checkpoint is not None})
    return seconds, checkpoint is not None


def write_json(path: Path, content) -> None:
    write_atomically(path, lambda temporary: temporary.write_text(json.dumps(content)))


class Lab:
    """Evaluates and measures models on a run's problems. Args: run; base: path or id of the model before training; data: folder."""

    def __init__(self, run: RunSpec, base: str, data: Path):
        self.run, self.data = run, data
        self.source = resolve_model(base)
        self.base = AutoModelForCausalLM.from_pretrained(self.source.name, dtype=torch.float32).eval()
        settings = run.settings["train"]
        options = {"suffix": settings.get("prompt_suffix"), "system_prompt": settings.get("system_prompt")}
        self.problems = {name: resolve_dataset(data / f"{name}.jsonl", **options) for name in ("train", "held_out")}
        self.room = settings["max_completion_length"]
        self.template = settings.get("chat_template_kwargs")

    def take(self, model: str) -> None:
        """The model that is looked at from here on. Args: model: path or id."""
        source = resolve_model(model)
        tokenizer = load_tokenizer(source)
        self.backend = TransformersBackend.load(source, tokenizer, "float32", BATCH_TOKENS, "cpu")
        self.tokenizer = tokenizer
        self.prompts = {
            name: tokenize_prompts(tokenizer, problems["prompt"][:], self.template)
            for name, problems in self.problems.items()
        }

    def accuracies(self) -> dict[str, dict]:
        """On the held-out problems, with the draws of `erpo-trl eval --file held_out.jsonl`.

        Returns: temperature -> "samples"; "right", how many of each problem's samples are, a digit each; mean "tokens" of a sample
        and the share "truncated".
        """
        settings, name = self.run.settings["evaluation"], "held_out"
        ids, golds = self.prompts[name], self.problems[name]["answer"][:]
        found = {}
        for t in settings["temperatures"]:
            requests = make_requests(name, ids, t, settings["samples"], self.run.seed, self.room, None, own_draw=False)
            parts = [
                drawn_table(name, batch, self.backend.generate(batch), self.tokenizer)
                for batch in self.backend.plan(requests)
            ]
            drawn = complete_table(pa.concat_tables(parts), name, len(ids), t, settings["samples"], own_draw=False)
            scored = score_table(drawn, golds, 1, TIME_LIMIT_S)
            right = scored["verdict"].to_numpy(zero_copy_only=False) == 1
            found[f"{t:g}"] = {
                "samples": len(right) // len(ids),
                "right": digits(right.reshape(len(ids), -1).sum(1)),
                "tokens": float(np.mean(scored["tokens"].to_numpy())),
                "truncated": float(np.mean(np.array(scored["finish"].to_pylist()) == "length")),
            }
        return found

    def measurements(self) -> dict[str, Mapping]:
        """Drifts from the base, and the NLLs of prompts and responses; see `measure.py`."""
        model, pad, prompts = self.backend.model, self.backend.pad, self.prompts
        drifts = {name: measure.prompt_drift(model, self.base, ids, pad) for name, ids in prompts.items()}
        samples = self.run.settings["evaluation"]["responses"]
        responses = measure.response_drift(
            model, self.base, prompts["held_out"], self.backend, samples, self.run.seed, self.room
        )
        held_out = drifts["held_out"]
        correlation = nll_correlation(held_out.nll, responses.nll, held_out.tokens, responses.tokens)
        found = {
            "drift": {
                **{f"query_kl_{name}": drift.query_kl for name, drift in drifts.items()},
                **{f"nll_change_{name}": float((drift.nll - drift.ref_nll).mean()) for name, drift in drifts.items()},
                "policy_kl": responses.policy_kl,
                "entropy": responses.entropy,
            },
            "nll": {name: getattr(correlation, name) for name in ("points", "pearson", "spearman", "partial")},
        }
        if not self.run.steps:  # the scatter plot's points; of trained models the correlations are enough
            columns = {"prompt": held_out.nll, "response": responses.nll}
            columns |= {"prompt_tokens": held_out.tokens, "response_tokens": responses.tokens}
            found["nll"] |= columns
        return found


def commit_of(folder: Path) -> str:
    """The commit of the code, with "+changes" where files differ from it; "unknown" outside a repository."""
    command = ["git", "-C", str(folder), "describe", "--always", "--abbrev=40", "--dirty=+changes", "--exclude=*"]
    found = subprocess.run(command, capture_output=True, text=True)
    return found.stdout.strip() if found.returncode == 0 else "unknown"


def ended_by_signal(status: int) -> bool:
    """Whether a process's exit status says that it was told to stop, not that it failed."""
    return status in (-signal.SIGTERM, 128 + signal.SIGTERM, -signal.SIGKILL)
