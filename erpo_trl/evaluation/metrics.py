"""Metrics of an evaluation, as pure functions of verdicts.

A metric of a benchmark is the mean over its problems of a value per problem. The functions give the values per problem, so
that means over temperatures and bootstraps over problems need no second definition. Problems are rows: two rows with the
same text stay two.
"""

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

# The bands of the ERPO paper's tables, ends included, and the whole sweep. Greedy decoding (T=0) is in none: the paper's
# sweep begins at 0.1, and a single deterministic answer is not a sample.
BANDS = {"mean_le_1.0": (0.0, 1.0), "mean_1.2_1.5": (1.2, 1.5), "mean": (0.0, float("inf"))}
BAND_LABELS = {"mean_le_1.0": "mean T≤1.0", "mean_1.2_1.5": "mean T 1.2–1.5", "mean": "mean"}


def pass_at_k(correct, n: int, k: int):
    """Chance that at least one of k samples is right, estimated from n: 1 - C(n-c, k) / C(n, k), without bias.

    Args: correct: number c of right samples, a number or an array; n: samples drawn; k: 1 to n.
    Returns: as `correct`, in [0, 1].
    Source: Chen et al., arXiv 2107.03374, section 2.1.
    """
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k} needs at least {k} samples and k at least 1; found {n} samples")
    correct = np.asarray(correct)
    # C(n-c, k) / C(n, k) as the product of (1 - k/i) over i = n-c+1 .. n
    i = np.arange(1, n + 1)
    return 1.0 - np.where(i > n - correct[..., None], 1.0 - k / np.maximum(i, k), 1.0).prod(-1)


def majority_at_k(answers: Sequence[str | None], right: Sequence[bool]) -> float:
    """Whether the most frequent answer among k samples is right; a tie counts as its share of right answers.

    Args: answers: what was read from each sample, None where nothing was, which has no vote; right: verdict of each.
    Answers are the same when their texts are, white space aside: `1/2` and `0.5` are two candidates.
    """
    texts = ["".join(answer.split()) if answer is not None else None for answer in answers]
    votes = Counter(text for text in texts if text)
    if not votes:
        return 0.0
    most = max(votes.values())
    verdicts = dict(zip(texts, right))
    return float(np.mean([verdicts[text] for text, count in votes.items() if count == most]))


def reported_ks(samples: int) -> list[int]:
    """The k of Pass@k that are reported for `samples` draws: powers of two from 2, and `samples`."""
    powers = [2**p for p in range(1, max(samples, 1).bit_length()) if 2**p < samples]
    return powers + ([samples] if samples > 1 else [])


def problem_values(
    right: np.ndarray, answers: Sequence[Sequence[str | None]], own: np.ndarray | None, samples: int
) -> dict[str, np.ndarray]:
    """Accuracy metrics per problem at one temperature.

    Args:
        right: (P, n) whether each of the n draws of Avg@k is right; n = samples, or 1 for greedy decoding, whose one draw
            stands for all.
        answers: P lists of n answers read, None where there is none.
        own: (P,) whether the draw that Pass@1 has to itself is right; None without such a draw.
        samples: the k of the metrics' names.

    Returns: name -> (P,) values in [0, 1]: `avg@k`, `pass@k` for several k, `maj@k`, `pass@1`.
    """
    values = {}
    if right.shape[1]:
        n = right.shape[1]
        values[f"avg@{samples}"] = right.mean(1)
        for k in reported_ks(samples):
            values[f"pass@{k}"] = pass_at_k(right.sum(1), n, min(k, n))
        values[f"maj@{samples}"] = np.array([majority_at_k(*pair) for pair in zip(answers, right)], dtype=float)
    if own is not None:
        values["pass@1"] = own.astype(float)
    return values


def in_band(temperature: float, band: str) -> bool:
    """Whether a temperature counts for a band of `BANDS`."""
    low, high = BANDS[band]
    return temperature > 0 and low <= temperature <= high


def band_values(by_temperature: Mapping[float, dict[str, np.ndarray]]) -> dict[str, dict[str, np.ndarray]]:
    """Values per problem, averaged over the temperatures of each band that has any.

    Args: by_temperature: temperature -> name -> (P,).
    Returns: band -> name -> (P,).
    """
    bands = {}
    for band in BANDS:
        members = [values for temperature, values in by_temperature.items() if in_band(temperature, band)]
        if members:
            bands[band] = {name: np.mean([values[name] for values in members], axis=0) for name in members[0]}
    return bands


def bootstrap_means(values: np.ndarray, name: str, replicates: int = 1000) -> np.ndarray:
    """Means of `values` over problems drawn with replacement.

    Args: values: (P,) or (P, M); name: of the benchmark, which seeds the draw: the same problems are drawn for all metrics,
    temperatures and runs of a benchmark (so differences are paired), and others for another benchmark; replicates: R.
    Returns: (R,) or (R, M).
    """
    seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big")
    problems = len(values)
    weights = np.random.default_rng(seed).multinomial(problems, np.full(problems, 1 / problems), size=replicates)
    return weights @ values / problems


def with_errors(values: Mapping[str, np.ndarray], name: str, replicates: int = 1000) -> dict[str, dict[str, float]]:
    """Mean and bootstrap standard error of each metric of one benchmark.

    Args: values: metric -> (P,); name: of the benchmark; replicates: bootstrap samples.
    Returns: metric -> {"value", "se"}.
    """
    matrix = np.stack(list(values.values()), axis=1)
    errors = bootstrap_means(matrix, name, replicates).std(axis=0)
    return {
        metric: {"value": float(value), "se": float(error)}
        for metric, value, error in zip(values, matrix.mean(0), errors)
    }


def train_eval_gap(train: Sequence[float], evaluation: Sequence[float], include_first: bool = True) -> float:
    """Mean over checkpoints of training accuracy minus evaluation accuracy, in the unit of both.

    Args: train, evaluation: one number per checkpoint, in the same order; include_first: count the first one, which is the
    model before training. The ERPO paper's Table 4 comes out of its Table 5 only with it.
    Source: arXiv 2608.23311, Tables 4 and 5.
    """
    if len(train) != len(evaluation):
        raise ValueError(f"found {len(train)} training and {len(evaluation)} evaluation accuracies; expected as many")
    gaps = [t - e for t, e in zip(train, evaluation)][0 if include_first else 1 :]
    if not gaps:
        raise ValueError("the gap needs at least one checkpoint")
    return sum(gaps) / len(gaps)
