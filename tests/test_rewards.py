r"""The scorer against verdicts worked out by hand, its time limit, and the reward functions that TRL calls."""

import os
import random
import subprocess
import sys
import textwrap
import threading

import pytest

from erpo_trl import _math_worker, rewards
from erpo_trl.rewards import (
    PLAIN_INTEGER,
    REWARDS,
    MathWorker,
    accuracy_reward,
    format_reward,
    gold_text,
    last_boxed,
    resolve_reward,
    score_answer,
)

NESTED = "(" * 5000 + "1" + ")" * 5000
TOWER = "9^{9^{9^{9}}}"


def boxed(answer: str) -> str:
    return f"so the answer is \\boxed{{{answer}}}."


VERDICTS = {
    "equations given bare": [
        ("3x-y+13=0", "3x+4y+14=0", 0),
        ("3x-y+13=0", "0", 0),
        ("3x-y+13=0", "3x-y+13=0", 1),
        ("2x+4y-3=0", r"y=-\frac{1}{2}x+\frac{3}{4}", 1),
    ],
    "exact numbers that differ beyond any decimal": [
        (r"\frac{1}{2004!}", r"\frac{1}{2006!}", 0),
        (r"\frac{1}{2^{99}}", r"\frac{1}{2^{98}}", 0),
        (r"\frac{1}{2^{99}}", r"2^{-99}", 1),
        (r"\frac{2^{2005}+1}{3*2^{2006}}", r"\frac{1}{3*2^{2006}}", 0),
        (r"\frac{2^{2005}+1}{3 \cdot 2^{2006}}", r"\frac{1}{3 \cdot 2^{2006}}", 0),
        (r"\frac{2^{2005}+1}{3 \cdot 2^{2006}}", r"\frac{1}{6}+\frac{1}{3 \cdot 2^{2006}}", 1),
        ("e^{-100}", "e^{-101}", 0),
        (r"x^2+\frac{1}{2^{99}}", "x^2", 0),
        (r"\sqrt{3+2\sqrt{2}}", r"1+\sqrt{2}", 1),
    ],
    "the same inside sets, tuples, intervals and relations": [
        (r"\{\frac{1}{2^{99}}, 3\}", r"\{3, \frac{1}{2^{98}}\}", 0),
        (r"\{\frac{1}{2^{99}}, 3\}", r"\{3, 2^{-99}\}", 1),
        (r"(\frac{1}{2^{99}}, 3, 4)", r"(\frac{1}{2^{98}}, 3, 4)", 0),
        (r"[\frac{1}{2^{99}}, \infty)", r"[\frac{1}{2^{98}}, \infty)", 0),
        (r"x=\frac{1}{2^{99}}", r"x=\frac{1}{2^{98}}", 0),
        (r"x<\frac{1}{2^{99}}", r"x<\frac{1}{2^{98}}", 0),
        (r"x<\frac{1}{2^{99}}", "x<2^{-99}", 1),
    ],
    "small decimals": [
        (r"6.63\times 10^{-34}", r"1.05\times 10^{-34}", 0),
        (r"6.63\times 10^{-34}", r"0.663\times 10^{-33}", 1),
        ("0.0000001", "0.0000002", 0),
    ],
    "plus or minus": [
        (r"\pm 2021", "2021", 0),
        ("2021", r"\pm 2021", 0),
        (r"\pm 2021", "-2021, 2021", 1),
        (r"1 \pm \sqrt{2}", r"1+\sqrt{2}, 1-\sqrt{2}", 1),
    ],
    "clock times": [
        ("12:00", "1:00", 0),
        ("12:00", "12", 0),
        ("12", "12:00", 0),
        ("0", "0:05", 0),
        ("12:00", "12:00", 1),
        ("2:30", r"2:30 \text{ p.m.}", 1),
        ("2:30 pm", r"14{:}30", 1),
        (r"2:30 \text{ AM}", "2:30 pm", 0),
        ("3:20", "6:40", 0),
        ("3:20", r"\frac{3}{20}", 1),
        ("1:2", "2:4", 1),
    ],
    "upright letters": [
        (r"1-\frac{1}{\mathrm{e}}", r"1+\frac{1}{\mathrm{e}}", 0),
        (r"1-\frac{1}{\mathrm{e}}", r"1-\frac{1}{e}", 1),
        (r"\mathrm{e}^2", "e^2", 1),
        (r"\frac{1}{\mathrm{x}}", r"\frac{1}{x}", 1),
    ],
    "several values": [
        ("1331 and 1728", "1728", 0),
        ("1331 and 1728", "1331, 1728", 1),
        ("1331 and 1728", "1728, 1331", 1),
    ],
    "gold first": [
        (r"$m \geq \sqrt{2}$", r"m \in [\sqrt{2}, +\infty)", 1),
    ],
    "text that must not collapse to a number": [
        (r"10 - 2\sqrt{5}", "2", 0),
        (r"10 - 2\sqrt{5}", r"10 - 2\sqrt{5}", 1),
        (r"10 - 2\sqrt{5}", r"2(5-\sqrt{5})", 1),
        ("0,1", "0.1", 0),
        (r"7.41\%", "7.41", 0),
        (r"7.41\%", r"7.41\%", 1),
        (r"(1,\frac{9}{2})", "(1,4.5)", 1),
        ("B", "B", 1),
        ("(0,1)", "[0,1]", 0),
    ],
    "commas": [
        ("0,1", "0,1", 1),
        ("0,1", "01", 0),
        ("0,1", "1, 0", 1),
        ("115,000", "115000", 1),
        ("3,5,7", "357", 0),
    ],
    "scientific notation beside Euler's number": [
        ("1e-5", "10^{-5}", 1),
        ("4.5e33", r"4.5 \times 10^{33}", 1),
        ("2e-3", "2e - 3", 1),
        ("2e-3", "0.002", 1),
        ("2e-3", "2", 0),
    ],
    "words": [
        (r"\text{east}", "East", 1),
        ("east", "seat", 0),
        ("east", r"\text{seat}", 0),
        ("SAS", "SSA", 0),
        ("ASA", r"\text{AAS}", 0),
        ("AAS", "SAA", 1),
        (r"\text{SAS}", "SAS", 1),
        ("AB", "BA", 1),
        ("ab", "ba", 1),
    ],
    "numbers with a base": [
        ("2220_5", "2220_{10}", 0),
        ("52_8", "52_{10}", 0),
        ("4210_{5}", "4210_6", 0),
        ("1010_2", "1010_3", 0),
        ("10_5, 11_6", "10_6, 11_5", 0),
        ("10_5, 11_6", "11_6, 10_5", 1),
        ("2220_5", "2220_{5}", 1),
        ("2220_5", "2220", 1),
        ("2220", "2220_5", 1),
        (r"10_{\text{two}}", "10_2", 1),
        (r"10_{\text{two}}", r"10_{\text{three}}", 0),
        ("1010_2", "10_{10} = 1010_2", 1),
        ("x_1^2-x_2^2", "(x_1-x_2)(x_1+x_2)", 1),
    ],
    "repeating decimals": [
        (r"0.\overline{3}", r"\frac13", 1),
        (r"0.\overline{27}", r"\frac{3}{11}", 1),
        (r"0.\bar{3}", r"\frac{1}{3}", 1),
        (r"\frac16", r"0.1\overline{6}", 1),
        (r"-1.2\overline{34}", r"-\frac{611}{495}", 1),
        (r"0.\overline{3}", "0.3", 0),
        (r"0.\overline{3}", r"0.\overline{33}", 1),
        (r"0.\overline{36}", r"0.3\overline{6}", 0),
        (r"0.\overline{12}_3", r"\frac{4}{33}", 0),
        ("x=0.\\overline{3}", "1/3", 1),
        (r"\overline{AB}", r"\overline{BA}", 0),
    ],
    "percents in fractions": [
        (r"33\frac13\%", r"33.\overline{3}\%", 1),
        (r"12\frac12\%", r"12.5\%", 1),
        (r"12\frac12\%", r"12\%", 0),
        (r"12\frac12\%", r"6\%", 0),
        (r"0.5\%", r"\frac{1}{2}\%", 1),
        (r"33\frac13", r"33\frac13\%", 0),
    ],
    "spaces of LaTeX": [
        (r"10\,000", "10000", 1),
        (r"1\,000\,000", "1,000,000", 1),
        (r"(3, 10\,000)", "(3, 10000)", 1),
        (r"12\,3456", "123456", 0),
        (r"1\,2", "12", 0),
        (r"(1,\,234)", "1234", 0),
        (r"5~\text{kg}", "5", 1),
        ("5", "~$5$~", 1),
        ("11", "5~6", 0),
        ("5", r"\ 5\ ", 1),
        (r"5\,", "5", 1),
    ],
    "signs of Unicode": [
        ("–5", "-5", 1),
        ("[–5, 5]", "[-5, 5]", 1),
        ("3–5", "-2", 0),
        ("-2", "3 – 5", 0),
        (r"\varnothing", r"\emptyset", 1),
        ("½", r"\frac12", 1),
        ("3½", "3.5", 1),
        ("√2", r"\sqrt{2}", 1),
        ("√(x+1)", r"\sqrt{x+1}", 1),
        (r"\sqrt{2}x", "√2x", 0),  # which may be the root of 2x
        ("x²", "x^2", 1),
        ("10⁻³", "0.001", 1),
        ("∞", r"\infty", 1),
        ("(-∞, 3)", r"(-\infty, 3)", 1),
        ("90", "90度", 1),
        ("90°", r"90^\circ", 1),
        ("45", "30°15'", 0),
        ("5", "€5", 1),
        (r"\$5", "5", 1),
        ("€5", r"\$5", 0),
        ("€5", "¥5", 0),
        ("€5", "5 €", 1),
    ],
    "notation that cannot be parsed is compared as text": [
        (r"x \equiv 7 \pmod{12}", r"x\equiv 7\pmod {12}", 1),
        (r"x \equiv 7 \pmod{12}", r"x \equiv 5 \pmod{12}", 0),
        (r"x \equiv 7 \pmod{12}", "7", 0),
        (r"p \land \frac12", r"p \land \dfrac{1}{2}", 1),
        (r"p \land 12", r"p \land 1 2", 0),
        ("E_1", "E_1", 1),
        ("E_1", "E_2", 0),
    ],
}


