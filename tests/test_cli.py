"""The command line: file < command line, unknown keys named, a run from start to saved model."""

import json
import subprocess
import sys

import pytest
import torch
from helpers import captured_warnings, write_recipe
from transformers.utils import is_torch_bf16_gpu_available

from erpo_trl import cli, train
from erpo_trl.query.fields import computes_in_bf16
from erpo_trl.query.standby import StandbyReference
from erpo_trl.rewards import resolve_reward
from erpo_trl.train import make_trainer, parse


@pytest.fixture
def recipe(tmp_path):
    return write_recipe(tmp_path, "query_weight_clip: [0, 1.5e0]\n")


def test_exponents_are_numbers(recipe):
    """YAML 1.1 reads 1e-3 as text, in scalar fields and in lists."""
    _, args, _ = parse(["--config", str(recipe)])
    assert (args.learning_rate, args.query_kl_coef, args.query_weight_clip) == (1e-3, 1e-3, [0.0, 1.5])


def test_command_line_beats_file_beats_default(recipe):
    _, args, _ = parse(["--config", str(recipe), "--learning_rate", "5e-4", "--query_weight_clip", "0.5", "3e0"])
    assert args.learning_rate == 5e-4
    assert args.query_weight_clip == [0.5, 3.0]
    assert args.max_steps == 1
    assert args.query_kl_estimator == "k3"


@pytest.mark.parametrize("where", ["file", "line"])
def test_unknown_key_is_named(recipe, where, capsys):
    """A misspelt option must not be ignored; the message names it and the likely one."""
    argv = ["train", "--config", str(recipe)]
    if where == "file":
        recipe.write_text(recipe.read_text() + "query_kl_coeff: 1\n")
    else:
        argv += ["--query_kl_coeff", "1"]
    assert cli.main(argv) == 2
    message = capsys.readouterr().err
    assert "query_kl_coeff" in message and "did you mean query_kl_coef?" in message


@pytest.mark.parametrize(
    "option, value, message",
    [
        ("--query_kl_estimator", "k4", "query_kl_estimator must be one of 'k1', 'k2', 'k3', found 'k4'"),
        ("--query_kl_coef", "-1", "query_kl_coef must be a finite number >= 0, found -1.0"),
        ("--preset", "papre", "preset must be one of 'paper', 'release', 'drpo', found 'papre'"),
        (
            "--query_weight",
            "softmx",
            "query_weight 'softmx' is neither a known name nor names a function. Known names:",
        ),
        ("--query_weight_clip", "2", "query_weight_clip must hold two numbers"),
        ("--query_weight_source", "batch", "query_weight_source must be one of 'reference', 'policy', found 'batch'"),
        ("--reference_batch_tokens", "0", "reference_batch_tokens must be a whole number of tokens >= 1, found 0"),
        ("--num_generations", "3", "must be divisible by num_generations"),
        ("--auto_find_batch_size", "true", "auto_find_batch_size is not supported"),
        ("--num_generations", "1", "at least 2 generations"),
        ("--dataset", "nothing.jsonl", "nothing.jsonl"),
        ("--reward_funcs", "acuracy", "acuracy"),
    ],
)
def test_bad_values_are_refused_with_the_field(recipe, option, value, message, capsys):
    """Each message names the field, the value found and what is allowed; exit status 2, no traceback."""
    assert cli.main(["train", "--config", str(recipe), option, value]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "options, message",
    [
        (["--max_rows", "1"], "The training data has 1 rows but one generation batch holds"),
        (["--resume_from_checkpoint", "gone"], "gone"),
    ],
)
def test_what_training_refuses_is_one_line(recipe, options, message, capsys):
    """What is found wrong when training begins, after the model was loaded."""
    assert cli.main(["train", "--config", str(recipe), *options]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("erpo-trl train: ")]
    assert message in line


@pytest.mark.parametrize(
    "line, message",
    [
        ("max_steps:", "max_steps has no value; give it one, or take the line out"),
        ("max_steps: 0.5", "max_steps must be a whole number, found 0.5"),
    ],
)
def test_numbers_of_a_file_are_numbers(recipe, line, message, capsys):
    text = [kept for kept in recipe.read_text().splitlines() if not kept.startswith(line.partition(":")[0])]
    recipe.write_text("\n".join([*text, line, ""]))
    assert cli.main(["train", "--config", str(recipe)]) == 2
    assert f"{recipe}: {message}" in capsys.readouterr().err


def test_a_file_in_the_place_of_the_output_folder_is_named(recipe, capsys):
    assert cli.main(["train", "--config", str(recipe), "--output_dir", __file__]) == 2
    assert f"output_dir: {__file__} is a file; give a folder" in capsys.readouterr().err


