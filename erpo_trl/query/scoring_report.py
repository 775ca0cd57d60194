"""What a mapping of a data set to its reference reports."""

from dataclasses import dataclass, field

from .weights import Queries


@dataclass
class ScoringReport:
    """What one mapping did. `rows = scored + reused + duplicates + unscorable`.

    Args:
        rows: rows of the returned data set.
        scored: distinct queries scored by this call, over all processes.
        reused: distinct queries found in the data set's own columns or in the table.
        duplicates: further rows with the ids of another row.
        unscorable: rows of one token, which has no likelihood.
        spanless: rows of more tokens, none of which is in their span.
        dropped: rows left out because their prompt is too long.
        atypical: rows left out by `query_drop_quantile`.
        forwards: forwards of the model on this process.
        mean_nll: s̄ in nats, over the rows that have a likelihood; NaN without any.
        weight_ess: effective sample size of the weights, as a share of the rows.
        population: what the weights are relative to: the rows that have a likelihood, or what the caller gave.
        queries: likelihoods of all rows under the reference, of 0 tokens where a row has none.
    """

    rows: int = 0
    scored: int = 0
    reused: int = 0
    duplicates: int = 0
    unscorable: int = 0
    spanless: int = 0
    dropped: int = 0
    atypical: int = 0
    forwards: int = 0
    mean_nll: float = float("nan")
    weight_ess: float = float("nan")
    population: Queries | None = field(default=None, repr=False)
    queries: Queries | None = field(default=None, repr=False)

    def __str__(self) -> str:
        return (
            f"Reference of {self.rows} rows: {self.scored} queries scored, {self.reused} reused, {self.duplicates} "
            f"duplicate rows, {self.unscorable} without likelihood, {self.dropped} dropped as too long"
            f"{f', {self.atypical} as atypical' if self.atypical else ''}; mean NLL {self.mean_nll:.3f} nats, effective sample size of the weights {self.weight_ess:.0%}"
        )