@pytest.mark.parametrize("gold, answer, right", [case for cases in VERDICTS.values() for case in cases])
def test_verdict(gold, answer, right):
    assert score_answer(gold, boxed(answer)) == right


@pytest.mark.parametrize("gold", sorted({case[0] for cases in VERDICTS.values() for case in cases}))
def test_every_gold_equals_itself(gold):
    assert score_answer(gold, boxed(gold)) == 1.0
    assert score_answer(boxed(gold), boxed(gold)) == 1.0  # a gold may come with its box


@pytest.mark.parametrize(
    "gold, answer, present",
    [
        (r"9\%", "9", 1.0),
        (r"9\%", "0.09", 1.0),
        (r"\frac{1}{3}", "0.333333", 1.0),
        (r"\frac{1}{3}", "0.33", 0.0),
        (r"\frac{1}{i}", "-i", 0.0),
        (r"x \equiv 7 \pmod{12}", r"x \equiv 7 \bmod 12", 0.0),
        ("1 000", "1000", 0.0),
        (r"0.\dot{3}", r"\frac{1}{3}", 0.0),
        (r"5 \text{ kg}", r"5 \text{ m}", 1.0),
        ("52", "52_8", 1.0),
        ("IV", "VI", 1.0),
        ("no", "on", 1.0),
        (r"0.\bar{3}", "0.333333", 1.0),
        ("A", "a", 1.0),
    ],
)
def test_known_limits_are_as_documented(gold, answer, present):
    assert score_answer(gold, boxed(answer)) == present


