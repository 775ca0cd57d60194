"""Scoring on several workers gives the training reward's verdicts, and keeps to its time limit."""

from erpo_trl.evaluation import scoring
from erpo_trl.evaluation.scoring import score_texts
from erpo_trl.rewards import score_answer

GOLDS = ["\\frac{1}{2}", "6", "1331 and 1728", None, [1, "x"], 142.0, "no numeric answer", "3\\%"]
ANSWERS = ["0.5", "6", "1728", "\\boxed{6}", "1, x", "142", "{3\\ }", "6", "3\\%", "a\\", "}{", ""]


def test_verdicts_and_answers_are_those_of_the_reward():
    """Every gold with every answer, on two workers; also those whose box the answer's own text could break."""
    pairs = [(gold, f"so \\boxed{{{answer}}}") for gold in GOLDS for answer in ANSWERS] + [("6", "6"), (None, "")]
    golds, texts = zip(*pairs)
    answers, verdicts = score_texts(golds, texts, workers=2)
    assert verdicts == [score_answer(gold, text) for gold, text in pairs]
    assert {1.0, 0.0, None} == set(verdicts)
    assert answers[:3] == ["0.5", "6", "1728"] and answers[-2:] == [None, None]


def test_workers_are_kept_and_run_side_by_side():
    workers = scoring._kept_workers(2)
    score_texts(["1/2"] * 2 + ["1/3"] * 2, ["\\boxed{2/4}", "\\boxed{1}", "\\boxed{2/6}", "\\boxed{1}"], workers=2)
    pids = {worker.pid for worker in workers}
    assert None not in pids and len(pids) == 2
    score_texts(["1/5"], ["\\boxed{2/10}"], workers=2)
    assert {worker.pid for worker in workers} == pids


def test_a_runaway_answer_costs_its_own_score(recwarn):
    answers, verdicts = score_texts(
        ["1/2", "1/2"], ["\\boxed{9^{9^{9^{9}}}}", "\\boxed{\\frac{2}{4}}"], workers=1, time_limit_s=2.0
    )
    assert verdicts == [0.0, 1.0] and answers[0] == "9^{9^{9^{9}}}"
