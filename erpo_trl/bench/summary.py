"""The short table of a run, fit for a README: machine, date, and each ratio or number that something is aimed at."""

from collections.abc import Iterator, Sequence

import numpy as np

from .measure import Comparison

_ENDS = {"<=": "≤", ">=": "≥"}


def aims(comparisons: Sequence[Comparison]) -> Iterator[tuple[str, str, str, bool]]:
    """(what, found, aim, whether it is met) of every side that something is aimed at."""
    for comparison in comparisons:
        first = next(iter(comparison.values))
        for side, (end, wanted) in comparison.target.items():
            ratio, low, high = comparison.ratio(side)
            if ratio is None:
                continue
            spread = "" if comparison.counted else f" ({low:.2f}–{high:.2f})"
            met = ratio <= wanted if end == "<=" else ratio >= wanted
            yield f"{comparison.name}: {side} to {first}", f"{ratio:.3g}{spread}", f"{_ENDS[end]} {wanted:g}", met
        for side, most in comparison.limit.items():
            values = comparison.values[side]
            low, median, high = (f"{x:.2f}" for x in np.percentile(values, [25, 50, 75]))
            unit = comparison.unit
            found = f"{median} {unit} ({low}–{high})"
            yield f"{comparison.name}: {side}", found, f"< {most:g} {unit}", float(np.median(values)) < most


def summary_table(comparisons: Sequence[Comparison]) -> str:
    """Markdown. In brackets the quartiles over the rounds; a number that misses its aim is in bold."""
    lines = ["| measured | found | aim |", "|---|---|---|"]
    for what, found, aim, met in aims(comparisons):
        lines.append(f"| {what} | {found if met else f'**{found}**'} | {aim} |")
    return "\n".join(lines)