@pytest.mark.parametrize("gold", [None, "", "  ", "$$", float("nan"), [], "no numeric answer", "1/0", r"\frac{1}{"])
@pytest.mark.parametrize("completion", [r"\boxed{3}", r"\boxed{}", "", r"\boxed{no numeric answer}", r"\boxed{1/0}"])
def test_unreadable_gold_abstains_whatever_the_completion(gold, completion):
    assert score_answer(gold, completion) is None


@pytest.mark.parametrize("gold", ["6", r"\frac{1}{2}", r"\text{east}"])
@pytest.mark.parametrize(
    "completion", ["", "6", r"\boxed{}", r"\boxed{ }", r"\boxed", r"\boxed{6", r"\boxed{6} or \boxed{6"]
)
def test_without_a_filled_box_the_score_is_zero(gold, completion):
    assert score_answer(gold, completion) == 0.0


@pytest.mark.parametrize(
    "text, inside",
    [
        (r"\boxed{1} then \boxed{2}", "2"),
        (r"\boxed{\frac{1}{\sqrt{2}}}", r"\frac{1}{\sqrt{2}}"),
        (r"\boxed {\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\left\{ 1 \right.}", r"\left\{ 1 \right."),
        (r"\boxed{x = \boxed{3}}", "3"),
        (r"\boxed{1} was put in a \boxed", "1"),
        (r"\boxed{}", ""),
        ("none", None),
    ],
)
def test_last_box(text, inside):
    assert last_boxed(text) == inside


