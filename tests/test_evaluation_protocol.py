"""The protocol on a backend without a model: problems are rows, seeds are distinct, nothing is drawn twice."""

import re
from types import SimpleNamespace

import pytest
from evaluation_helpers import StubBackend, problems, read_metrics, run, samples, values
from helpers import TEMPLATE, byte_tokenizer, chat, set_day
from test_clock import DATED

ONE = "\\boxed{1}"


class Rank(SimpleNamespace):
    """What the protocol asks of accelerate's PartialState, for one of several processes run after each other."""

    @property
    def is_main_process(self):
        return self.process_index == 0

    def wait_for_everyone(self):
        pass


def by_seed(request):
    """Another whole number for every seed, short enough to be compared without a worker."""
    return f"\\boxed{{{request.seed % 10**17}}}"


def test_rows_with_the_same_prompt_stay_two_problems(tmp_path):
    metrics = run(tmp_path, StubBackend(lambda r: ONE), problems(["1", "2"], ["same", "same"]))
    assert metrics["benchmarks"]["set"]["rows"] == 2
    assert values(metrics) == {
        "avg@2": 0.5, "pass@2": 0.5, "maj@2": 0.5, "pass@1": 0.5, "tokens": 9.0, "truncated": 0.0, "format": 0.0,
    }  # fmt: skip


def test_samples_have_seeds_of_their_own(tmp_path):
    """8 samples of one prompt, and the draw of Pass@1, from an engine whose output is its seed; the same when run again."""
    sets = problems(["1"], name="a"), problems(["1"], name="b")
    run(tmp_path / "x", StubBackend(by_seed), *sets, samples=8)
    run(tmp_path / "y", StubBackend(by_seed), *sets, samples=8)
    drawn = samples(tmp_path / "x")
    assert len({row["text"] for row in drawn}) == len(drawn) == 2 * 9
    assert all(row["answer"] == str(row["seed"] % 10**17) and row["answer"] in row["text"] for row in drawn)
    assert samples(tmp_path / "y") == drawn
    run(tmp_path / "y", StubBackend(by_seed), *sets, samples=8, seed=1)
    assert not {row["seed"] for row in drawn} & {row["seed"] for row in samples(tmp_path / "y")}


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_shards_make_the_same_set_without_repeats(tmp_path, ranks):
    """7 problems in batches of 4, of which only the last is solved: 1/7 whatever the number of processes."""
    answer = lambda r: ONE if r.row == 6 else by_seed(r)  # noqa: E731
    engines = [StubBackend(answer) for _ in range(ranks)]
    # The first process goes last, so that it finds the others' parts
    for rank in reversed(range(ranks)):
        state = Rank(process_index=rank, num_processes=ranks)
        metrics = run(tmp_path, engines[rank], problems(["1"] * 7), state=state)
    assert values(metrics)["avg@2"] == values(metrics)["pass@2"] == values(metrics)["pass@1"] == pytest.approx(1 / 7)
    assert metrics["benchmarks"]["set"]["rows"] == 7
    drawn = [entry for engine in engines for entry in engine.log]
    assert len(drawn) == len(set(drawn)) == 21
    assert min(engine.batches for engine in engines) >= 6 // ranks - 1
    assert len({row["text"] for row in samples(tmp_path)}) == 6 * 3 + 1


def test_greedy_decoding_is_drawn_once_and_says_so(tmp_path, capsys):
    engine = StubBackend(lambda r: ONE)
    metrics = run(tmp_path, engine, problems(["1", "2"]), temperatures=[0, 0.8], samples=8)
    assert "T=0 is greedy decoding: drawn once" in capsys.readouterr().out
    assert [entry for entry in engine.log if entry[2] == 0] == [(0, 0, 0.0), (1, 0, 0.0)]
    greedy = values(metrics, temperature="0")
    assert greedy["avg@8"] == greedy["pass@8"] == greedy["pass@1"] == greedy["maj@8"] == 0.5
    assert set(greedy) == set(values(metrics))
    # The sweep's mean is that of the sampled temperatures
    assert metrics["benchmarks"]["set"]["bands"]["mean"]["avg@8"]["value"] == values(metrics)["avg@8"]


