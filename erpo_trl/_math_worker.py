r"""The process that reads and compares answers with math-verify, so that a runaway parse can be killed from outside.

`erpo_trl.rewards` runs this file as a script, in an interpreter of its own. Requests and replies are lines of JSON:

    in   {"gold": text, "answer": text or null, "limit": seconds}
    out  {"readable": bool}                      once the gold is parsed
    out  {"equal": bool, "error": text or null}  once the answer is compared; left out when there is nothing to compare

Comparing is math-verify's work. Around it stand the few things that math-verify 0.9.0 gets wrong:

- A bare dataset string collapses to one of its numbers: every text is boxed before it is parsed.
- It compares exact numbers to 15 decimals and rounded ones to 6, so that all small numbers are equal: what it calls equal
  must also agree relatively (`agree`), member by member in sets, tuples, intervals, matrices and one-sided relations.
- `\mathrm{e}` inside braces breaks its unit stripping, or is read as a symbol: upright e and nested upright letters are
  unwrapped.
- `12:00` is read as a division by zero: clock times are compared as times.
- A bare word is read as a product of letters, so that anagrams are equal: words of four letters or more are compared as
  words, and a phrase of several bare words is not an answer that can be read.
- The criteria of congruence (`SAS`) are such products, too, and are compared as words.
- `3.1e-10` is read with Euler's number only: it has the scientific reading as well, and one match is enough.
- The base of a number (`52_8`) and the currency of a price are dropped: where both sides have one, it must be the same.
- Repeating decimals, LaTeX's spaces, and the fractions, roots and powers of Unicode are not read: `normalise` writes them in
  LaTeX that is.
- A congruence and some other notation cannot be parsed: such a gold is compared as text (`canonical`).
"""

import json
import logging
import os
import re
import signal
import sys
import unicodedata
from fractions import Fraction
from functools import lru_cache

import sympy
from math_verify import LatexExtractionConfig, parse, verify
from sympy.core.evalf import PrecisionExhausted
from sympy.core.function import AppliedUndef
from sympy.core.relational import Relational
from sympy.logic.boolalg import And

# Address space of the process, in bytes: a tower of powers must not take the machine's memory before its time is up.
MEMORY_LIMIT = 4 * 2**30
# Seconds beyond a request's own limit after which the process ends itself, in case nobody is left to kill it.
GRACE_S = 5

EXTRACTION = [LatexExtractionConfig(boxed_match_priority=0, try_extract_without_anchor=False)]

WRAPPERS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"))
UPRIGHT_E = re.compile(r"\\(?:mathrm|mathit|mathbf|text|textrm|operatorname)\s*\{\s*e\s*\}|\{\s*\\rm\s+e\s*\}")
UPRIGHT_NESTED = re.compile(r"\\(?:mathrm|mathit|mathbf)\s*\{\s*([A-Za-z])\s*\}(?=\s*\})")
SCIENTIFIC = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)[eE]([+-]?\d+)(?![\w.])")
WORD = re.compile(r"[A-Za-z]{4,}")
PROSE = re.compile(r"[A-Za-z]{2,}(?:[\s'-]+[A-Za-z]+)*\s+[A-Za-z]{2,}[.!?]?")
# SAS, ASA, SSS and the like; read backwards, each means the same
CONGRUENCE = re.compile(r"[AS]{3}")
CLOCK = re.compile(r"(\d{1,2}):([0-5]\d)(?::([0-5]\d))?([ap]m)?")

