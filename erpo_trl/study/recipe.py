"""What a study asks and which runs that takes, out of its recipes.

A question is a YAML file: its claim, its seeds and its variants, each a few options that differ from a base. The base is a file
of its own, with the options of `erpo-trl train`, the problems and the evaluation that all runs share. A run is known by its
settings alone, so that questions share the runs that they have in common.
"""

import difflib
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from ..cli import InputError
from ..demo.arithmetic import LEVELS
from ..evaluation.config import parse_temperatures
from ..evaluation.results import digest
from ..train import parse

QUESTION_KEYS = ("question", "title", "claim", "base", "seeds", "variants", "train", "evaluation", "summary")
BASE_KEYS = ("train", "data", "evaluation")
DATA_KEYS = ("levels", "train", "held_out", "seed", "examples")
DATA_NEEDED = DATA_KEYS[:-1]
EVALUATION_KEYS = ("temperatures", "samples", "checkpoints", "responses")
SUMMARY_KEYS = ("baseline", "pairs", "lines")
# What the runner decides: neither a base nor a variant may
RUNNERS_OWN = ("output_dir", "seed", "dataset", "reference_cache_dir", "resume_from_checkpoint", "report_to")
# A record keeps how many of a problem's samples were right as one digit
MOST_SAMPLES = 9


@dataclass(frozen=True)
class RunSpec:
    """A run to be made.

    Args: name: of its variant; seed: of training and sampling; settings: "model" (digest of the weights), "train", "data" and
    "evaluation", which say all that its numbers depend on but the seed.
    """

    name: str
    seed: int
    settings: Mapping

    @property
    def key(self) -> str:
        """8 hex digits of the name and the settings."""
        return digest([self.name, self.settings])[:8]

    @property
    def slug(self) -> str:
        """Name of its record and of its folder."""
        return f"{self.name}-{self.key}-seed{self.seed}"

    @property
    def steps(self) -> int:
        """Optimizer steps; 0: the model before training."""
        return int(self.settings["train"]["max_steps"])


@dataclass(frozen=True)
class Question:
    """What is asked and what answering takes.

    Args: name; title: the question in words; claim: what the papers say; runs: of each variant, one per seed; path: its file;
    summary: "baseline", the variant that others are compared with, "pairs" of variants to compare beside it, "lines", the variants
    that plots show (default: all).
    """

    name: str
    title: str
    claim: str
    runs: Mapping[str, Sequence[RunSpec]]
    path: Path
    summary: Mapping = field(default_factory=dict)


def read_questions(
    paths: Sequence[str | Path], model: str | None = None, smoke: bool = False
) -> tuple[list[Question], str]:
    """The questions in these files, and the model that they train.

    Args: paths: of questions on one base; model: folder or hub id in place of the base's; smoke: a few steps on a few problems,
    two seeds.
    Raises: InputError that names the file and what is wrong in it.
    """
    files = [(Path(path), _read_question(Path(path))) for path in paths]
    bases = {(path.parent / content["base"]).resolve() for path, content in files}
    if len(bases) > 1:
        raise InputError(
            f"--config: the questions are on {len(bases)} bases ({', '.join(sorted(b.name for b in bases))}); give those of one at a time"
        )
    base = _read_base(bases.pop())
    if model is not None:
        base["train"]["model_name_or_path"] = model
    name = base["train"].pop("model_name_or_path")
    weights = _weights(name)
    questions = [_question(path, content, base, weights, smoke) for path, content in files]
    names = [question.name for question in questions]
    for twice in {name for name in names if names.count(name) > 1}:
        raise InputError(f"--config: two files ask the question {twice!r}")
    if not smoke:  # which makes some alike that are not
        _check_names(questions)
    _check_options({run.key: run for q in questions for runs in q.runs.values() for run in runs[:1]}, questions, name)
    return questions, name


def _read(path: Path, keys: Sequence[str], needed: Sequence[str]) -> dict:
    if not path.is_file():
        raise InputError(f"no file {path}")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not in UTF-8: {error}") from error
    except yaml.YAMLError as error:
        raise InputError(f"{path} is not YAML: {error}") from error
    _require_keys(content, keys, needed, str(path))
    return content


def _read_question(path: Path) -> dict:
    texts = ("question", "title", "claim", "base")
    content = _read(path, QUESTION_KEYS, (*texts, "seeds", "variants"))
    for key in texts:
        if not isinstance(content[key], str):
            raise InputError(f"{path}: {key} must be text, found {content[key]!r}")
    _check_file_name(content["question"], str(path), "a question's name")
    if content["question"] == "index":
        raise InputError(f"{path}: question 'index' would have the page that lists all questions; call it otherwise")
    for key in ("train", "evaluation", "summary"):
        _require_mapping(content.get(key) or {}, f"{path}, {key}")
    return content


