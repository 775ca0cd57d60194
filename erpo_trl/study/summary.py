"""The pages of a study, out of its records: claim, runs, tables and plots with 95 % intervals over seeds.

Every number is made from the records, which each page lists. What is written by hand, the findings, lies in files of its own
below `findings/` and is put in as it is.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..evaluation.results import write_atomically
from ..report.document import Picture, Section, as_markdown
from ..report.drawing import draw_nll
from ..report.live import duration
from .plots import Line, Panel, as_png, draw_intervals, draw_panels, seed_line
from .recipe import Question
from .records import Record
from .tables import (
    MEAN_ACCURACY,
    TRAINED_AT,
    Found,
    accuracy_at,
    accuracy_table,
    collapse_table,
    difference_table,
    end_table,
    gap_table,
    nll_table,
    pairs_of,
)


@dataclass(frozen=True)
class Words:
    """What captions call the spread over seeds. Args: cells; divergences: how theirs is taken; differences;
    band, curves: of plots by temperature and over steps; lines: of differences."""

    cells: str
    divergences: str
    differences: str
    band: str
    curves: str
    lines: str


SEEDS = Words(
    cells="Mean and 95 % interval over seeds",
    divergences='(Student\'s t; of the logarithms for divergences, whose mean is geometric); "of 2" says that only two seeds have a finite value',
    differences="with 95 % intervals: an interval that holds 1 (ratio) or 0 (points) shows no difference at this number of seeds. Nothing "
    "is corrected for the number of comparisons",
    band="its 95 % interval, with few seeds wider than the plot (Student's t)",
    curves="its 95 % interval, with few seeds wider than the plot (Student's t; of the logarithms where the axis is logarithmic)",
    lines="95 % intervals",
)
# Of two values Student's interval is 12.7 standard errors wide to each side
TWO_SEEDS = Words(
    cells="Mean and, in braces, the values of both seeds",
    divergences="(the mean of divergences is geometric)",
    differences="with the values of both seeds in braces: two seeds bound no difference",
    band="from one seed to the other",
    curves="from one seed to the other; the mean is geometric where the axis is logarithmic",
    lines="From one seed to the other",
)

FINDINGS = "findings"  # hand-written, below the folder of the pages
POLICY_KL = ("policy/kl", "kl")


# ------------------------------------------------------------------------------------------------------------------- plots
def curves_figure(found: Found, chosen: Sequence[str]):
    """Drifts, entropy and reward over steps; None where nothing is known."""
    panels = []
    for title, unit, names, log in (
        ("Query-KL while training", "nats per prompt token", ("query/kl",), True),
        ("Policy-KL while training", "nats per completion token", POLICY_KL, True),
        ("Entropy", "nats per completion token", ("entropy",), False),
        ("Training reward", "share of right answers", ("reward",), False),
    ):
        lines = [
            seed_line(name, index, [record.series(*names) for record in found[name].values()], log)
            for index, name in enumerate(found)
            if name in chosen
        ]
        panels.append(Panel(title, unit, [line for line in lines if line is not None], log))
    return draw_panels(panels, "optimizer step") if any(panel.lines for panel in panels) else None


def temperature_figure(found: Found, chosen: Sequence[str], temperatures: Sequence[float]):
    """Accuracy against temperature; None without records."""
    lines = [
        Line(name, index, temperatures, [accuracy_at(t).interval(found[name]) for t in temperatures])
        for index, name in enumerate(found)
        if name in chosen and found[name]
    ]
    panel = Panel("Held-out problems", "right answers, %", lines)
    return draw_panels([panel], "sampling temperature") if lines else None


def difference_figure(question: Question, found: Found):
    """Differences of the mean accuracy, paired by seed; None without a pair of two seeds."""
    rows = {f"{a} − {b}": MEAN_ACCURACY.difference(found[a], found[b]) for a, b in pairs_of(question)}
    rows = {label: interval for label, interval in rows.items() if interval.count > 1}
    label = "difference of the mean accuracy over temperatures, points"
    return draw_intervals(rows, label, zero=True) if rows else None


def nll_figure(found: Found):
    """Prompt NLL against response NLL of the model before training; None without it."""
    panels = []
    for index, (name, records) in enumerate(found.items()):
        for seed, record in list(records.items())[:1]:
            nll = record.content["nll"]
            if "prompt" in nll:
                entry = {"label": f"{name}, seed {seed}", "colour": index, "x": nll["prompt"], "y": nll["response"]}
                panels.append(entry | {key: nll[key] for key in ("points", "pearson", "spearman", "partial")})
    return draw_nll({"panels": panels}) if panels else None


# ------------------------------------------------------------------------------------------------------------------- pages
def missing_sentences(question: Question, found: Found) -> list[str]:
    """What is not run yet."""
    absent = {name: [run.seed for run in runs if run.seed not in found[name]] for name, runs in question.runs.items()}
    parts = [f"{name} (seeds {', '.join(map(str, seeds))})" for name, seeds in absent.items() if seeds]
    return [f"Not run yet, and in none of the numbers below: {'; '.join(parts)}."] if parts else []


def record_table(found: Found) -> list[list[str]]:
    """The records behind a page, with the code's commit and what the run took."""
    rows = [["record", "steps", "commit", "time", "resumed"]]
    for records in found.values():
        for record in records.values():
            content = record.content
            commit, mark, _ = content["commit"].partition("+")
            rows.append(
                [
                    f"[{record.path.stem}](runs/{record.path.name})",
                    str(record.steps),
                    commit[:10] + (" + changes" if mark else ""),
                    duration(sum(content["seconds"].values())),
                    "yes" if content["resumed"] else "no",
                ]
            )
    return rows