def test_pass_at_1_alone(tmp_path):
    engine = StubBackend(lambda r: ONE)
    metrics = run(tmp_path, engine, problems(["1", "2"]), samples=0, temperatures=[0, 0.8])
    assert set(values(metrics)) == {"pass@1", "tokens", "truncated", "format"} == set(values(metrics, temperature="0"))
    assert values(metrics)["pass@1"] == 0.5 and len(engine.log) == 4


@pytest.mark.parametrize("gold", ["", "no numeric answer", None])
def test_unreadable_golds_raise_nothing_and_are_counted(tmp_path, gold):
    """The one readable problem is solved: 1/2, not 1, and not 2/2."""
    metrics = run(tmp_path, StubBackend(lambda r: ONE), problems(["1", gold]))
    assert values(metrics)["avg@2"] == values(metrics)["pass@2"] == 0.5
    assert metrics["benchmarks"]["set"]["unreadable_golds"] == 1
    assert {row["verdict"] for row in samples(tmp_path) if row["row"] == 1} == {None}
    assert "1 golds cannot be read" in (tmp_path / "table.md").read_text()


def test_prompts_without_room_are_counted_and_not_drawn(tmp_path):
    """Context 64: prompts of 20, 60, 64 and 200 tokens. The second has room for 4 tokens, the last two for none."""
    prompts = ["p" * length for length in (20, 60, 64, 200)]
    engine = StubBackend(lambda r: ONE)
    metrics = run(tmp_path, engine, problems(["1"] * 4, prompts), context=64)
    assert {entry[0] for entry in engine.log} == {0, 1}
    assert metrics["benchmarks"]["set"]["prompts_without_room"] == 2
    assert values(metrics)["avg@2"] == 0.25 and values(metrics)["truncated"] == 0.25
    finishes = {row["row"]: (row["finish"], row["tokens"]) for row in samples(tmp_path)}
    assert finishes == {0: ("stop", 9), 1: ("length", 4), 2: ("no_room", 0), 3: ("no_room", 0)}


def test_format_length_and_truncation(tmp_path):
    texts = {0: "<think>a</think> \\boxed{1}", 1: "x" * 100}
    metrics = run(tmp_path, StubBackend(lambda r: texts[r.row]), problems(["1", "1"]), max_new_tokens=50)
    found = values(metrics)
    assert found["format"] == found["truncated"] == 0.5
    assert found["tokens"] == (len(texts[0]) + 50) / 2


def test_interrupted_run_continues_and_draws_nothing_twice(tmp_path):
    """Stopped after every possible batch: the samples, drawn in both halves together, are those of an uninterrupted run."""
    sets = problems(["1"] * 5, name="a"), problems(["2"] * 3, name="b")
    settings = {"temperatures": [0, 0.8, 1.2]}
    whole = StubBackend(by_seed)
    run(tmp_path / "whole", whole, *sets, **settings)
    for stop in range(whole.batches):
        first, second = StubBackend(by_seed, fail_at=stop), StubBackend(by_seed)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / str(stop), first, *sets, **settings)
        assert not (tmp_path / str(stop) / "metrics.json").exists()
        run(tmp_path / str(stop), second, *sets, **settings)
        assert sorted(first.log + second.log) == sorted(whole.log)
        assert samples(tmp_path / str(stop)) == samples(tmp_path / "whole")
        assert {p.name for p in (tmp_path / str(stop)).iterdir()} == {p.name for p in (tmp_path / "whole").iterdir()}