def _check_file_name(name, where: str, what: str) -> None:
    if not isinstance(name, str) or not name.replace("-", "").replace("_", "").replace(".", "").isalnum():
        raise InputError(f"{where}: {what} is part of file names: letters, digits, '.', '-', '_'; found {name!r}")


def _require_mapping(content, where: str) -> None:
    if not isinstance(content, dict):
        raise InputError(f"{where}: must map names to values, found {content!r}")


def _require_keys(content: Mapping, keys: Sequence[str], needed: Sequence[str], where: str) -> None:
    _require_mapping(content, where)
    for key in content:
        if key not in keys:
            near = difflib.get_close_matches(str(key), keys, n=1)
            raise InputError(f"{where}: unknown key {key!r}" + (f" (did you mean {near[0]}?)" if near else ""))
    for key in needed:
        if key not in content:
            raise InputError(f"{where}: {key!r} is missing")


def _read_base(path: Path) -> dict:
    base = _read(path, BASE_KEYS, BASE_KEYS)
    _require_keys(base["data"], DATA_KEYS, DATA_NEEDED, f"{path}, data")
    _require_keys(base["evaluation"], EVALUATION_KEYS, ("temperatures", "samples", "responses"), f"{path}, evaluation")
    _require_mapping(base["train"], f"{path}, train")
    for key in ("model_name_or_path", "max_steps"):
        if key not in base["train"]:
            raise InputError(f"{path}, train: {key!r} is missing")
    if not isinstance(base["train"]["model_name_or_path"], str):
        raise InputError(
            f"{path}, train: model_name_or_path must be a folder or hub id, found {base['train']['model_name_or_path']!r}"
        )
    levels = base["data"]["levels"]
    if not isinstance(levels, list) or not levels or any(level not in LEVELS for level in levels):
        raise InputError(f"{path}, data: levels must be of {LEVELS}, found {levels!r}")
    for key in ("train", "held_out"):
        if not isinstance(base["data"][key], int) or base["data"][key] < 1:
            raise InputError(f"{path}, data: {key} must be a number of problems >= 1, found {base['data'][key]!r}")
    return base


def _evaluation(base: Mapping, own: Mapping, where: str) -> dict:
    """The evaluation of a question: the base's with its own on top."""
    _require_keys(own, EVALUATION_KEYS, (), f"{where}, evaluation")
    found = {"checkpoints": False, **base, **own}
    if not isinstance(found["samples"], int) or not 1 <= found["samples"] <= MOST_SAMPLES:
        raise InputError(f"{where}, evaluation: samples must be 1 to {MOST_SAMPLES}, found {found['samples']!r}")
    if not isinstance(found["responses"], int) or found["responses"] < 1:
        raise InputError(f"{where}, evaluation: responses must be a number >= 1, found {found['responses']!r}")
    try:
        found["temperatures"] = parse_temperatures(found["temperatures"])
    except TypeError as error:
        raise InputError(
            f"{where}, evaluation: temperatures must be a list, found {found['temperatures']!r}"
        ) from error
    except ValueError as error:
        raise InputError(f"{where}: {error}") from error
    return found


def _question(path: Path, content: Mapping, base: Mapping, weights: str, smoke: bool) -> Question:
    where = str(path)
    seeds, variants = content["seeds"], content["variants"]
    if (
        not isinstance(seeds, list)
        or not seeds
        or len(set(seeds)) < len(seeds)
        or any(type(s) is not int for s in seeds)
    ):
        raise InputError(f"{where}: seeds must be a list of different whole numbers, found {seeds!r}")
    if not isinstance(variants, dict) or not variants:
        raise InputError(f"{where}: variants must map names to options, found {variants!r}")
    evaluation = _evaluation(base["evaluation"], content.get("evaluation") or {}, where)
    data = dict(base["data"])
    runs = {}
    for name, options in variants.items():
        _check_file_name(name, where, "a variant's name")
        if not isinstance(options or {}, dict):
            raise InputError(f"{where}, {name}: options must be a mapping, found {options!r}")
        train = {**base["train"], **(content.get("train") or {}), **(options or {})}
        for key in RUNNERS_OWN:
            if key in train:
                raise InputError(f"{where}, {name}: {key} is the study's to set; take it out")
        if type(train["max_steps"]) is not int or train["max_steps"] < 0:
            raise InputError(f"{where}, {name}: max_steps must be a whole number >= 0, found {train['max_steps']!r}")
        if evaluation["checkpoints"] and (train.get("save_strategy") != "steps" or "save_steps" not in train):
            raise InputError(f"{where}, {name}: evaluation.checkpoints needs save_strategy: steps, and save_steps")
        settings = {"model": weights, "train": train, "data": data, "evaluation": evaluation}
        if smoke:
            settings = smoke_settings(settings)
        runs[name] = [RunSpec(name, seed, settings) for seed in (seeds[:2] if smoke else seeds)]
    _check_summary(content.get("summary") or {}, runs, where)
    texts = [" ".join(content[key].split()) for key in ("title", "claim")]
    return Question(content["question"], *texts, runs, path, content.get("summary") or {})