def sections_of(question: Question, found: Found, findings: str | None) -> list[Section]:
    """The page of a question."""
    claim = Section("Claim", [question.claim])
    written = Section("Findings", [findings] if findings else [], [] if findings else ["Not written yet."])
    done = sum(map(len, found.values()))
    wanted = sum(map(len, question.runs.values()))
    runs = Section(
        "Runs", [f"{done} of {wanted} runs are done.", options_table(question)], missing_sentences(question, found)
    )
    if not done:
        return [claim, written, runs]
    temperatures = next(record for records in found.values() for record in records.values()).temperatures
    source = (
        f"From the records of {', '.join(f'`{name}`' for name, records in found.items() if records)}, listed below."
    )
    chosen = question.summary.get("lines") or list(found)

    def picture(title: str, name: str, figure, caption: str) -> Section:
        if figure is None:
            return Section(title, [], ["No record holds what this plot shows."])
        return Section(title, [Picture(f"{question.name}-{name}", as_png(figure), f"{caption} {source}")])

    words = TWO_SEEDS if max(map(len, found.values())) == 2 else SEEDS
    found_sections = [
        claim,
        written,
        runs,
        Section(
            "At the end of training",
            [
                end_table(found),
                "Divergences in nats per token, from the model before training: Query-KL by k3 per prompt token, the same for all "
                f"variants whatever they trained with; Policy-KL in full on sampled responses to held-out prompts. {words.cells} "
                f"{words.divergences}. {source}",
            ],
        ),
        Section(
            "Accuracy on held-out problems",
            [
                accuracy_table(found, temperatures),
                f"Right answers in percent, by sampling temperature and in the mean. {words.cells}. {source}",
            ],
        ),
        Section(
            "Differences",
            [
                difference_table(question, found, temperatures),
                f"Paired by seed, {words.differences}. {source}",
            ],
        ),
        picture(
            "Training",
            "training",
            curves_figure(found, chosen),
            f"Line: mean over seeds; band: {words.curves}. Query-KL as the run logged it, by its own estimator.",
        ),
        picture(
            "Accuracy by temperature",
            "temperature",
            temperature_figure(found, chosen, temperatures),
            f"Line: mean over seeds; band: {words.band}.",
        ),
        picture(
            "Differences of accuracy",
            "differences",
            difference_figure(question, found),
            f"{words.lines}, paired by seed.",
        ),
    ]
    if any(runs[0].settings["evaluation"]["checkpoints"] for runs in question.runs.values()):
        found_sections += [
            Section(
                "Gap between training and held-out problems",
                [
                    gap_table(found),
                    f"Points at T={TRAINED_AT:g}; training accuracy is the reward logged last. {source}",
                ],
            ),
            Section(
                "Signs of collapse",
                [collapse_table(found), f"By the running bands of `erpo-trl report`, on entropy and reward. {source}"],
            ),
        ]
    if any(runs[0].steps == 0 for runs in question.runs.values()):
        found_sections += [
            Section(
                "Prompt NLL and response NLL",
                [
                    nll_table(found),
                    f"Over the held-out prompts; response NLL is the mean of a prompt's responses. {source}",
                ],
            ),
            picture("Before training", "nll", nll_figure(found), "A point is a held-out prompt; NLLs in nats."),
        ]
    return [*found_sections, Section("Records", [record_table(found)])]