def test_boxes_of_human_authors_are_read_in_solutions_only():
    assert last_boxed(r"Hence $\boxed 5$.", written_solution=True) == "5"
    assert last_boxed(r"Hence $\fbox{5}$.", written_solution=True) == "5"
    assert last_boxed(r"Hence $\boxed 5$.") is None
    assert last_boxed(r"Hence $\fbox{5}$.") is None


@pytest.mark.parametrize(
    "gold", [r"so \boxed 5", r"$2+3=\fbox{5}$", r"\boxed{4} or rather \boxed{5}", "2+3=5\n#### 5"]
)
def test_the_gold_of_a_whole_solution(gold):
    assert score_answer(gold, boxed("5")) == 1.0
    assert score_answer(gold, boxed("4")) == 0.0


def test_the_last_box_wins():
    assert score_answer("2", r"\boxed{1}, no: \boxed{2}") == 1.0
    assert score_answer("1", r"\boxed{1}, no: \boxed{2}") == 0.0


def test_plain_integers_get_the_verdict_of_the_slow_path():
    draw = random.Random(0)
    numbers = [0, 1, -1, 10, 999_999_999_999_999_999] + [
        draw.randint(-(10 ** draw.randint(1, 17)), 10**6) for _ in range(15)
    ]
    texts = [str(number) for number in numbers]
    assert all(PLAIN_INTEGER.fullmatch(text) for text in texts)
    for gold in texts:
        for answer in (gold, draw.choice(texts), str(int(gold) + 1), str(-int(gold))):
            slow = any(
                _math_worker.agree(g, a) and _math_worker.verify(g, a, timeout_seconds=None)
                for g in _math_worker.readings(gold)
                for a in _math_worker.readings(answer)
            )
            assert score_answer(gold, boxed(answer)) == slow, (gold, answer)


@pytest.mark.parametrize("text", ["007", "+5", "1,000", "-0", "5.0", "1 000", "٣", "1" * 19])
def test_other_spellings_take_the_slow_path(text):
    assert not PLAIN_INTEGER.fullmatch(text)