SPACES_BEFORE = re.compile(r"^(?:\s|~|\\[,;:! ])+")
# The backslash of a `\ ` whose space was stripped is a space as well; that of `\\` is none
SPACES_BEHIND = re.compile(r"(?:\s|~|(?<!\\)\\(?:[,;:! ]|$))+$")
TIE = re.compile(r"(?<!\d)~|~(?!\d)")  # `5~6` would be read as 5 + 6
THOUSANDS = re.compile(r"(?<![\d.])[1-9]\d{0,2}(?:\\,\d{3})+(?!(?:\\,)?\d)")
REPEATING = re.compile(
    r"(?<![\d.,_}])(?<!\d\s)(\d*)\.(\d*)\\(?:overline|bar)(?:\s*\{\s*(\d+)\s*\}|\s*(\d))(?!\s*(?:[\d_.]|\\(?:overline|bar)))"
)
# A dash after nothing or an opening is a sign; between two numbers it makes a range
LEADING_DASH = re.compile(r"(^|[(\[{,;=<>^])(\s*)[\u2012\u2013\uff0d](?=\s*[\w\\.(])")
UNICODE_FRACTION = re.compile(r"[\u00bc-\u00be\u2150-\u215e]")
# What a longer root covers cannot be told from `\u221a2x`
UNICODE_ROOT = re.compile(r"\u221a(?:(\d+|[A-Za-z])(?![\w^.(])|\(([^()]*)\)(?![\w^]))")
UNICODE_POWER = re.compile(r"(?<=[A-Za-z\d)}])[\u2070\u00b9\u00b2\u00b3\u2074-\u2079\u207b]+")
DEGREES = re.compile(r"(?<=\d)\s*[\u00b0\u5ea6](?!\s*\d)")  # 30 degrees 15 minutes would be read as 45
CURRENCY = re.compile(r"\\\$|[\u20ac\u00a3\u00a5]")
OUTER_CURRENCY = re.compile(r"^[\u20ac\u00a3\u00a5]\s*(?=\d)|(?<=\d)\s*[\u20ac\u00a3\u00a5]$")
FRACTION_PERCENT = re.compile(
    r"(?<![\d.,}])(\d*)\s*\\[dt]?frac\s*(?:\{(\d+)\}|(\d))\s*(?:\{([1-9]\d*)\}|([1-9]))\s*\\?%"
)
BASE = re.compile(r"([\da-z]*\d)\s*_\s*(?:\{([^{}]+)\}|([\da-z]+))")
BASE_WORDS = {
    word: base for base, word in enumerate("two three four five six seven eight nine ten eleven twelve".split(), 2)
}
BASE_IN_WORDS = re.compile(rf"(?<=\d)\s*_\s*\{{\s*(?:\\text\s*\{{)?\s*({'|'.join(BASE_WORDS)})\s*\}}?\s*\}}")

COMMAND = re.compile(r"\\[A-Za-z]+")
LETTERS = re.compile(r"[^\W\d_]{2,}")

# How closely two numbers must agree, relative to the larger: exact ones to the digits that are evaluated less a margin,
# and those of which one is a decimal as loosely as a decimal of a few digits is written.
EXACT_DIGITS = 50
EXACT_TOLERANCE = sympy.Float("1e-40", EXACT_DIGITS)
DECIMAL_TOLERANCE = sympy.Float("1e-3", EXACT_DIGITS)
# Where expressions with symbols are compared: any points would do that lie on no common curve.
POINTS = (sympy.Rational(7, 5), sympy.Rational(13, 29))


def normalise(text: str) -> str:
    """`text` without the math delimiters, spaces and full stop around it, in LaTeX that math-verify reads."""
    text = strip_spaces(text)
    previous = None
    while text != previous:
        previous = text
        text = strip_spaces(text.removesuffix("."))
        for opening, closing in WRAPPERS:
            inner = text[len(opening) : -len(closing)]
            if text == opening + inner + closing and opening not in inner and closing not in inner:
                text = inner.strip()
    text = rewrite_numbers(rewrite_unicode(text)).replace("\\varnothing", "\\emptyset")
    text = UPRIGHT_E.sub("e", text)
    return UPRIGHT_NESTED.sub(r"\1", text)


def strip_spaces(text: str) -> str:
    """`text` without white space and LaTeX's spaces around it."""
    return SPACES_BEHIND.sub("", SPACES_BEFORE.sub("", text))


