r"""Loaders: what they return to the last type, and what they say about files that are wrong."""

import json

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, List, Value

from erpo_trl import data
from erpo_trl.data import (
    MATH_PROMPT_SUFFIX,
    load_arithmetic,
    load_math_levels_3_to_5,
    load_problems,
    resolve_dataset,
)

MESSAGES = List({"role": Value("string"), "content": Value("string")})


def user(text: str) -> list[dict]:
    return [{"role": "user", "content": text}]


@pytest.fixture
def write(tmp_path):
    """Writes rows (objects, or a raw string) to a file of this name and returns its path."""

    def write(name: str, rows) -> str:
        path = tmp_path / name
        if name.endswith(".parquet"):
            pq.write_table(pa.Table.from_pylist(rows), path)
        elif isinstance(rows, bytes):
            path.write_bytes(rows)
        elif isinstance(rows, str):
            path.write_text(rows, encoding="utf-8")
        else:
            path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
        return str(path)

    return write


ROWS = [{"problem": "1+1?", "answer": "2", "level": 1}, {"problem": "½+½?", "answer": "1", "level": 2}]


@pytest.mark.parametrize(
    "name, content",
    [
        ("p.jsonl", ROWS),
        ("p.jsonl", "\ufeff" + "\n\n".join(json.dumps(row) for row in ROWS) + "\n"),
        ("p.json", json.dumps(ROWS)),
        ("p.parquet", ROWS),
    ],
)
def test_formats(write, name, content):
    dataset = load_problems(write(name, content))
    assert dataset.to_list() == [
        {"prompt": user("1+1?"), "answer": "2", "level": 1},
        {"prompt": user("½+½?"), "answer": "1", "level": 2},
    ]
    assert dataset.features == {"prompt": MESSAGES, "answer": Value("string"), "level": Value("int64")}


def test_csv(write):
    dataset = load_problems(write("p.csv", 'problem,answer,source\n"1, 2 or 3?",2,a\n"two\nlines",,b\n'))
    assert dataset.to_list() == [
        {"prompt": user("1, 2 or 3?"), "answer": "2", "source": "a"},
        {"prompt": user("two\nlines"), "answer": None, "source": "b"},
    ]


def test_prompts(write):
    path = write("p.jsonl", [{"question": "1+1?", "gold": 2}])
    names = {"problem": "question", "answer": "gold"}
    plain = load_problems(path, **names, suffix=" Box it.", system_prompt="Be brief.", conversational=False)
    assert plain[0] == {"prompt": "Be brief.\n\n1+1? Box it.", "answer": "2"}
    assert plain.features["prompt"] == Value("string")
    chat = load_problems(path, **names, suffix=" Box it.", system_prompt="Be brief.")
    assert chat[0]["prompt"] == [{"role": "system", "content": "Be brief."}, *user("1+1? Box it.")]


def test_a_problem_that_is_chat_already(write):
    turns = [*user("Hi"), {"role": "assistant", "content": "Yes?"}, *user("1+1?")]
    dataset = load_problems(write("p.jsonl", [{"prompt": turns, "answer": "2"}]), problem="prompt", suffix="!")
    assert dataset[0]["prompt"] == [*turns[:2], *user("1+1?!")]


def test_a_turn_with_more_than_text_is_refused(write):
    """Tool calls would be lost without a word, and the prompt be another; a null beside the text is nothing."""
    plain = [{**turn, "name": None} for turn in user("1+1?")]
    called = [*user("1+1?"), {"role": "assistant", "content": "", "tool_calls": [{"name": "add"}]}, *user("So?")]
    rows = [{"prompt": turns, "answer": "2"} for turns in (plain, called)]
    with pytest.raises(ValueError, match=r"row 1\), field 'prompt': turn 1 has 'tool_calls', which would be lost"):
        load_problems(write("p.jsonl", rows), problem="prompt")
    assert load_problems(write("q.jsonl", rows[:1]), problem="prompt")[0]["prompt"] == user("1+1?")


def test_answers_are_strings_or_none_with_one_warning(write, caplog):
    answers = [None, "", 142.0, 0.25, 7, ["1", "\\sqrt{2}"], float("nan"), []]
    dataset = load_problems(write("p.jsonl", [{"problem": "?", "answer": answer} for answer in answers]))
    assert dataset["answer"][:] == [None, None, "142", "0.25", "7", "1, \\sqrt{2}", None, None]
    assert dataset.features["answer"] == Value("string")
    (record,) = caplog.records
    assert "4 of 8 rows have no answer" in record.getMessage()


