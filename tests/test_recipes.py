"""Every shipped recipe parses into the configs it is for."""

from pathlib import Path

import pytest
import yaml

from erpo_trl.train import parse

RECIPES = Path(__file__).parents[1] / "recipes"
NAMES = sorted(str(path.relative_to(RECIPES)) for path in RECIPES.rglob("*.yaml"))


def parsed(name, monkeypatch):
    # A recipe for a GPU asks for bf16, which transformers refuses on machines without it
    monkeypatch.setattr(
        "transformers.training_args.TrainingArguments._validate_args", lambda self: None, raising=False
    )
    options = ["--config", str(RECIPES / name), "--use_cpu", "true"]
    return parse(options)


def test_there_are_recipes():
    assert {"demo.yaml", "qwen2.5-math-7b/erpo.yaml"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_recipe_parses(name, monkeypatch):
    """Keys exist, values have their types, and the batch divides into groups."""
    data, args, model = parsed(name, monkeypatch)
    keys = yaml.safe_load((RECIPES / name).read_text())
    for key in keys:
        assert any(hasattr(config, key) for config in (data, args, model)), key
    assert args.learning_rate == float(keys["learning_rate"])
    assert args.generation_batch_size % args.num_generations == 0


def test_math_recipe_holds_the_papers_batch(monkeypatch):
    """128 queries x 8 responses an update, 512 x 8 a generation, on the 8 processes its header names."""
    _, args, _ = parsed("qwen2.5-math-7b/erpo.yaml", monkeypatch)
    rows = args.per_device_train_batch_size * 8
    assert rows * args.gradient_accumulation_steps == 128 * 8
    assert rows * args.steps_per_generation == 512 * 8
    assert (args.max_steps, args.learning_rate, args.query_kl_coef, args.beta) == (240, 1e-6, 1e-2, 0.0)
    assert args.max_prompt_length + args.max_completion_length == 3000


def test_every_recipe_opens_with_hardware_and_command():
    """A reader must know what a recipe needs before running it."""
    for name in NAMES:
        header = [line for line in (RECIPES / name).read_text().splitlines() if line.startswith("#")]
        text = "\n".join(header)
        assert "Hardware:" in text and "erpo_trl.cli train" in text or "erpo-trl train" in text, name