@pytest.mark.parametrize(
    "value, text",
    [
        (142.0, "142"),
        (0.25, "0.25"),
        (7, "7"),
        (" 9.6\n", "9.6"),
        (["1", 2.0], "1, 2"),
        (["1", None], None),
        (1e22, "1" + "0" * 22),
        ("#### 72", "72"),
        ("Half of 4,000 is 2,000.\n#### 2,000", "2000"),
        ("#### 1\nno:\n#### -1,234.50", "-1234.50"),
        ("#### 1, 2", "1, 2"),
        ("2,000", "2,000"),
        ("####", None),
    ],
)
def test_gold_text(value, text):
    assert gold_text(value) == text


@pytest.fixture
def worker():
    worker = MathWorker()
    yield worker
    worker.close()


def test_a_runaway_answer_costs_its_limit_and_the_next_call_works(worker, caplog):
    assert worker.compare(r"\frac{1}{3}", r"\frac{2}{6}", 10.0) is True
    first = worker.pid
    for answer in (NESTED, TOWER):
        assert worker.compare("6", answer, 1.0) is False  # else it would go on for longer than any test may
    assert "ran out of time" in caplog.text
    with pytest.raises(ProcessLookupError):  # killed, and waited for
        os.kill(first, 0)
    assert worker.compare(r"\frac{1}{3}", r"\frac{2}{6}", 10.0) is True
    assert worker.pid != first


def test_a_gold_too_slow_to_read_abstains(worker):
    assert worker.compare(NESTED, "6", 1.0) is None
    assert score_answer(NESTED, boxed("6"), time_limit_s=1.0) is None


@pytest.mark.parametrize("answer", [NESTED, TOWER])
def test_a_runaway_answer_scores_zero_within_the_budget(answer):
    assert score_answer("6", boxed(answer), time_limit_s=2.0) == 0.0
    assert score_answer(r"\frac{1}{2}", boxed("0.5")) == 1.0


def test_a_killed_worker_is_replaced(worker):
    assert worker.compare("1/2", "0.5", 10.0) is True
    worker._process.kill()
    assert worker.compare("1/2", "0.5", 10.0) is True


def test_an_interrupt_leaves_no_stale_reply(worker, monkeypatch):
    def interrupted(*args):
        raise KeyboardInterrupt

    assert worker.compare("1/2", "0.5", 10.0) is True
    with monkeypatch.context() as patched:
        patched.setattr(worker, "_reply", interrupted)
        with pytest.raises(KeyboardInterrupt):
            worker.compare("1/2", "0.5", 10.0)
    assert worker.compare("1/2", "3", 10.0) is False


def test_a_worker_that_cannot_start_says_so(worker, monkeypatch):
    monkeypatch.setattr(sys, "path", [path for path in sys.path if "site-packages" not in path])
    with pytest.raises(RuntimeError, match="worker did not start: The answer checker died.*import math_verify"):
        worker.compare("1/2", "0.5", 10.0)


def test_threads_get_the_verdicts_of_the_main_thread():
    answers = [
        rf"\frac{{{index}}}{{{2 * index}}}" if index % 2 else rf"\frac{{{index}}}{{7}}" for index in range(1, 13)
    ]
    expected = [float(index % 2) for index in range(1, 13)]
    results = {}

    def run(name):
        results[name] = accuracy_reward([boxed(answer) for answer in answers], [r"\boxed{\frac{1}{2}}"] * len(answers))

    threads = [threading.Thread(target=run, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert list(results.values()) == [expected] * 4


SCRIPT = """
    import os, sys, threading
    print("imported", flush=True)
    from erpo_trl.rewards import _WORKER, accuracy_reward, score_answer
    third = chr(92) + "boxed{" + chr(92) + "frac{1}{3}}"
    thread = threading.Thread(target=lambda: print(accuracy_reward([third], [third]), flush=True))
    thread.start()
    thread.join()
    worker = _WORKER.pid
    child = os.fork()
    if child == 0:
        right = score_answer("1/2", third) == 0.0 and _WORKER.pid != worker
        _WORKER.close()
        os._exit(0 if right else 1)
    print(os.waitpid(child, 0)[1], score_answer("1/4", third), _WORKER.pid == worker, worker, flush=True)
"""


def test_in_a_plain_script_with_threads_and_forks(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT))
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    *lines, last = done.stdout.splitlines()
    assert lines == ["imported", "[1.0]"]  # the script ran once
    status, score, same_worker, pid = last.split()
    assert (status, score, same_worker) == ("0", "0.0", "True")
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid), 0)