@pytest.mark.parametrize("column", ["prompts", "completions"])
def test_a_column_in_the_way_of_the_rewards_is_named_before_training(recipe, tmp_path, column, capsys):
    data = tmp_path / "own.jsonl"
    data.write_text("".join(json.dumps({"problem": f"{i}+1", "answer": "2", column: "x"}) + "\n" for i in range(8)))
    assert cli.main(["train", "--config", str(recipe), "--dataset", str(data)]) == 2
    assert f"and {column!r} by the trainer; rename the column" in capsys.readouterr().err


def test_default_precision_fits_the_device(tmp_path):
    """TRL's bf16 default is an error on a machine without it; a newcomer's first command must run there."""
    _, args, _ = parse(["--output_dir", str(tmp_path)])
    assert args.bf16 == is_torch_bf16_gpu_available()


def test_missing_config_file_is_named(capsys):
    assert cli.main(["train", "--config", "no/such.yaml"]) == 2
    assert "no file 'no/such.yaml'" in capsys.readouterr().err


def test_train_saves_a_model(recipe, tmp_path, capsys):
    """The main path: a recipe in, a model and its card out."""
    assert cli.main(["train", "--config", str(recipe)]) == 0
    out = tmp_path / "out"
    assert (out / "model.safetensors").stat().st_size > 0
    card = (out / "checkpoint-1" / "README.md") if (out / "checkpoint-1" / "README.md").exists() else out / "README.md"
    text = card.read_text()
    assert "2608.23311" in text and "- erpo" in text
    state = json.loads((out / "checkpoint-1" / "trainer_state.json").read_text())
    assert state["log_history"][0]["query/alpha"] == 1e-3
    assert "Model saved to" in capsys.readouterr().out


def test_help_is_lazy():
    """`--help` and the import must not load torch."""
    code = "import sys, erpo_trl.cli as c\ntry: c.main(['--help'])\nexcept SystemExit: pass\nassert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "train" in done.stdout and "demo" in done.stdout