def test_a_process_that_lags_behind_draws_nothing_twice(tmp_path):
    """Continued by two processes of which the second has all its batches: the first finishes the pair, and removes the
    parts, before the second looks."""
    other = StubBackend(by_seed)
    run(tmp_path, other, problems(["1"] * 7), state=Rank(process_index=1, num_processes=2))
    first, second = StubBackend(by_seed), StubBackend(by_seed)

    class Late(Rank):
        def wait_for_everyone(self):
            if not first.log:
                run(tmp_path, first, problems(["1"] * 7), state=Rank(process_index=0, num_processes=2))

    run(tmp_path, second, problems(["1"] * 7), state=Late(process_index=1, num_processes=2))
    assert len(other.log) == 8 + 1 and len(first.log) == 12 and second.log == []
    assert len(samples(tmp_path)) == 21 and not (tmp_path / "work").exists()


def test_a_second_call_into_a_folder_at_work_is_refused(tmp_path):
    """Made while the first one draws; the first goes on, and after it the second may."""
    refused = []

    def answer(request):
        if not refused:
            with pytest.raises(ValueError) as error:
                run(tmp_path, StubBackend(by_seed), problems(["1"], name="second"))
            refused.append(str(error.value))
        return ONE

    run(tmp_path, StubBackend(answer), problems(["1", "2"]))
    assert refused == [
        f"output: another evaluation is at work in {tmp_path}; give another --output, or wait until it is done"
    ]
    assert len(samples(tmp_path)) == 6
    run(tmp_path, StubBackend(by_seed), problems(["1"], name="second"))
    assert {row["benchmark"] for row in samples(tmp_path)} == {"set", "second"}


def prompts_of(output, monkeypatch=None, day=None, template=TEMPLATE, **settings):
    """The prompts of a run on chats, in words, with transformers' clock on a day of December 2031."""
    if day is not None:
        set_day(monkeypatch, day, "erpo_trl.evaluation.results")
    tokenizer, seen = byte_tokenizer(template=template), set()

    def answer(request):
        seen.add(tokenizer.decode(request.prompt_ids))
        return ONE

    run(output, StubBackend(answer), problems(["1"], [chat("ab")]), tokenizer=tokenizer, **settings)
    return seen


def test_a_template_that_writes_the_date_writes_the_first_calls(tmp_path, monkeypatch):
    """Another temperature a day later has the same prompts, and what was finished the day before stays."""
    [first] = prompts_of(tmp_path, monkeypatch, 29, template=DATED)
    assert "Today is 29 Dec 2031" in first
    assert prompts_of(tmp_path, monkeypatch, 30, template=DATED) == set()
    assert prompts_of(tmp_path, monkeypatch, 30, template=DATED, temperatures=[1.0]) == {first}
    assert {row["temperature"] for row in samples(tmp_path)} == {0.8, 1.0}
    [other] = prompts_of(tmp_path / "other", monkeypatch, 30, template=DATED)
    assert "Today is 30 Dec 2031" in other
    (tmp_path / "prompt_time.txt").write_text("yesterday")
    with pytest.raises(ValueError, match="prompt_time.txt holds no time .*delete it to begin with today's date"):
        prompts_of(tmp_path, template=DATED)


def test_a_date_that_cannot_be_fixed_is_said(tmp_path, capsys):
    prompts_of(tmp_path, template="{% set form = '%Y' %}{{ strftime_now(form) }}" + TEMPLATE)
    assert "chat_template_kwargs where the template takes one" in capsys.readouterr().out
    prompts_of(tmp_path / "plain")
    assert "writes the date" not in capsys.readouterr().out and not (tmp_path / "plain" / "prompt_time.txt").exists()


def test_arguments_of_the_chat_template_reach_the_prompts(tmp_path):
    """And are among the settings: with others, the pair is drawn anew."""
    template = TEMPLATE + "{% if enable_thinking is defined and not enable_thinking %}no thoughts{% endif %}"
    [plain] = prompts_of(tmp_path, template=template)
    [without] = prompts_of(tmp_path, template=template, chat_template_kwargs='{"enable_thinking": false}')
    assert without == plain + "no thoughts"
    assert read_metrics(tmp_path)["settings"]["chat_template_kwargs"] == {"enable_thinking": False}
    assert len(samples(tmp_path)) == 3