def rewrite_unicode(text: str) -> str:
    """`text` with LaTeX in place of the signs that math-verify does not know, and without a currency around it."""
    text = LEADING_DASH.sub(r"\1\2-", OUTER_CURRENCY.sub("", text))
    text = UNICODE_FRACTION.sub(lambda match: latex_fraction(vulgar_fraction(match[0])), text)
    text = UNICODE_ROOT.sub(lambda match: f"\\sqrt{{{match[1] or match[2]}}}", text)
    text = UNICODE_POWER.sub(
        lambda match: "^{" + unicodedata.normalize("NFKC", match[0]).replace("\u2212", "-") + "}", text
    )
    return DEGREES.sub(r"^{\\circ}", text).replace("\u221e", "\\infty ")


def rewrite_numbers(text: str) -> str:
    """`text` with repeating decimals and percents in fractions as fractions, no space in a number, and bases in digits."""
    text = THOUSANDS.sub(lambda match: match[0].replace("\\,", ""), TIE.sub(" ", text))
    text = REPEATING.sub(lambda match: latex_fraction(repeating_decimal(match)), text)
    text = FRACTION_PERCENT.sub(lambda match: latex_fraction(fraction_percent(match)), text)
    return BASE_IN_WORDS.sub(lambda match: f"_{{{BASE_WORDS[match[1]]}}}", text)


def vulgar_fraction(sign: str) -> Fraction:
    return Fraction(unicodedata.normalize("NFKC", sign).replace("\u2044", "/"))


def repeating_decimal(match: re.Match) -> Fraction:
    """The value of a match of `REPEATING`: 0.1666... is (16 - 1) / 90."""
    whole, once, again = match[1], match[2], match[3] or match[4]
    period = 10 ** len(once + again) - 10 ** len(once)
    return Fraction(int(whole + once + again) - int(whole + once or "0"), period)


def fraction_percent(match: re.Match) -> Fraction:
    """The value of a match of `FRACTION_PERCENT`: 33 1/3 % is 1/3."""
    percent = int(match[1] or "0") + Fraction(int(match[2] or match[3]), int(match[4] or match[5]))
    return percent / 100


def latex_fraction(value: Fraction) -> str:
    return f"\\frac{{{value.numerator}}}{{{value.denominator}}}"


def bases(text: str) -> set[tuple[str, str]]:
    """The numbers of a normalised text that have a base, behind its last equals sign, as pairs of digits and base."""
    found = BASE.finditer(text.rpartition("=")[2].lower())
    return {(match[1], (match[2] or match[3]).strip()) for match in found}


def contradict(gold: str, answer: str) -> bool:
    """Whether two texts differ in a mark that both have and math-verify drops: the bases of numbers, the currency."""
    marks = [(bases(normalise(text)), set(CURRENCY.findall(text))) for text in (gold, answer)]
    return any(left and right and left != right for left, right in zip(*marks))


def is_notation(text: str) -> bool:
    """Whether `text` is whole and says something without words: it has a digit or command, and no word outside commands."""
    bare = COMMAND.sub(" ", text)
    braces = re.sub(r"\\[{}]", "", text)
    return (
        "\n" not in text
        and braces.count("{") == braces.count("}")
        and re.search(r"\d|\\[A-Za-z]", text) is not None
        and LETTERS.search(bare) is None
    )


def canonical(text: str) -> str:
    """A normalised text without what only changes its looks: spaces, sizes of fractions and brackets, braces around one sign."""
    text = re.sub(r"\\[dt]frac(?![A-Za-z])", r"\\frac", text)
    text = re.sub(r"\\(?:left|right|q?quad)(?![A-Za-z])|\\[,;:! ]", " ", text)
    text = re.sub(r"\{\s*(\w)\s*\}", r"\1", text)
    return re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", text)