def test_module_entry_point_reports_errors_in_one_line():
    """`accelerate launch -m erpo_trl.cli` runs the file as __main__; its errors are the same one-liners."""
    done = subprocess.run(
        [sys.executable, "-m", "erpo_trl.cli", "train", "--config", "no/such.yaml"], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "Traceback" not in done.stderr and "no file 'no/such.yaml'" in done.stderr


def test_yaml_habits(recipe):
    """A list field given as one word, `--config=FILE`, and a flag without a value."""
    recipe.write_text(recipe.read_text() + "reward_funcs: format\nquery_kl_level: sequence\n")
    data, args, _ = parse([f"--config={recipe}", "--query_kl_length_normalize"])
    assert data.reward_funcs == ["format"]
    assert args.query_kl_length_normalize is True


def test_broken_yaml_is_named(recipe, capsys):
    recipe.write_text("a: [1\nb: 2")
    assert cli.main(["train", "--config", str(recipe)]) == 2
    assert f"{recipe} is not YAML" in capsys.readouterr().err


def test_reward_module_in_the_working_directory(recipe, tmp_path, monkeypatch):
    """`module:function` is looked for where the command runs, by the installed script too."""
    (tmp_path / "my_rewards.py").write_text("def short(completions, **kwargs):\n    return [0.0] * len(completions)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p not in ("", str(tmp_path))])
    trainer = make_trainer(*parse(["--config", str(recipe), "--reward_funcs", "my_rewards:short"]))
    assert trainer.reward_func_names == ["short"]


def test_weight_scheme_in_the_working_directory(recipe, tmp_path, monkeypatch):
    """As for rewards, though the config looks for it as soon as it is read."""
    (tmp_path / "my_weights.py").write_text("def three(queries, population, rule):\n    return 0 * queries.nll + 3\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p not in ("", str(tmp_path))])
    options = ["--query_weight", "my_weights:three", "--query_weight_clip", "0", "4"]
    trainer = make_trainer(*parse(["--config", str(recipe), *options]))
    trainer.prepare_reference()
    assert set(trainer.train_dataset["query_weight"]) == {3.0}


def test_two_rewards_of_one_file_share_it(tmp_path):
    """Loading the file once per function would give each its own globals."""
    path = tmp_path / "pair.py"
    path.write_text("seen = []\ndef one(**kwargs): seen.append(1)\ndef two(**kwargs): return seen\n")
    one, two = (resolve_reward(f"{path}:{name}") for name in ("one", "two"))
    one()
    assert two() == [1]


def test_demo_options_do_not_reach_the_other_method(monkeypatch):
    """The user's options come first, so that what makes a method that method stays."""
    from erpo_trl.demo import run

    seen = {}
    monkeypatch.setattr(run, "make_trainer", lambda *configs: seen.update(args=configs[1]) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run.train_method("GRPO", run.Path("unused"), ["--query_kl_coef", "0.05", "--use_cpu", "true"], 1)
    assert seen["args"].query_kl_coef == 0.0 and seen["args"].beta == 0.01


def test_score_makes_the_table_that_train_finds(recipe, tmp_path, capsys, monkeypatch):
    """`score` writes the table and nothing else; training with the same recipe scores nothing, whatever else it is set to."""
    offpolicy = ["--trust_region", "drpo", "--trust_region_delta", "0.2", "--num_iterations", "2", "--beta", "0.1"]
    offpolicy += ["--use_bias_correction_kl", "false", "--log_policy_kl_steps", "1"]
    with monkeypatch.context() as patch:  # no copy of the model for a training that does not come
        patch.setattr(StandbyReference, "__init__", lambda *args: pytest.fail("scoring keeps a reference at hand"))
        assert cli.main(["score", "--config", str(recipe), *offpolicy]) == 0
    said = capsys.readouterr().out
    assert "8 queries scored, 0 reused" in said and "temperature=1.0" in said
    assert list((tmp_path / "reference").glob("*/part-*.arrow")) and not list((tmp_path / "out").glob("*"))
    trainer = make_trainer(*parse(["--config", str(recipe), *offpolicy]))
    assert str(tmp_path / "reference" / trainer.dataset_mapper.pin().fingerprint) in said
    trainer.prepare_reference()
    assert (trainer.dataset_mapper.report.scored, trainer.dataset_mapper.report.reused) == (0, 8)


def test_score_names_bad_options(recipe, capsys):
    assert cli.main(["score", "--config", str(recipe), "--query_kl_coeff", "1"]) == 2
    assert "query_kl_coeff (did you mean query_kl_coef?)" in capsys.readouterr().err


def test_train_says_what_it_trains(recipe, capsys):
    """One line at the start: parameters, precision, device."""
    assert cli.main(["train", "--config", str(recipe)]) == 0
    said = capsys.readouterr().out
    assert "parameters, weights in float32, computing in float32, on 1 x cpu (NO)" in said


def test_fields_are_for_files_alone(recipe, tmp_path):
    """`problem_field` names a column of the evaluation file; the embedded set beside it has its own."""
    (tmp_path / "held.jsonl").write_text('{"question": "1+1?", "answer": "2"}\n')
    options = ["--eval_dataset", str(tmp_path / "held.jsonl"), "--problem_field", "question"]
    trainer = make_trainer(*parse(["--config", str(recipe), *options]))
    assert trainer.eval_dataset["prompt"][0][-1]["content"] == "1+1?" and len(trainer.train_dataset) == 8


def test_rewards_without_answers_train_on_problems_alone(recipe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def score(completions, **kwargs):\n    return [1.0] * len(completions)\n")
    (tmp_path / "p.jsonl").write_text("".join(f'{{"problem": "{i}+1?"}}\n' for i in range(8)))
    options = ["--config", str(recipe), "--dataset", str(tmp_path / "p.jsonl")]
    assert len(make_trainer(*parse([*options, "--reward_funcs", "mine.py:score"])).train_dataset) == 8
    (tmp_path / "other.py").write_text(
        "def score(completions, answer, **kwargs):\n    return [1.0] * len(completions)\n"
    )
    for reward in ("accuracy", "other.py:score"):  # which reads it
        with pytest.raises(cli.InputError, match="no column 'answer'"):
            make_trainer(*parse([*options, "--reward_funcs", reward]))


def test_one_process_takes_one_of_several_gpus(recipe, caplog, monkeypatch):
    """TRL's trainers refuse several in a process: a command without a launcher takes the first, and says how to use all."""
    parsed = parse(["--config", str(recipe)])
    assert parsed[1].n_gpu <= 1  # looks for devices once
    parsed[1]._n_gpu = 8
    monkeypatch.setitem(train.TRAINERS, "grpo", (type(parsed[1]), lambda **given: given))  # there is no GPU to load on
    with captured_warnings(caplog):
        given = make_trainer(*parsed)
    assert parsed[1].n_gpu == 1 and given["args"].model_init_kwargs["device_map"] == {"": 0}
    assert "the first of the 8 GPUs that are visible. To train on all: accelerate launch" in caplog.text


def test_a_device_map_is_the_users(recipe, caplog, monkeypatch):
    parsed = parse(["--config", str(recipe), "--model_init_kwargs", '{"device_map": "auto"}'])
    assert parsed[1].n_gpu <= 1
    parsed[1]._n_gpu = 8
    monkeypatch.setitem(train.TRAINERS, "grpo", (type(parsed[1]), lambda **given: given))
    with captured_warnings(caplog):
        assert make_trainer(*parsed)["args"].model_init_kwargs["device_map"] == "auto"
    assert parsed[1].n_gpu == 8 and "GPUs" not in caplog.text


@pytest.mark.parametrize("itself", [True, False])
def test_emulated_bfloat16_is_no_default(tmp_path, monkeypatch, itself):
    """torch calls bfloat16 supported on a T4, which has to emulate it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation or itself
    )
    assert computes_in_bf16() is itself


@pytest.mark.parametrize("text, value", [("false", "none"), ("true", "group"), ("batch", "batch")])
def test_scaling_of_rewards_as_a_switch(recipe, text, value):
    _, args, _ = parse(["--config", str(recipe), "--scale_rewards", text])
    assert args.scale_rewards == value