def test_warm_batches_ask_no_worker(monkeypatch):
    golds = [rf"{index // 16 + 1}\sqrt{{11}}" for index in range(128)]
    completions = [boxed(rf"{index % 4 + 1}\sqrt{{11}}") for index in range(128)]
    expected = [float(index // 16 == index % 4) for index in range(128)]
    assert accuracy_reward(completions, golds) == expected
    monkeypatch.setattr(MathWorker, "compare", lambda *args: pytest.fail("a verdict that is known, or plain integers"))
    assert accuracy_reward(completions, golds) == expected
    assert accuracy_reward([boxed(str(index)) for index in range(128)], list(range(128))) == [1.0] * 128


def test_accuracy_reward_counts_and_logs_unreadable_golds(caplog):
    metrics = []
    chat = [[{"role": "assistant", "content": boxed("6")}] for _ in range(4)]
    rewards = accuracy_reward(
        completions=chat,
        answer=["6", "3", "no such number at all", None],
        log_metric=lambda *metric: metrics.append(metric),
        prompts=["?"] * 4,
        level=[1, 2, 3, 4],
    )
    assert rewards == [1.0, 0.0, None, None]
    assert metrics == [("rewards/unreadable_gold", 2.0)]
    assert "The gold answer 'no such number at all' (column `answer`) cannot be read" in caplog.text


@pytest.mark.parametrize(
    "gold, text, warnings",
    [
        (
            "6",
            "It is 6.",
            ["None of the first 64 completions has a filled", "`suffix` of the loaders, `--prompt_suffix`"],
        ),
        (
            "no such number",
            boxed("6"),
            ["None of the first 64 gold answers (column `answer`) can be read", "--answer_field"],
        ),
        (None, "It is 6.", []),
        ("6", boxed("7"), []),
    ],
)
def test_a_fault_of_all_first_completions_is_reported_once(monkeypatch, caplog, gold, text, warnings):
    monkeypatch.setattr(rewards, "_FIRST_COMPLETIONS", rewards._FirstCompletions())
    accuracy_reward([text] * 63, [gold] * 63)
    assert "None of the first" not in caplog.text
    for _ in range(3):
        accuracy_reward([text] * 33, [gold] * 33)
    said = [record.getMessage() for record in caplog.records if "None of the first" in record.getMessage()]
    assert len(said) == bool(warnings)
    assert all(part.replace("64", "96") in said[0] for part in warnings)


def test_one_box_or_one_readable_gold_is_no_fault_of_all(monkeypatch, caplog):
    monkeypatch.setattr(rewards, "_FIRST_COMPLETIONS", rewards._FirstCompletions())
    accuracy_reward(["It is 6."] * 9 + [boxed("7")], ["6"] * 10)
    accuracy_reward(["It is 6."] * 100, ["6"] * 100)
    accuracy_reward(["It is 6."] * 100, ["no such number"] * 100)
    assert "None of the first" not in caplog.text


@pytest.mark.parametrize(
    "completion",
    [
        boxed("6"),
        [{"role": "assistant", "content": boxed("6")}],
        [{"role": "assistant", "content": [{"type": "text", "text": r"\box"}, {"type": "text", "text": "ed{6}"}]}],
        [
            {"role": "assistant", "content": boxed("5"), "tool_calls": []},
            {"role": "tool", "content": boxed("7")},
            {"role": "assistant", "content": boxed("6")},
        ],
    ],
)
def test_every_shape_of_completion(completion):
    assert accuracy_reward([completion], [6]) == [1.0]


@pytest.mark.parametrize(
    "completion", [[], [{"role": "assistant", "content": None}], [{"role": "tool", "content": boxed("6")}]]
)
def test_completions_without_text(completion):
    assert accuracy_reward([completion], [6]) == [0.0]
    assert format_reward([completion]) == [0.0]


def test_lengths_must_match():
    with pytest.raises(ValueError, match="got 2 completions and 1 answers"):
        accuracy_reward(["a", "b"], ["1"])


@pytest.mark.parametrize(
    "completion, reward",
    [
        (r"<think>2+2</think> \boxed{4}", 1.0),
        ("\n <think>\n2+2\n</think>\n\nIt is $\\boxed{\\frac{1}{2}}$.", 1.0),
        (r"<think>2+2</think> 4", 0.0),
        (r"<think>2+2</think> \boxed{}", 0.0),
        (r"<think>\boxed{4}</think> 4", 0.0),
        (r"So: <think>2+2</think> \boxed{4}", 0.0),
        (r"2+2</think> \boxed{4}", 0.0),
        (r"<think>2+2 \boxed{4}", 0.0),
        (r"<think>2</think><think>+2</think> \boxed{4}", 0.0),
        (r"<think><think>2</think></think> \boxed{4}", 0.0),
        (r"\boxed{4}", 0.0),
    ],
)
def test_format_reward(completion, reward):
    assert (
        format_reward([completion, [{"role": "assistant", "content": completion}]], answer=["4", "4"]) == [reward] * 2
    )


@pytest.mark.parametrize(
    "prompt, reward",
    [
        ("2+2? <think>\n", 1.0),
        ([{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "<think>"}], 1.0),
        ("2+2?", 0.0),
        ([{"role": "user", "content": "2+2? <think>"}], 0.0),
        ([{"role": "assistant", "content": "<think>"}, {"role": "user", "content": "2+2?"}], 0.0),
    ],
)
def test_format_of_a_completion_whose_prompt_opens_the_thoughts(prompt, reward):
    completions = ["2+2</think>\n\\boxed{4}", "<think>2+2</think> \\boxed{4}", "2+2 \\boxed{4}"]
    assert format_reward(completions, prompts=[prompt] * 3) == [reward, 1.0 - reward, 0.0]


def test_resolve_reward(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def half(completions, **kwargs):\n    return [0.5] * len(completions)\nlimit = 3\n"
    )
    assert resolve_reward("accuracy") is REWARDS["accuracy"] is accuracy_reward
    assert resolve_reward(format_reward) is format_reward
    assert resolve_reward("erpo_trl.rewards:format_reward") is format_reward
    assert resolve_reward("erpo_trl.rewards.format_reward") is format_reward
    assert resolve_reward(f"{tmp_path}/mine.py:half")(["a", "b"]) == [0.5, 0.5]


@pytest.mark.parametrize(
    "name, message",
    [
        ("acuracy", "'acuracy' is neither a known name nor names a function"),
        ("mine.py", "'mine.py' is neither a known name nor names a function"),
        ("no_such_package.rewards:f", "cannot import 'no_such_package.rewards' .No module named 'no_such_package'"),
        ("no/such/file.py:f", "cannot import 'no/such/file.py' .no file /.*no/such/file.py"),
        ("erpo_trl.rewards:nope", "'erpo_trl.rewards' has no 'nope'"),
        ("erpo_trl.rewards.REWARDS", "'erpo_trl.rewards' holds a dict, not a function, as 'REWARDS'"),
    ],
)
def test_resolve_reward_says_what_is_wrong(name, message):
    with pytest.raises(ValueError, match=f"{message}.*Known names: accuracy, format"):
        resolve_reward(name)