def clock_time(text: str) -> tuple[int, int, str] | None:
    """A clock time as (seconds from 0:00 as written, seconds with am or pm applied, "am", "pm" or ""), else None."""
    plain = re.sub(r"\\(?:text|mathrm|textrm)\b|\\[,;:! ]|[\s.{}~]", "", text).lower()
    match = CLOCK.fullmatch(plain)
    if match is None:
        return None
    hours, minutes, seconds, half = int(match[1]), int(match[2]), int(match[3] or 0), match[4] or ""
    written = 3600 * hours + 60 * minutes + seconds
    of_day = written if not half else written - 3600 * hours + 3600 * (hours % 12 + 12 * (half == "pm"))
    return written, of_day, half


def surely_a_time(text: str) -> bool:
    """Whether `text` can be a clock time only: `12:05` and `2:30 pm` are, `3:20` may also be a ratio."""
    time = clock_time(text)
    return time is not None and (time[2] != "" or re.search(r":0\d", text) is not None)


def same_time(gold: tuple[int, int, str], answer: tuple[int, int, str]) -> bool:
    """Whether two clock times are the same; one without am or pm may be meant on either dial."""
    if bool(gold[2]) == bool(answer[2]):
        return gold[1] == answer[1]
    return gold[0] == answer[0] or gold[1] == answer[1]


def is_prose(text: str) -> bool:
    """Whether `text` has a part of several bare words (`no numeric answer`), which says nothing that can be compared."""
    return any(PROSE.fullmatch(part.strip()) for part in re.split(r",|;|\band\b|\bor\b", text))


@lru_cache(maxsize=4096)
def parsed(text: str) -> tuple:
    """What math-verify makes of a normalised text, undefined values (1/0) among it."""
    scientific = SCIENTIFIC.sub(r"\1 \\times 10^{\2}", text)
    found = []
    for variant in dict.fromkeys((text, scientific)):
        boxed = "\\boxed{" + variant + "}"
        # The caller kills this process when it is late; math-verify's own limit would only add a signal
        found += parse(boxed, EXTRACTION, fallback_mode="no_fallback", parsing_timeout=None)
    return tuple(found)


def readings(text: str) -> tuple:
    """The sympy objects that a normalised text can stand for; none when math-verify cannot parse it."""
    return tuple(expr for expr in parsed(text) if not expr.has(sympy.nan, sympy.zoo))


@lru_cache(maxsize=4096)
def gold_readings(gold: str) -> tuple | None:
    """The readings of a gold answer, () for one that is compared as text, None for one that cannot be read."""
    text = normalise(gold)
    if WORD.fullmatch(text) or surely_a_time(text):
        return ()
    if not text or is_prose(text):
        return None
    as_text = clock_time(text) or (not parsed(text) and is_notation(text))
    return readings(text) or (() if as_text else None)


def members(expr) -> list:
    """The finite values that `expr` is made of: a container's elements or ends, a one-sided relation's other side."""
    if isinstance(expr, Relational):
        if expr.lhs.is_Symbol:
            return members(expr.rhs)
        return members(expr.lhs) if expr.rhs.is_Symbol else []
    if isinstance(expr, sympy.Interval):
        return [end for end in (expr.start, expr.end) if not end.is_infinite]
    if isinstance(expr, sympy.MatrixBase):
        return list(expr.flat())
    if isinstance(expr, (And, sympy.FiniteSet, sympy.Tuple, sympy.Union)):
        return [member for arg in expr.args for member in members(arg)]
    return [expr] if isinstance(expr, sympy.Expr) else []