def options_table(question: Question) -> list[list[str]]:
    """What each variant is: the options in which the variants differ."""
    options = {name: runs[0].settings["train"] for name, runs in question.runs.items()}
    keys = list(dict.fromkeys(key for own in options.values() for key in own))
    differ = [key for key in keys if len({str(own.get(key)) for own in options.values()}) > 1]
    rows = [["variant", "seeds", "options"]]
    for name, runs in question.runs.items():
        own = ", ".join(f"`{key}: {options[name][key]}`" for key in differ if key in options[name])
        rows.append([name, ", ".join(str(run.seed) for run in runs), own or "the base's"])
    return rows


def gather(question: Question, records: Mapping[str, Record]) -> dict[str, dict[int, Record]]:
    """The records of a question by variant and seed."""
    return {
        name: {run.seed: records[run.slug] for run in runs if run.slug in records}
        for name, runs in question.runs.items()
    }


def write_pages(
    folder: Path, chosen: Sequence[Question], questions: Sequence[Question], records: Mapping[str, Record]
) -> list[str]:
    """A page per chosen question with its plots, and the list of all questions, into the folder. Of a question that is not among
    these, what the list says of it stays as long as its page is there.

    Returns: the names of the files written.
    """
    written = []
    for question in chosen:
        sections = sections_of(question, gather(question, records), _by_hand(folder, question.name))
        for section in sections:
            for block in section.blocks:
                if isinstance(block, Picture):
                    path = folder / f"{block.name}.png"
                    write_atomically(path, lambda temporary, png=block.png: temporary.write_bytes(png))
                    written.append(path.name)
        written.append(_write_page(folder, question.name, as_markdown(question.title, sections)))
    rows = {}
    for question in questions:
        found = gather(question, records)
        done, wanted = (sum(map(len, runs.values())) for runs in (found, question.runs))
        rows[question.name] = [f"[{question.title}]({question.name}.md)", question.claim, f"{done} of {wanted}"]
    listed = _listed(folder)
    if set(listed) - set(rows):
        rows = listed | rows  # each in its place
    text = _by_hand(folder, "index")
    sections = [
        Section("Questions", [[["question", "claim", "runs done"], *rows.values()]]),
        *([Section("How", [text])] if text else []),
    ]
    return [*written, _write_page(folder, "index", as_markdown("The study", sections))]


def _listed(folder: Path) -> dict[str, list[str]]:
    """The rows of the list of questions whose pages are there, by name."""
    index = folder / "index.md"
    rows = {}
    for line in index.read_text(encoding="utf-8").splitlines() if index.is_file() else ():
        page = re.match(r"\| \[.*\]\(([^()/]+)\.md\) +\|", line)
        if page and (folder / f"{page[1]}.md").is_file():
            rows[page[1]] = [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
    return rows


def _by_hand(folder: Path, name: str) -> str | None:
    path = folder / FINDINGS / f"{name}.md"
    return path.read_text(encoding="utf-8").strip() if path.is_file() else None


def _write_page(folder: Path, name: str, text: str) -> str:
    note = (
        f"<!-- Written by erpo-trl study from the records in runs/ and, where there is one, {FINDINGS}/{name}.md. -->"
    )
    page = folder / f"{name}.md"
    write_atomically(page, lambda temporary: temporary.write_text(f"{note}\n{text}", encoding="utf-8"))
    return page.name