def test_solutions_in_the_manner_of_gsm8k(write):
    rows = [{"problem": "?", "answer": "Half of 4,000 is 2,000.\n#### 2,000"}, {"problem": "?", "answer": "#### 72"}]
    assert load_problems(write("p.jsonl", rows))["answer"][:] == ["2000", "72"]


def test_types_are_of_the_whole_column(write):
    rows = [
        {"problem": "a", "answer": None, "score": 1, "tags": None, "empty": None},
        {"problem": "b", "answer": "1", "score": 2.5, "tags": ["x"], "late": 3},
    ]
    dataset = load_problems(write("p.jsonl", rows))
    assert dataset.features == {
        "prompt": MESSAGES,
        "answer": Value("string"),
        "score": Value("float64"),
        "tags": List(Value("string")),
        "empty": Value("string"),
        "late": Value("int64"),
    }
    assert dataset["late"][:] == [None, 3]


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("p.txt", "x", r"p\.txt: unknown extension '\.txt'; expected one of \.jsonl, \.json, \.csv, \.parquet"),
        ("p.jsonl", "", r"p\.jsonl: no rows"),
        ("p.json", "", r"p\.json: no rows"),
        ("p.csv", "problem,answer\n", r"p\.csv: no rows"),
        ("p.json", "{}", r"p\.json: holds a dict; expected a list"),
        ("p.json", "[1]", r"p\.json, row 0: holds a int; expected an object"),
        ("p.json", '{"a": 1}\n{"a": 2}', r"p\.json: not valid JSON .*name the file \.jsonl"),
        ("p.jsonl", '{"problem": "a", "answer": "1"}\n\n{"problem": ', r"p\.jsonl, line 3 \(row 1\): not valid JSON"),
        ("p.jsonl", b'{"problem": "\xff"}', r"p\.jsonl: not UTF-8 at byte 13"),
        ("p.csv", "problem,answer\n1, 2 or 3?,2\n", r"p\.csv, line 2 \(row 0\): 3 fields where the header has 2"),
        ("p.csv", "problem,answer\n1?\n", r"p\.csv, line 2 \(row 0\): 1 fields where the header has 2"),
        (
            "p.jsonl",
            [{"q": "a", "answer": "1"}],
            r"p\.jsonl: no column 'problem'; found 'q', 'answer'\. Name the right",
        ),
        ("p.jsonl", [{"problem": "a", "gold": "1"}], r"p\.jsonl: no column 'answer'; found 'problem', 'gold'"),
        ("p.jsonl", [*ROWS, {"answer": "1"}], r"p\.jsonl, line 3 \(row 2\), field 'problem': is None; expected text"),
        ("p.jsonl", [{"problem": " ", "answer": "1"}], r"row 0\), field 'problem': is ' '; expected text"),
        ("p.jsonl", [{"problem": 3, "answer": "1"}], r"row 0\), field 'problem': is 3; expected text"),
        (
            "p.jsonl",
            [*ROWS, {"problem": "a\ud800", "answer": "1"}],
            r"line 3 \(row 2\), field 'problem': the lone surrogate '\\ud800' at character 1 cannot be encoded",
        ),
        (
            "p.jsonl",
            [{"problem": "a", "answer": "1", "meta": {"names": ["\udfff"]}}],
            r"\(row 0\), field 'meta\.names': the lone surrogate",
        ),
        (
            "p.jsonl",
            [{"problem": "a", "answer": "1", "prompt": "b"}],
            r"p\.jsonl: the column 'prompt' would be overwritten",
        ),
        (
            "p.jsonl",
            [{"problem": "a", "answer": "1", "x": 1}, {"problem": "a", "answer": "1", "x": "y"}],
            r"p\.jsonl: column 'x' holds values of different types",
        ),
        ("p.jsonl", [{"problem": "a", "answer": "1", "x": 2**70}], r"p\.jsonl: column 'x' holds values of different"),
    ],
)
def test_a_bad_file_is_named_with_the_place_and_the_remedy(write, name, content, message):
    with pytest.raises(ValueError, match=message):
        load_problems(write(name, content))


