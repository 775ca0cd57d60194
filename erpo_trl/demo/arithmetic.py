"""The embedded arithmetic problems: generated in code, deterministic by seed, nothing to download.

Five levels, from single-digit sums to two-digit chains that are out of the demo model's reach:

    level  form               numbers               example
    1      a±b                0..9                  7+5
    2      a±b                a 10..29, b 1..9      27-8
    3      a±b±c              1..9                  2-4+9
    4      a*b±c or c±a*b     a, b 2..5, c 1..9     3*5+2
    5      a±b±c              10..49                37+42-15

An expression is worded by one of four templates, which are not equally frequent: a problem's likelihood under the demo
model differs with its numbers, its length and its wording, which is what a method that watches the likelihood of its
queries needs.

Splits are cut by expression: a hash of its text sends one in five to "test", the rest to "train", whatever the wording,
the seed or the level. So no held-out expression is ever seen in training, not even in other words.
"""

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass

LEVELS = (1, 2, 3, 4, 5)
SPLITS = ("train", "test")

# Wording and its relative frequency.
TEMPLATES = {
    "{}": 40,
    "{}=?": 25,
    "What is {}?": 20,
    "Compute {}.": 15,
}

# How often a text that is already in the list is drawn again before it is kept as a duplicate: level 1 of the test split
# has about 150 texts in all, and a longer list has to repeat them.
_MAX_REDRAWS = 200


@dataclass(frozen=True)
class Expression:
    """An arithmetic expression, its last step, and its value.

    Args: text: the expression, as `3*5+2`; last_step: what is left once the first operation is done, as `15+2`, or `text`
    itself when there is one operation only; value: the integer it comes to.
    """

    text: str
    last_step: str
    value: int


def _signed(left: int, sign: str, right: int) -> int:
    return left + right if sign == "+" else left - right


def draw_expression(rng: random.Random, level: int) -> Expression:
    """An expression of `level`, drawn from `rng`, of either split."""
    sign = rng.choice("+-")
    if level in (1, 2):
        a, b = (rng.randint(0, 9), rng.randint(0, 9)) if level == 1 else (rng.randint(10, 29), rng.randint(1, 9))
        text = f"{a}{sign}{b}"
        return Expression(text, text, _signed(a, sign, b))
    if level in (3, 5):
        a, b, c = (rng.randint(1, 9) if level == 3 else rng.randint(10, 49) for _ in range(3))
        text, partial = f"{a}{sign}{b}", _signed(a, sign, b)
        sign = rng.choice("+-")
        return Expression(f"{text}{sign}{c}", f"{partial}{sign}{c}", _signed(partial, sign, c))
    if level == 4:
        a, b, c = rng.randint(2, 5), rng.randint(2, 5), rng.randint(1, 9)
        if rng.random() < 0.5:
            return Expression(f"{c}{sign}{a}*{b}", f"{c}{sign}{a * b}", _signed(c, sign, a * b))
        return Expression(f"{a}*{b}{sign}{c}", f"{a * b}{sign}{c}", _signed(a * b, sign, c))
    raise ValueError(f"level is {level!r}, expected one of {LEVELS}")


def split_of(expression: str) -> str:
    """The split that an expression's text belongs to: "test" for one in five, by a hash that no seed changes."""
    return "test" if hashlib.blake2b(expression.encode(), digest_size=8).digest()[0] % 5 == 0 else "train"


def draw_problem(rng: random.Random, level: int, split: str) -> tuple[str, str, Expression]:
    """A worded problem of `level` and `split`: its text, its template, its expression."""
    expression = draw_expression(rng, level)
    while split_of(expression.text) != split:
        expression = draw_expression(rng, level)
    template = rng.choices(list(TEMPLATES), weights=list(TEMPLATES.values()))[0]
    return template.format(expression.text), template, expression


def make_problems(n: int, seed: int, levels: Sequence[int] = LEVELS, split: str = "train") -> list[dict]:
    """`n` problems of one split, in equal parts from each of `levels`, shuffled.

    The same arguments give the same list. A text occurs once, unless a level has no more texts to offer.

    Returns: dicts with `problem` (the text of the user's turn), `answer` (the integer as a string) and `level`.
    """
    if split not in SPLITS:
        raise ValueError(f"split is {split!r}, expected one of {SPLITS}")
    rng = random.Random(seed)
    problems, seen = [], set()
    for index in range(n):
        level = levels[index % len(levels)]
        text, _, expression = draw_problem(rng, level, split)
        redraws = 0
        while text in seen and redraws < _MAX_REDRAWS:
            text, _, expression = draw_problem(rng, level, split)
            redraws += 1
        seen.add(text)
        problems.append({"problem": text, "answer": str(expression.value), "level": level})
    rng.shuffle(problems)
    return problems
