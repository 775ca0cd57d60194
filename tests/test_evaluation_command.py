"""`erpo-trl eval` and `evaluate` on the embedded model; benchmarks, adapters, options and what is refused."""

import json
import subprocess
import sys

import pytest
import torch
from evaluation_helpers import read_metrics, samples
from helpers import byte_tokenizer, lora_model, tiny_model

from erpo_trl import cli, data, evaluate, load_arithmetic, load_benchmark
from erpo_trl.data import MATH_PROMPT_SUFFIX
from erpo_trl.evaluation.benchmarks import BENCHMARKS
from erpo_trl.evaluation.config import EvalConfig
from erpo_trl.evaluation.model_source import resolve_model
from erpo_trl.evaluation.run import load_benchmarks
from erpo_trl.options import parse_options
from erpo_trl.rewards import accuracy_reward

QUICK = {"samples": 2, "max_new_tokens": 24, "max_rows": 12, "temperatures": [0, 0.5], "bootstrap": 50}


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture(autouse=True)
def no_plots(monkeypatch):
    """Tests of the protocol look at the plots."""
    monkeypatch.setattr("erpo_trl.evaluation.run.plot_sweeps", lambda *args: False)


def test_command_and_function_do_the_same(tmp_path, capsys):
    """And the verdicts are those of the training reward."""
    found = evaluate(model="demo", output=str(tmp_path / "function"), benchmarks=["arithmetic"], **QUICK)
    config = tmp_path / "eval.yaml"
    config.write_text(
        f"model: demo\noutput: {tmp_path / 'nowhere'}\nbenchmarks: arithmetic\nsamples: 2\nmax_new_tokens: 24\nmax_rows: 12\n"
        "temperatures: [0, 5e-1]\nbootstrap: 50\n"
    )
    line = ["eval", "--config", str(config), "--output", str(tmp_path / "line"), "--batch-tokens", "150"]
    assert cli.main(line) == 0
    assert samples(tmp_path / "function") == samples(tmp_path / "line")
    assert not (tmp_path / "nowhere").exists()
    shown = read_metrics(tmp_path / "line")
    assert shown["benchmarks"] == found["benchmarks"]
    assert shown["settings"] == found["settings"] | {"output": str(tmp_path / "line"), "batch_tokens": 150}
    assert (tmp_path / "line" / "table.md").read_text().strip() in capsys.readouterr().out
    rows = samples(tmp_path / "line")
    golds = load_arithmetic("test", n=12)["answer"]
    verdicts = accuracy_reward([row["text"] for row in rows], [golds[row["row"]] for row in rows])
    assert [row["verdict"] for row in rows] == verdicts and 0 < sum(verdicts) < len(verdicts)


def test_adapter_is_evaluated_with_its_base(tmp_path):
    """Without merging by hand, the adapter's samples are those of the merged model and not those of the base."""
    base, adapter, merged = (tmp_path / name for name in ("base", "adapter", "merged"))
    model = lora_model(pretrained=True)
    tiny_model("llama").save_pretrained(base)
    model.peft_config["default"].base_model_name_or_path = str(base)
    model.save_pretrained(adapter)
    model.merge_and_unload().save_pretrained(merged)
    for folder in (base, merged):
        byte_tokenizer().save_pretrained(folder)
    file = write_jsonl(tmp_path / "own.jsonl", [{"problem": f"say {i}", "answer": str(i)} for i in range(4)])
    texts = {}
    for folder in (base, adapter, merged):
        out = tmp_path / "out" / folder.name
        metrics = evaluate(
            model=str(folder),
            output=str(out),
            file=[file],
            samples=3,
            max_new_tokens=8,
            temperatures=[0.7],
            bootstrap=10,
        )
        texts[folder.name] = [row["text"] for row in samples(out)]
        expected = [str(base), str(adapter)] if folder is adapter else [str(folder), None]
        assert [metrics["model"]["name"], metrics["model"]["adapter"]] == expected
    assert texts["adapter"] == texts["merged"] != texts["base"]