def test_missing_and_broken_files(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nothing\.jsonl: no such file"):
        load_problems(tmp_path / "nothing.jsonl")
    (tmp_path / "p.parquet").write_text("not parquet")
    with pytest.raises(ValueError, match=r"p\.parquet: cannot be read as \.parquet"):
        load_problems(tmp_path / "p.parquet")


def math_row(index: int, level, solution: str = "So $\\boxed{\\frac{1}{2}}$.") -> dict:
    return {"problem": f"Problem  {index}", "level": level, "type": "Algebra", "solution": solution}


def test_math_of_a_local_file(write, caplog):
    path = write(
        "math.jsonl",
        [
            math_row(0, "Level 2"),
            math_row(1, "Level 3"),
            math_row(2, "Level 4", "First $\\boxed{1}$, then $\\boxed 7$."),
            math_row(3, 5, "No box."),
            math_row(4, "Level ?"),
        ],
    )
    dataset = load_math_levels_3_to_5(path)
    assert dataset["answer"][:] == ["\\frac{1}{2}", "7", None]
    assert dataset["level"][:] == [3, 4, 5]
    assert dataset["type"][:] == ["Algebra"] * 3
    assert dataset[0]["prompt"] == user("Problem  1" + MATH_PROMPT_SUFFIX)
    assert "1 of 3 rows have no answer" in caplog.text
    for word in ("<think>", "</think>", "\\boxed{}"):
        assert word in MATH_PROMPT_SUFFIX


def test_math_of_a_local_file_that_is_wrong(write):
    with pytest.raises(ValueError, match="no column 'level'; found 'problem', 'answer'"):
        load_math_levels_3_to_5(write("a.jsonl", [{"problem": "a", "answer": "1"}]))
    with pytest.raises(ValueError, match="no problem of level 3, 4 or 5 is left; levels found: Level 1, Level 2"):
        load_math_levels_3_to_5(write("b.jsonl", [math_row(0, "Level 2"), math_row(1, "Level 1")]))
    with pytest.raises(ValueError, match="leave them out with a local `path`"):
        load_math_levels_3_to_5("b.jsonl", split="test")
    with pytest.raises(ValueError, match="split is 'dev'; expected 'train', 'test' or 'all'"):
        load_math_levels_3_to_5(split="dev")


@pytest.fixture
def hub(monkeypatch):
    """A stand-in for the hub: {(id, split): rows}; what is not in it cannot be found. Calls are recorded in `asked`."""

    class Hub(dict):
        asked: list = []

    hub = Hub()
    hub.asked = []

    def load_dataset(hub_id, split, revision):
        hub.asked.append((hub_id, split, revision))
        if (hub_id, split) not in hub:
            raise datasets.exceptions.DatasetNotFoundError(f"{hub_id} is nowhere")
        return Dataset.from_list(hub[hub_id, split])

    monkeypatch.setattr(data, "load_dataset", load_dataset)
    return hub


def fill_math(hub, train: int = 7500, test: int = 5000) -> None:
    """A MATH of one problem in ten at each of levels 3, 4 and 5, with every tenth test problem in MATH-500."""
    levels = {0: "Level 3", 1: "Level 4", 2: "Level 5"}
    hub[data.MATH_HUB_ID, "train"] = [math_row(i, levels.get(i % 10, "Level 1")) for i in range(train)]
    hub[data.MATH_HUB_ID, "test"] = [math_row(10_000 + i, levels.get(i % 10, "Level 1")) for i in range(test)]
    hub[data.MATH500_HUB_ID, "test"] = [{"problem": f"Problem {10_000 + 10 * i}", "level": 3} for i in range(500)]


@pytest.mark.parametrize("split, rows", [("train", 2250), ("test", 1000), ("all", 3250)])
def test_math_of_the_hub_without_math500(hub, split, rows):
    fill_math(hub)
    dataset = load_math_levels_3_to_5(split=split, revision="v1")
    assert len(dataset) == rows
    assert set(dataset["level"]) == ({4, 5} if split == "test" else {3, 4, 5})
    parts = [split] if split != "all" else ["train", "test"]
    assert hub.asked[: len(parts)] == [(data.MATH_HUB_ID, part, "v1") for part in parts]
    assert ((data.MATH500_HUB_ID, "test", None) in hub.asked) == (split != "train")


def test_math500_may_be_kept_or_given_as_a_file(hub, write):
    fill_math(hub)
    assert len(load_math_levels_3_to_5(split="test", math500=False)) == 1500
    path = write("math500.jsonl", hub.pop((data.MATH500_HUB_ID, "test")))
    assert len(load_math_levels_3_to_5(split="test", math500=path)) == 1000
    local = write("math.jsonl", hub[data.MATH_HUB_ID, "test"])
    assert len(load_math_levels_3_to_5(local)) == 1500
    assert len(load_math_levels_3_to_5(local, math500=path)) == 1000


def test_math_of_the_hub_that_is_not_as_expected(hub, write):
    with pytest.raises(ValueError, match="MATH-lighteval, split 'train': cannot be loaded from the hub .*is nowhere"):
        load_math_levels_3_to_5()
    fill_math(hub, train=7499)
    with pytest.raises(ValueError, match="split 'train': 7499 rows found, 7500 expected"):
        load_math_levels_3_to_5()
    with pytest.raises(ValueError, match="499 rows found, 500 expected"):
        load_math_levels_3_to_5(split="test", math500=write("m.jsonl", [{"problem": str(i)} for i in range(499)]))
    strangers = write("s.jsonl", [{"problem": f"Problem {10_000 + i}" if i < 400 else str(i)} for i in range(500)])
    with pytest.raises(ValueError, match="400 of the 500 problems of MATH-500 found by their text"):
        load_math_levels_3_to_5(split="test", math500=strangers)
    del hub[data.MATH500_HUB_ID, "test"]
    with pytest.raises(ValueError, match="Give MATH-500 as a local file with `math500`"):
        load_math_levels_3_to_5(split="test")


def test_arithmetic():
    train, test = load_arithmetic(n=50, seed=3), load_arithmetic("test", n=50, seed=3)
    assert train.features == {"prompt": MESSAGES, "answer": Value("string"), "level": Value("int64")}
    assert train.to_list() == load_arithmetic(n=50, seed=3).to_list() != load_arithmetic(n=50, seed=4).to_list()
    assert len(train) == len(test) == 50
    assert not {turns[0]["content"] for turns in train["prompt"]} & {turns[0]["content"] for turns in test["prompt"]}
    assert all(str(int(answer)) == answer for answer in train["answer"])
    with pytest.raises(ValueError, match="n is 0; expected at least 1"):
        load_arithmetic(n=0)
    with pytest.raises(ValueError, match="split is 'dev'"):
        load_arithmetic("dev", n=1)


def test_resolve_dataset(hub, write):
    assert resolve_dataset("arithmetic", split="test", n=5).to_list() == load_arithmetic("test", n=5).to_list()
    fill_math(hub)
    assert len(resolve_dataset("math_3_5", split="train")) == 2250
    path = write("p.jsonl", [{"prompt": "1+1?", "answer": 2}])
    assert resolve_dataset(path, suffix="!")[0] == {"prompt": user("1+1?!"), "answer": "2"}
    hub["someone/sums", "test"] = [{"problem": "1+1?", "answer": 2.0, "level": 1}]
    dataset = resolve_dataset("someone/sums", split="test", revision="main", conversational=False)
    assert dataset.to_list() == [{"prompt": "1+1?", "answer": "2", "level": 1}]
    assert hub.asked[-1] == ("someone/sums", "test", "main")


def test_resolve_dataset_says_what_is_wrong(hub, write):
    with pytest.raises(
        ValueError, match="arithmetics, split 'train': cannot be loaded .*Known names: arithmetic, math_3_5"
    ):
        resolve_dataset("arithmetics")
    with pytest.raises(FileNotFoundError, match=r"nothing\.jsonl: no such file"):
        resolve_dataset("nothing.jsonl")
    with pytest.raises(ValueError, match=r"unknown extension '\.txt'"):
        resolve_dataset(write("p.txt", "x"))
    with pytest.raises(ValueError, match="neither 'problem' nor 'prompt' among the columns 'q', 'answer'"):
        resolve_dataset(write("p.jsonl", [{"q": "1+1?", "answer": 2}]))
    hub["someone/sums", "train"] = [{"question": "1+1?", "answer": "2"}]
    with pytest.raises(ValueError, match="someone/sums: neither 'problem' nor 'prompt' among the columns 'question'"):
        resolve_dataset("someone/sums")
    assert resolve_dataset("someone/sums", problem="question")[0]["prompt"] == user("1+1?")


def test_a_reward_that_reads_no_answer_needs_no_column(write):
    path = write("p.jsonl", [{"problem": "1+1?"}])
    assert resolve_dataset(path, needs_answer=False).to_list() == [{"prompt": user("1+1?"), "answer": None}]
    with pytest.raises(ValueError, match="no column 'answer'; found 'problem'.*--answer_field"):
        resolve_dataset(path)
    with pytest.raises(ValueError, match="no column 'gold'"):
        resolve_dataset(path, answer="gold", needs_answer=False)
    with pytest.raises(ValueError, match="no column 'qestion'; found 'problem'.*--problem_field"):
        resolve_dataset(path, problem="qestion", needs_answer=False)