def test_finished_pairs_are_kept_until_model_settings_or_problems_change(tmp_path, capsys):
    answer = lambda r: ONE  # noqa: E731
    engine = StubBackend(answer)
    run(tmp_path, engine, problems(["1", "2"]))
    assert len(engine.log) == 6

    def drawn_again(*benchmarks, **settings):
        engine = StubBackend(answer)
        run(tmp_path, engine, *(benchmarks or [problems(["1", "2"])]), **settings)
        return sorted({(row["benchmark"], row["temperature"]) for row in samples(tmp_path)}), len(engine.log)

    assert drawn_again() == ([("set", 0.8)], 0)
    # Another temperature, another benchmark: what was there stays
    assert drawn_again(temperatures=[1.0]) == ([("set", 0.8), ("set", 1.0)], 6)
    both = [("new", 0.8), ("set", 0.8), ("set", 1.0)]
    assert drawn_again(problems(["3"], name="new")) == (both, 3)
    assert "will be replaced" not in capsys.readouterr().out
    assert set(read_metrics(tmp_path)["benchmarks"]) == {"set", "new"}
    # Another answer key for the same prompts: only that benchmark goes
    assert drawn_again(problems(["1", "3"])) == ([("new", 0.8), ("set", 0.8)], 6)
    assert "2 (benchmark, temperature) pairs here are of another model, other settings or other problems" in (
        capsys.readouterr().out
    )
    assert drawn_again(problems(["1", "3"]), weights="trained further") == ([("set", 0.8)], 6)
    assert "2 (benchmark, temperature) pairs here are of another model" in capsys.readouterr().out
    assert drawn_again(problems(["1", "3"]), weights="trained further", samples=3) == ([("set", 0.8)], 8)
    assert (
        drawn_again(problems(["1", "3"]), weights="trained further", samples=3, batch_tokens=7, bootstrap=10)[1] == 0
    )


def test_another_file_in_the_output_folder_is_not_overwritten(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"x": [1]}), tmp_path / "samples.parquet")
    with pytest.raises(
        ValueError, match="was not written by this version of erpo-trl eval; give another output folder"
    ):
        run(tmp_path, StubBackend(lambda r: ONE), problems(["1"]))
    assert pq.read_table(tmp_path / "samples.parquet").to_pydict() == {"x": [1]}


def test_what_is_written(tmp_path):
    sets = problems(["1", "2"], name="odd/name é"), problems(["1"], name="b")
    metrics = run(tmp_path, StubBackend(lambda r: ONE), *sets, temperatures=[0.5, 1.2], seed=3, plots=True)
    assert read_metrics(tmp_path) == metrics
    assert metrics["settings"]["seed"] == 3 and metrics["settings"]["temperatures"] == [0.5, 1.2]
    assert metrics["settings"]["tensor_parallel_size"] == 1 and metrics["model"]["weights"] == "w"
    assert {"erpo_trl", "torch", "transformers", "math-verify"} <= set(metrics["versions"])
    # The average counts each benchmark once; its error is that of independent means
    entries = [metrics["benchmarks"][name]["bands"]["mean"]["avg@2"] for name in ("odd/name é", "b")]
    average = metrics["average"]["bands"]["mean"]["avg@2"]
    assert average["value"] == pytest.approx((0.5 + 1.0) / 2)
    assert average["se"] == pytest.approx(entries[0]["se"] / 2) and entries[1]["se"] == 0
    text = (tmp_path / "table.md").read_text()
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| T=1.2")
    ]
    assert rows[0][:3] == ["T=1.2", f"50.0 ± {100 * entries[0]['se']:.1f}", f"50.0 ± {100 * entries[0]['se']:.1f}"]
    assert re.search(r"## average of the benchmarks", text)
    plots = {path.name for path in tmp_path.glob("*.png")}
    assert {"avg_at_2.png", "pass_at_2.png", "pass_at_1.png", "tokens.png"} <= plots
    assert (tmp_path / "avg_at_2.png").read_bytes().startswith(b"\x89PNG")
    assert not (tmp_path / "work").exists()