def test_model_is_named_by_the_contents_of_its_folder(tmp_path):
    """Logs that training writes beside the weights change nothing; the weights, the config and the template do."""
    model = tiny_model("qwen2")
    model.save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    first = resolve_model(str(tmp_path)).weights
    (tmp_path / "trainer_state.json").write_text("{}")
    (tmp_path / "checkpoint-1").mkdir()
    assert resolve_model(str(tmp_path)).weights == first
    with torch.no_grad():
        next(model.parameters()).view(-1)[0] += 1e-3
    model.save_pretrained(tmp_path)
    second = resolve_model(str(tmp_path)).weights
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    assert len({first, second, resolve_model(str(tmp_path)).weights}) == 3


def test_missing_base_of_an_adapter_is_named(tmp_path):
    model = lora_model(pretrained=True)
    model.peft_config["default"].base_model_name_or_path = str(tmp_path / "gone")
    model.save_pretrained(tmp_path / "adapter")
    with pytest.raises(ValueError, match="its base model .*gone.* is not there .*Correct base_model_name_or_path"):
        resolve_model(str(tmp_path / "adapter"))


# ------------------------------------------------------------------------------------------------------------ benchmarks
GSM8K = {"question": "How many?", "answer": "Half of 4,000 is 2,000.\n#### 2,000"}


def test_every_benchmark_of_the_registry_loads_from_its_columns(monkeypatch):
    """The hub is a fake that has the registered columns and row counts; the answers come out as text."""
    asked = []
    answers = {"amc": 142.0, "olympiadbench": ["1", "$\\frac{1}{2}$"], "gsm8k": GSM8K["answer"]}

    def load_dataset(hub_id, *config, split, revision):
        [(name, source)] = [(name, s) for name, s in BENCHMARKS.items() if s.hub_id == hub_id]
        asked.append((name, config, split, revision))
        row = {source.problem: "Q", source.answer: answers.get(name, "7"), "id": 1}
        return [row] * source.rows[0]

    monkeypatch.setattr(data, "load_dataset", load_dataset)
    for name, source in BENCHMARKS.items():
        benchmark = load_benchmark(f"{name}@abc")
        assert benchmark.name == name and len(benchmark.dataset) == source.rows[0]
        assert benchmark.dataset[0]["prompt"][0]["content"] == "Q" + MATH_PROMPT_SUFFIX
        expected = {"amc": "142", "olympiadbench": "1, $\\frac{1}{2}$", "gsm8k": "2000"}.get(name, "7")
        assert benchmark.dataset[0]["answer"] == expected
        assert asked[-1] == (name, (source.config,) if source.config else (), source.split, "abc")
        assert source.hub_id in benchmark.source and "abc" in benchmark.source


def test_another_number_of_rows_on_the_hub_is_refused(monkeypatch):
    monkeypatch.setattr(data, "load_dataset", lambda *a, **k: [{"problem": "Q", "answer": "1"}] * 29)
    with pytest.raises(ValueError, match=r"aime24 \(HuggingFaceH4/aime_2024.*29 rows found, 30 expected.*aime24=FILE"):
        load_benchmark("aime24")


def test_local_files_stand_in_for_the_hub(tmp_path):
    """With the hub's columns or with the plain ones; the suffix is the benchmark's."""
    hub = write_jsonl(tmp_path / "a.jsonl", [GSM8K, GSM8K])
    plain = write_jsonl(tmp_path / "b.jsonl", [{"problem": "Q", "answer": "3"}])
    first, second = load_benchmark(f"gsm8k={hub}"), load_benchmark(f"gsm8k={plain}")
    assert first.dataset["answer"][:] == ["2000", "2000"] and second.dataset["answer"][:] == ["3"]
    assert first.name == second.name == "gsm8k" and second.source == plain
    assert second.dataset[0]["prompt"][0]["content"] == "Q" + MATH_PROMPT_SUFFIX
    assert load_benchmark(hub, problem="question").dataset["answer"][:] == ["2000", "2000"]
    own = load_benchmark(plain, suffix=None)
    assert own.name == "b" and own.dataset[0]["prompt"][0]["content"] == "Q"
    assert load_benchmark(f"mine={plain}").name == "mine"


