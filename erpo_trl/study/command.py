"""`erpo-trl study`: the runs that the questions of a study take, and what came of them."""

import argparse
import importlib.util
import warnings
from collections.abc import Sequence
from pathlib import Path

from ..cli import InputError, check_folder
from .recipe import Question, RunSpec, read_questions
from .records import Record, find_records
from .runner import expected_seconds, run_all
from .worker import commit_of

RECORDS = "runs"  # below the folder of the pages


def distinct_runs(questions: Sequence[Question]) -> list[RunSpec]:
    """Every run of these questions once, question by question and in each seed by seed: a study cut short has whole seeds."""
    found: dict[str, RunSpec] = {}
    for question in questions:
        ordered = sorted(
            (run for runs in question.runs.values() for run in runs), key=lambda run: _place(question, run)
        )
        for run in ordered:
            found.setdefault(run.slug, run)
    return list(found.values())


def _place(question: Question, run: RunSpec) -> int:
    return [r.seed for r in question.runs[run.name]].index(run.seed)


def choose(questions: Sequence[Question], names: Sequence[str] | None) -> list[Question]:
    """The questions of these names, all without any. Raises: InputError for a name that none has."""
    known = [question.name for question in questions]
    unknown = [name for name in names or () if name not in known]
    if unknown:
        raise InputError(f"--questions: there is no question {unknown[0]!r}; there are {', '.join(known)}")
    return [question for question in questions if not names or question.name in names]


def listing(questions: Sequence[Question], records: dict[str, Record], expected: dict[str, float], jobs: int) -> str:
    """What is done and what is left, per question, and the hours that is expected to take."""
    lines, counted = [], set()
    for question in questions:
        runs = distinct_runs([question])
        left = [run for run in runs if run.slug not in records]
        own = [run for run in left if run.slug not in counted]
        counted |= {run.slug for run in left}
        hours = sum(expected[run.slug] for run in own) / 3600
        lines.append(
            f"{question.name}: {len(runs) - len(left)} of {len(runs)} runs done"
            + (f", {hours:.1f} core hours left" if own else "")
            + (f" ({len(left) - len(own)} counted above)" if len(left) > len(own) else "")
        )
        for name, of_variant in question.runs.items():
            marks = " ".join(f"{run.seed}{'+' if run.slug in records else '-'}" for run in of_variant)
            lines.append(f"  {name:<28} {of_variant[0].key}  {of_variant[0].steps:>5} steps  seeds {marks}")
    left = [run for run in distinct_runs(questions) if run.slug not in records]
    hours = sum(expected[run.slug] for run in left) / 3600
    lines.append(
        f"In all {len(left)} runs left, expected {hours:.1f} core hours, {hours / jobs:.1f} hours with {jobs} at a time "
        f"({'by the runs that are done' if records else 'a guess: no run is done yet'})"
    )
    return "\n".join(lines)


def main(argv: Sequence[str]) -> None:
    """Run what is left, then write the pages."""
    parser = argparse.ArgumentParser(
        prog="erpo-trl study",
        description="Make the runs that a study's questions take, resumably, and sum them up with 95% intervals over seeds.",
        epilog="Stopped by Ctrl-C or SIGTERM, or cut short by --max-hours, it goes on where it was when called again.",
    )
    parser.add_argument(
        "--config", nargs="+", required=True, metavar="FILE", help="files of questions, as in recipes/study/"
    )
    parser.add_argument("--questions", nargs="+", metavar="NAME", help="only these; default: all that the files ask")
    parser.add_argument("--model", help="folder or hub id of the model to train, in place of the base's")
    parser.add_argument("--output", type=Path, default=Path("docs/study"), help="folder of pages and records")
    parser.add_argument("--work", type=Path, default=Path("runs/study"), help="folder of models, logs and data")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, each on one core")
    parser.add_argument("--max-hours", type=float, help="begin no run that is expected to end after so many hours")
    parser.add_argument("--list", action="store_true", help="say what is done, what is left and how long it will take")
    parser.add_argument(
        "--summarise", action="store_true", help="write the pages from the records there are; run nothing"
    )
    parser.add_argument(
        "--smoke", type=Path, metavar="DIR", help="two steps, two seeds, a few problems; everything into DIR"
    )
    options = parser.parse_args(argv)
    for name, least in (("jobs", 1), ("max_hours", 0)):
        value = getattr(options, name)
        if value is not None and value < least:
            raise InputError(f"--{name.replace('_', '-')} must be at least {least}, found {value}")
    for name in ("output", "work", "smoke"):
        if getattr(options, name) is not None:
            check_folder(getattr(options, name), f"--{name}")
    output, work = options.output, options.work
    if options.smoke is not None:
        output, work = options.smoke, options.smoke / "work"

    # TRL and transformers warn of each other's deprecations; nothing the user can act on
    warnings.filterwarnings("ignore", category=FutureWarning)
    questions, model = read_questions(options.config, options.model, smoke=options.smoke is not None)
    chosen = choose(questions, options.questions)
    records, notes = find_records(output / RECORDS, questions)
    for note in notes:
        print(f"! {note}")
    runs = distinct_runs(chosen)
    done = list(records.values())
    expected = {run.slug: expected_seconds(run, done) for run in runs}
    if options.list:
        print(listing(chosen, records, expected, options.jobs))
        return
    left = [run for run in runs if run.slug not in records]
    outcome = None
    if not options.summarise and left:
        hours = sum(expected[run.slug] for run in left) / 3600 / options.jobs
        print(
            f"{len(runs) - len(left)} of {len(runs)} runs are done; the others are expected to take {hours:.1f} hours",
            flush=True,
        )
        asked = {
            run.slug: [q.name for q in questions if run.slug in {r.slug for rs in q.runs.values() for r in rs}]
            for run in left
        }
        outcome = run_all(
            left, expected, model, work, output / RECORDS, asked, commit_of(Path(__file__).parent),
            options.jobs, options.max_hours, lambda line: print(line, flush=True),
        )  # fmt: skip
        records, _ = find_records(output / RECORDS, questions)
    if importlib.util.find_spec("matplotlib") is None:
        print("No pages without matplotlib: pip install erpo-trl[plot], then --summarise")
    else:
        from .summary import write_pages

        print(f"Written to {output}: {', '.join(write_pages(output, chosen, questions, records))}")
    if outcome is not None:
        _report(outcome)


def _report(outcome) -> None:
    print(f"{len(outcome.done)} runs done, {len(outcome.failed)} failed, {len(outcome.left)} left")
    if outcome.stopped:
        raise SystemExit(130)
    if outcome.failed:
        raise InputError(f"{len(outcome.failed)} runs failed, see above: {', '.join(outcome.failed)}")