def close(gold: sympy.Expr, answer: sympy.Expr) -> bool:
    """Whether two values agree relative to their size; True also where this cannot be told, which leaves it to math-verify.

    Args: gold, answer: expressions; free symbols are compared at two points.
    """
    if gold == answer:
        return True
    if gold.free_symbols != answer.free_symbols or gold.has(AppliedUndef) or answer.has(AppliedUndef):
        return True
    # 9% and 9 are equal to math-verify, which knows how to tell 7.41% and 7.41 apart
    if gold.has(sympy.UnevaluatedExpr) or answer.has(sympy.UnevaluatedExpr):
        return True
    tolerance = DECIMAL_TOLERANCE if gold.has(sympy.Float) or answer.has(sympy.Float) else EXACT_TOLERANCE
    for point in POINTS:
        values = {symbol: point + 2 * i for i, symbol in enumerate(sorted(gold.free_symbols, key=str))}
        pair = [side.subs(values).doit() for side in (gold, answer)]
        if all(side.is_Rational for side in pair):
            if pair[0] != pair[1]:
                return False
            continue
        try:
            left, right = (side.evalf(EXACT_DIGITS, strict=True) for side in pair)
        except PrecisionExhausted:  # a hidden zero has no digits to compare
            continue
        if not (left.is_number and right.is_number and left.is_finite and right.is_finite):
            continue
        if abs(left - right) > tolerance * max(abs(left), abs(right)):
            return False
    return True


def agree(gold, answer) -> bool:
    """Whether every value in `gold` has a close one in `answer`; only a veto over what math-verify calls equal."""
    gold_members, answer_members = members(gold), members(answer)
    if not gold_members or not answer_members:
        return True
    return all(any(close(value, other) for other in answer_members) for value in gold_members)


def equal(gold: str, answer: str) -> bool:
    """Whether a boxed answer's text means the same as a readable gold's."""
    gold_text, answer_text = normalise(gold), normalise(answer)
    if contradict(gold, answer):  # first of all, for `normalise` drops currencies
        return False
    if gold_text == answer_text:
        return True
    gold_time, answer_time = clock_time(gold_text), clock_time(answer_text)
    if gold_time and answer_time:
        return same_time(gold_time, answer_time)
    if surely_a_time(gold_text) or surely_a_time(answer_text):
        return False
    words = [re.sub(r"^\\text\{([^{}]*)\}$", r"\1", text).strip() for text in (gold_text, answer_text)]
    if all(WORD.fullmatch(word) for word in words):
        return words[0].lower() == words[1].lower()
    if all(CONGRUENCE.fullmatch(word) for word in words):
        return words[0] in (words[1], words[1][::-1])
    if not gold_readings(gold):
        return canonical(gold_text) == canonical(answer_text)
    # Gold first: math-verify reads the answer in the gold's form, not the other way round
    return any(
        agree(gold_expr, answer_expr) and verify(gold_expr, answer_expr, timeout_seconds=None)
        for gold_expr in gold_readings(gold)
        for answer_expr in readings(answer_text)
    )


def limit_memory() -> None:
    """Caps this process's address space at `MEMORY_LIMIT`, where the system has such a cap."""
    import resource

    try:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
    except (ValueError, OSError) as error:  # macOS has the call and refuses it
        print(f"erpo_trl: no memory cap for the answer checker ({error}); its time limit still holds", file=sys.stderr)


def serve() -> None:
    """Answers requests from stdin until it is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, whose end closes stdin
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # which ends the process, even from within C code
    limit_memory()
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")

    def reply(**fields) -> None:
        replies.write(json.dumps(fields) + "\n")
        replies.flush()

    equal("\\frac{1}{2}", "0.25")  # builds the parser's tables
    reply(ready=True)
    # The ANTLR parser prints its complaints: they must neither mix with the replies nor reach the user's terminal
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.dup2(nowhere, sys.stderr.fileno())

    for line in sys.stdin:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, request["limit"] + GRACE_S)
        readable, verdict, failure = False, False, None
        # Whatever a model wrote may break the parser in its own way; the failure goes back as text
        try:
            readable = gold_readings(request["gold"]) is not None
        except Exception as error:
            failure = type(error).__name__
        reply(readable=readable, error=failure)
        if readable and request["answer"] is not None:
            try:
                verdict = equal(request["gold"], request["answer"])
            except Exception as error:
                failure = type(error).__name__
            reply(equal=verdict, error=failure)
        signal.setitimer(signal.ITIMER_REAL, 0)


if __name__ == "__main__":
    serve()