def test_own_columns_and_answers_of_every_kind(tmp_path):
    rows = [{"q": "A", "a": 142.0}, {"q": "B", "a": 0.5}]
    file = write_jsonl(tmp_path / "own.jsonl", rows)
    assert load_benchmark(file, problem="q", answer="a").dataset["answer"][:] == ["142", "0.5"]
    prose = [{"problem": "A", "answer": "It is nothing at all."}] * 3
    file = write_jsonl(tmp_path / "prose.jsonl", prose)
    with pytest.raises(
        ValueError, match=r"prose.jsonl, column 'answer': none of the first 3 answers can be read.*'It is no"
    ):
        load_benchmark(file)
    file = write_jsonl(tmp_path / "some.jsonl", [*prose, {"problem": "A", "answer": "1/2"}])
    assert len(load_benchmark(file).dataset) == 4
    lists = write_jsonl(tmp_path / "lists.jsonl", [{"problem": "A", "answer": [1, "x"]}])
    assert load_benchmark(lists).dataset["answer"][:] == ["1, x"]


@pytest.mark.parametrize(
    "name, message",
    [
        (
            "math5000",
            "unknown benchmark 'math5000'; known: aime24, aime25, amc, math500, .*arithmetic, or give a local file",
        ),
        ("arithmetic@main", "only a hub data set has a revision"),
        ("gsm8k@main=x.jsonl", "only a hub data set has a revision"),
    ],
)
def test_unknown_benchmarks_are_named(name, message):
    with pytest.raises(ValueError, match=message):
        load_benchmark(name)