def _check_summary(summary: Mapping, variants: Mapping, where: str) -> None:
    """What the pages show is about variants that there are."""
    _require_keys(summary, SUMMARY_KEYS, (), f"{where}, summary")
    lines, pairs = summary.get("lines", []), summary.get("pairs", [])
    if not isinstance(lines, list) or not isinstance(pairs, list) or any(not _is_pair(pair) for pair in pairs):
        raise InputError(
            f"{where}, summary: lines must be a list of variants and pairs a list of [one, other], found {lines!r} and {pairs!r}"
        )
    named = [*lines, *(name for pair in pairs for name in pair)]
    for name in [*named, *([summary["baseline"]] if "baseline" in summary else [])]:
        if name not in list(variants):
            raise InputError(f"{where}, summary: there is no variant {name!r}; there are {', '.join(variants)}")


def _is_pair(value) -> bool:
    return isinstance(value, list) and len(value) == 2


def smoke_settings(settings: Mapping) -> dict:
    """The same run with two steps of two queries, on a few problems, at one temperature."""
    train = dict(settings["train"])
    train["max_steps"] = min(2, int(train["max_steps"]))
    train["per_device_train_batch_size"] = 2 * train["num_generations"]
    train |= {name: 1 for name in ("logging_steps", "log_policy_kl_steps") if name in train}
    if train.get("save_strategy") == "steps":
        train["save_steps"] = 2 if train.get("steps_per_generation", 1) == 1 else train["steps_per_generation"]
    data = {**settings["data"], "train": 32, "held_out": 4}
    evaluation = {**settings["evaluation"], "temperatures": [1.0], "samples": 1, "responses": 1}
    return {**settings, "train": train, "data": data, "evaluation": evaluation}


def _check_names(questions: Sequence[Question]) -> None:
    """Equal settings must have one name, or they would be run twice."""
    names: dict[str, str] = {}
    for question in questions:
        for name, runs in question.runs.items():
            known = names.setdefault(digest(runs[0].settings), name)
            if known != name:
                raise InputError(
                    f"{question.path}: {name!r} has the settings of {known!r}; call both {known!r}, so that they are run once"
                )


def _check_options(runs: Mapping[str, RunSpec], questions: Sequence[Question], model: str) -> None:
    """Every run's options, read by the parser of `erpo-trl train`: a wrong one shows now, not in the fifth hour."""
    with tempfile.TemporaryDirectory() as folder:
        for key, run in runs.items():
            path = Path(folder) / "options.yaml"
            path.write_text(yaml.safe_dump(train_options(run, model, Path(folder), Path(folder))))
            try:
                parse(["--config", str(path)])
            except (InputError, SystemExit) as error:
                # argparse says on stderr which value it cannot read, and exits
                why = error if isinstance(error, InputError) else "an option's value cannot be read, see above"
                asked = next(q.path for q in questions for runs in q.runs.values() if runs[0].key == key)
                raise InputError(f"{asked}, {run.name}: {why}") from error


def train_options(run: RunSpec, model: str, folder: Path, work: Path) -> dict:
    """The options of `erpo-trl train` for a run.

    Args: model: path or id; folder: the run's own; work: the study's, where its data and reference tables lie.
    """
    options = {
        "model_name_or_path": model,
        **run.settings["train"],
        "dataset": str(data_folder(run, work) / "train.jsonl"),
        "output_dir": str(folder / "model"),
        "reference_cache_dir": str(work / "reference"),
        "seed": run.seed,
        "report_to": "none",
    }
    # transformers reads -1 as "by epochs"; a run of no steps is not trained at all
    return options | {"max_steps": max(1, run.steps)}


def data_folder(run: RunSpec, work: Path) -> Path:
    """Where the problems of a run lie."""
    return work / "data" / digest(run.settings["data"])[:8]


def _weights(model: str) -> str:
    """What the model's weights are, whatever the path they lie at."""
    from ..evaluation.model_source import resolve_model

    try:
        return resolve_model(model).weights
    except (OSError, ValueError) as error:
        raise InputError(
            f"model_name_or_path {model!r} cannot be found ({error}). Give its folder with --model"
        ) from error