# --------------------------------------------------------------------------------------------------------------- options
@pytest.mark.parametrize(
    "options, message",
    [
        (["--temperature", "1"], "unknown option in the command line: temperature (did you mean temperatures?)"),
        (["--backend", "sglang"], "backend must be one of 'transformers', 'vllm', found 'sglang'"),
        (["--dtype", "float99"], "dtype must be one of 'auto', 'float32', 'bfloat16', 'float16', found 'float99'"),
        (["--output", __file__], f"output: {__file__} is a file; give a folder"),
        (["--samples", "-1"], "samples must be at least 0, found -1"),
        (["--temperatures", "0.1:1.0"], "'0.1:1.0' is neither a number nor a range"),
        (["--tensor_parallel_size", "2"], "tensor_parallel_size=2 needs backend 'vllm'"),
        (["--backend", "vllm"], "backend 'vllm' needs vLLM"),
        (["--file", "no/such.jsonl"], "file: no such file 'no/such.jsonl'"),
        (["--benchmarks", "arithmetic", "arithmetic"], "two benchmarks are called arithmetic"),
        (["--model", "no/such/model"], "model: there is no folder 'no/such/model' (looked for /"),
        (["--model", "runs/none"], "model: there is no folder 'runs/none' (looked for /"),
        (["--model", "./nomodel"], "model: there is no folder './nomodel' (looked for /"),
        (
            ["--chat_template_kwargs", "[1]"],
            "chat_template_kwargs must be a mapping, on the command line as JSON such as",
        ),
        (["--chat_template_kwargs", "no"], "found 'no'"),
        (["--revision", "main"], "is a folder: it has no revision, found 'main'"),
    ],
)
def test_bad_options_are_refused_in_one_line(tmp_path, options, message, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    line = [
        "eval",
        "--model",
        "demo",
        "--output",
        str(tmp_path),
        "--benchmarks",
        "arithmetic",
        "--max_new_tokens",
        "4",
    ]
    assert cli.main(line + options) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error


def test_arguments_of_a_chat_template_that_is_not_there_are_refused(tmp_path):
    tiny_model("qwen2").save_pretrained(tmp_path)
    byte_tokenizer(template=None).save_pretrained(tmp_path)
    options = {"output": str(tmp_path / "out"), "benchmarks": ["arithmetic"], "chat_template_kwargs": {"a": 1}}
    with pytest.raises(ValueError, match="the tokenizer of .* has no chat template; leave them out"):
        evaluate(model=str(tmp_path), **options)


def test_a_config_file_in_another_encoding_is_named(tmp_path, capsys):
    config = tmp_path / "eval.yaml"
    config.write_bytes("model: démo\n".encode("latin-1"))
    assert cli.main(["eval", "--config", str(config)]) == 2
    assert f"{config} is not in UTF-8" in capsys.readouterr().err


def test_template_arguments_stand_in_a_file_and_on_the_command_line(tmp_path):
    config = tmp_path / "eval.yaml"
    config.write_text(
        "model: demo\noutput: x\nbenchmarks: arithmetic\nchat_template_kwargs: {enable_thinking: false}\n"
    )
    line = ["--model", "demo", "--output", "x", "--benchmarks", "arithmetic"]
    line += ["--chat_template_kwargs", '{"enable_thinking": false}']
    for argv in (["--config", str(config)], line):
        [found] = parse_options(argv, (EvalConfig,), "erpo-trl eval")
        assert found.chat_template_kwargs == {"enable_thinking": False}


def test_nothing_to_evaluate_is_refused(tmp_path):
    with pytest.raises(ValueError, match="benchmarks and file are both empty"):
        EvalConfig(model="demo", output=str(tmp_path))


def test_a_broken_row_is_named(tmp_path):
    file = write_jsonl(tmp_path / "own.jsonl", [{"problem": "A", "answer": "1"}, {"problem": "", "answer": "1"}])
    with pytest.raises(ValueError, match=r"own.jsonl, line 2 \(row 1\), field 'problem'"):
        evaluate(model="demo", output=str(tmp_path / "out"), file=[file])


def test_defaults_are_the_papers_protocol():
    [config] = parse_options(
        ["--model", "demo", "--output", "x", "--benchmarks", "aime24"], (EvalConfig,), "erpo-trl eval"
    )
    assert config.temperatures == [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.2, 1.3, 1.4, 1.5]
    assert config.samples == 32


def test_help_names_the_commands_without_torch():
    code = "import sys, erpo_trl, erpo_trl.cli as c\ntry: c.main(['--help'])\nexcept SystemExit: pass\nassert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "  eval " in done.stdout and "  compare " in done.stdout


def test_columns_are_those_of_any_local_file(tmp_path, capsys):
    """A file among the benchmarks, and one under a folder whose name has a "=", as in partitioned data."""
    file = write_jsonl(tmp_path / "own.jsonl", [{"question": "1+1", "problem": "wrong", "answer": 2}])
    folder = tmp_path / "split=test"
    folder.mkdir()
    other = write_jsonl(folder / "part.jsonl", [{"question": "2+2", "answer": 4}])
    config = EvalConfig(
        model="demo",
        output=str(tmp_path / "out"),
        benchmarks=["arithmetic", file],
        file=[other],
        problem_field="question",
    )
    sums, own, part = load_benchmarks(config, conversational=False)
    assert own.dataset["prompt"][:] == ["1+1"] and part.dataset["prompt"][:] == ["2+2"]
    assert (own.name, part.name) == ("own", "part") and len(sums.dataset) > 1


def test_results_in_the_models_folder_do_not_rename_it(tmp_path):
    tiny_model("qwen2").save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    before = resolve_model(str(tmp_path)).weights
    for name in (
        "metrics.json", "eval_results.json", "all_results.json", "train_results.json", "test_results.json",
        "trainer_state.json", "prompt_time.txt",
    ):  # fmt: skip
        (tmp_path / name).write_text("{}")
        assert resolve_model(str(tmp_path)).weights == before, name
    # A file that a tokenizer may read does
    (tmp_path / "tekken.json").write_text("{}")
    assert resolve_model(str(tmp_path)).weights != before
