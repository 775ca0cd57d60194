"""Every shipped recipe and accelerate file: parsed by the parsers that users run, its header's numbers recomputed, and
trained for two steps with the demo model in place of its own.
"""

import json
import math
import re
from dataclasses import dataclass, fields
from pathlib import Path

import pytest
import transformers
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import DistributedType

from erpo_trl import ERPOConfig, ERPORLOOConfig
from erpo_trl.cli import InputError
from erpo_trl.demo import MODEL_DIR
from erpo_trl.train import main as train
from erpo_trl.train import make_trainer, parse

ROOT = Path(__file__).parents[1]
RECIPES = ROOT / "recipes"
ACCELERATE = sorted((RECIPES / "accelerate").glob("*.yaml"))
# Those of the study are questions, not options of `erpo-trl train`: tests/test_study.py
NAMES = sorted(
    str(path.relative_to(RECIPES))
    for path in RECIPES.rglob("*.yaml")
    if path.relative_to(RECIPES).parts[0] not in ("accelerate", "study")
)
PAPER = [name for name in NAMES if name.startswith(("qwen2.5-math-7b/", "qwen2.5-32b/", "release/"))]
# max_position_embeddings of each model's config.json
CONTEXT = {
    "demo": json.loads((MODEL_DIR / "config.json").read_text())["max_position_embeddings"],
    "Qwen/Qwen2.5-0.5B-Instruct": 32768,
    "Qwen/Qwen2.5-32B": 131072,
    "Qwen/Qwen2.5-Math-7B": 4096,
}


@dataclass
class Header:
    """What a recipe says of itself in its opening comment."""

    devices: int
    accelerate_file: Path | None  # None: the command starts one process
    update: tuple[int, int]  # queries, responses to each
    generation: tuple[int, int]


def read_header(path: Path) -> Header:
    text = "".join(line for line in path.read_text().splitlines(True) if line.startswith("#"))
    for label in ("Hardware", "Memory", "Time", "Batch", "Run"):
        assert re.search(rf"^# {label}: ", text, re.M), f"{path.name}: no line '# {label}: '"
    assert re.search(r"[Ee]stimated|[Mm]easured", text), f"{path.name}: does not say where its numbers come from"
    devices = re.search(r"^# Hardware: (\d+) (GPU|process)", text, re.M)
    batch = re.search(
        r"^# Batch: (\d+) queries x (\d+) responses an update, (\d+) queries x (\d+) responses a generation$",
        text,
        re.M,
    )
    assert devices and batch, f"{path.name}: unreadable Hardware or Batch line"
    command = re.search(r"^# Run: (.+)$", text, re.M)[1]
    queries, responses, *generation = map(int, batch.groups())
    return Header(int(devices[1]), launched_file(path, command), (queries, responses), tuple(generation))


def launched_file(path: Path, command: str) -> Path | None:
    """The accelerate file that the command uses, by itself or in a launch script."""
    recipe = f"recipes/{path.relative_to(path.parents[1]) if path.parent.name != 'recipes' else path.name}"
    assert recipe in command.split(), f"{path.name}: its command runs another recipe"
    script = re.search(r"recipes/launch/\S+", command)
    text = (ROOT / script[0]).read_text() if script else command
    names = re.findall(r"recipes/accelerate/\w+\.yaml", command) or re.findall(r"recipes/accelerate/\w+\.yaml", text)
    return ROOT / names[0] if names else None


def launch_arguments(path: Path, *options: str):
    """What `accelerate launch` makes of the file, before it starts anything."""
    arguments = launch_command_parser().parse_args(["--config_file", str(path), *options, "script.py"])
    return _validate_launch_command(arguments)[0]


def parsed(path: Path, devices: int, monkeypatch):
    """The recipe as each of `devices` processes on GPUs with bfloat16 reads it."""
    monkeypatch.setattr(transformers.TrainingArguments, "_validate_args", lambda self: None)
    monkeypatch.setattr(transformers.TrainingArguments, "world_size", property(lambda self: devices))
    return parse(["--config", str(path), "--use_cpu", "true"])


def check_batches(path: Path, monkeypatch):
    """Recompute what the header says of hardware and batches; returns the parsed configs."""
    header = read_header(path)
    processes = 1 if header.accelerate_file is None else launch_arguments(header.accelerate_file).num_processes
    assert processes == header.devices, f"{path.name}: says {header.devices}, its command starts {processes}"
    data, args, model = parsed(path, processes, monkeypatch)
    queries, responses = header.update
    assert args.num_generations == responses == header.generation[1]
    rows = args.per_device_train_batch_size * processes
    assert rows * args.gradient_accumulation_steps == queries * responses, f"{path.name}: update"
    assert args.generation_batch_size == header.generation[0] * responses, f"{path.name}: generation"
    return data, args, model


def test_there_are_recipes():
    expected = [f"qwen2.5-math-7b/{method}.yaml" for method in METHODS] + ["demo.yaml"]
    expected += ["qwen2.5-32b/erpo.yaml", "qwen2.5-32b/grpo.yaml", "release/qwen2.5-math-7b.yaml"]
    small = ("lora_single_gpu", "qlora_single_gpu", "vllm_colocate", "vllm_server")
    assert NAMES == sorted(expected + [f"qwen2.5-0.5b/{name}.yaml" for name in small])
    names = {path.stem for path in ACCELERATE}
    assert names == {"single", "ddp", "zero2", "zero3", "zero3_offload", "fsdp2", "multi_node"}


def test_readme_lists_every_recipe():
    text = (RECIPES / "README.md").read_text()
    for name in NAMES:
        assert name in text or f"`{Path(name).name}`" in text, name
    for path in ACCELERATE:
        assert f"accelerate/{path.name}" in text


@pytest.mark.parametrize("name", NAMES)
def test_recipe_does_what_its_header_says(name, monkeypatch):
    """Keys exist, devices and batches are as stated, prompt and completion fit the model, the engine and each other."""
    data, args, model = check_batches(RECIPES / name, monkeypatch)
    keys = yaml.safe_load((RECIPES / name).read_text())
    assert type(args) is {"grpo": ERPOConfig, "rloo": ERPORLOOConfig}[keys.pop("trainer", "grpo")]
    for key in keys:
        assert any(hasattr(config, key) for config in (data, args, model)), key
    assert args.learning_rate == float(keys["learning_rate"])  # not the text that YAML 1.1 makes of 1e-6
    length = args.max_completion_length + (args.max_prompt_length or 0)
    assert length <= CONTEXT[model.model_name_or_path]
    assert args.vllm_max_model_length is None or args.vllm_max_model_length >= length
    assert (
        args.save_strategy == "no"
        or args.save_steps * args.gradient_accumulation_steps % args.steps_per_generation == 0
    )
    if args.use_vllm and isinstance(args, ERPOConfig):  # RLOO has no such correction
        assert args.vllm_importance_sampling_correction


@pytest.mark.parametrize(
    "old, new", [("8 GPUs", "4 GPUs"), ("128 queries", "64 queries"), ("512 queries", "256 queries")]
)
def test_a_header_that_lies_is_found(tmp_path, monkeypatch, old, new):
    lying = tmp_path / "qwen2.5-math-7b" / "erpo.yaml"
    lying.parent.mkdir()
    lying.write_text((RECIPES / "qwen2.5-math-7b" / "erpo.yaml").read_text().replace(old, new, 1))
    with pytest.raises(
        AssertionError, match=f"erpo.yaml: {dict(zip('815', ('says 4', 'update', 'generation')))[old[0]]}"
    ):
        check_batches(lying, monkeypatch)


@pytest.mark.parametrize("name", NAMES)
def test_the_recipe_alone_decides_the_precision(name, monkeypatch):
    """A `mixed_precision` in the accelerate file would turn autocast on where the recipe says `bf16: false`."""
    header = read_header(RECIPES / name)
    precision = "no" if header.accelerate_file is None else launch_arguments(header.accelerate_file).mixed_precision
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", precision)
    _, args, _ = parsed(RECIPES / name, header.devices, monkeypatch)
    assert args.mixed_precision == ("bf16" if args.bf16 else "no")


@pytest.mark.parametrize("name", PAPER)
def test_recipe_has_the_papers_settings(name, monkeypatch):
    """arXiv 2608.23311, section 5.1: 3K tokens, 8 responses at T=1, 512 queries a rollout and 128 an update, lr 1e-6."""
    header = read_header(RECIPES / name)
    data, args, _ = parsed(RECIPES / name, header.devices, monkeypatch)
    assert (header.generation, header.update) == ((512, 8), (128, 8))
    # Its 8,523 problems are of all that is not MATH-500
    assert (data.dataset, data.dataset_split) == ("math_3_5", "all")
    assert (args.temperature, args.learning_rate) == (1.0, 1e-6)
    assert args.max_prompt_length + args.max_completion_length == 3000
    if isinstance(args, ERPOConfig):  # RLOO's loss is on whole responses
        assert args.loss_type == ("dr_grpo" if "drpo" in name else "dapo")  # token level; DRPO has its own aggregation
    # Its 240 steps are 15 epochs (section 5.3) of the 16 whole batches in 8,523 problems: generations, not updates
    updates = args.max_steps * args.gradient_accumulation_steps // args.steps_per_generation
    assert updates == (960 if "long_horizon" in name else 15 * (8523 // 512))


# What each method changes against erpo.yaml, as parsed
METHODS = {
    "erpo": {},
    "grpo": {"query_kl_coef": 0.0, "query_weight": "uniform", "beta": 0.01},
    "erpo_no_weights": {"query_weight": "uniform"},
    "grpo_weighted": {"query_kl_coef": 0.0, "beta": 0.01},
    "dapo": {
        "query_kl_coef": 0.0,
        "query_weight": "uniform",
        "epsilon_high": 0.28,
        "mask_truncated_completions": True,
    },
    "dapo_erpo": {"epsilon_high": 0.28, "mask_truncated_completions": True},
    "drpo": {
        "trust_region": "drpo",
        "trust_region_delta": 12.5,
        "loss_type": "dr_grpo",
        "scale_rewards": "none",
    },
    "long_horizon": {"max_steps": 3840},
    "rloo": {"query_kl_coef": 0.0, "query_weight": "uniform"},
    "rloo_erpo": {},
}


@pytest.mark.parametrize("method", METHODS)
def test_methods_differ_in_nothing_else(method, monkeypatch):
    """Recipes of one model can be compared: a method's recipe is ERPO's but for what makes the method."""
    _, erpo, _ = parsed(RECIPES / "qwen2.5-math-7b" / "erpo.yaml", 8, monkeypatch)
    assert (erpo.query_kl_coef, erpo.query_weight, erpo.query_weight_clip, erpo.beta) == (0.01, "nll_ratio", [0, 2], 0)
    _, args, _ = parsed(RECIPES / "qwen2.5-math-7b" / f"{method}.yaml", 8, monkeypatch)
    ignored = {"output_dir", "logging_dir", "run_name"}
    names = [field.name for field in fields(ERPOConfig) if field.name not in ignored and hasattr(args, field.name)]
    found = {name: getattr(args, name) for name in names if getattr(args, name) != getattr(erpo, name)}
    assert found == METHODS[method]
    assert method.replace("_", "-") in args.output_dir


# ---- every recipe, trained


def small(name: str, folder: Path, keys: dict) -> list[str]:
    """Options that leave a recipe as it is but for model, data, size, precision and rollout engine."""
    updates = keys.get("steps_per_generation", 1) // keys.get("gradient_accumulation_steps", 1) or 1
    options = {
        "model_name_or_path": "demo",
        "dataset": "arithmetic",
        "dataset_split": "train",
        "max_rows": 64,
        "max_steps": 2,
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 2,
        "steps_per_generation": 2 * updates,
        "max_prompt_length": 64,
        "max_completion_length": 12,
        "use_vllm": "false",
        "load_in_4bit": "false",  # bitsandbytes is not among the test dependencies
        "dtype": "float32",
        "bf16": "false",
        "use_cpu": "true",
        "logging_steps": 1,
        "save_strategy": "no",
        "output_dir": folder / "out",
        "reference_cache_dir": folder / "reference",
    }
    return [
        "--config",
        str(RECIPES / name),
        *(str(part) for key, value in options.items() for part in (f"--{key}", value)),
    ]


@pytest.mark.parametrize("name", NAMES)
def test_recipe_trains(name, tmp_path):
    """No key is refused, no combination is; both sides do what the recipe says."""
    keys = yaml.safe_load((RECIPES / name).read_text())
    data, args, model = parse(small(name, tmp_path, keys))
    trainer = make_trainer(data, args, model)
    trainer.train()
    first, second = (log for log in trainer.state.log_history if "query/kl" in log)
    assert first["query/kl"] < 1e-9
    assert second["query/kl"] > first["query/kl"]
    for log in (first, second):
        assert math.isfinite(log["loss"]) and math.isfinite(log["grad_norm"])
        assert log["query/alpha"] == args.query_kl_coef
        assert ("kl" in log) == (args.beta > 0)
        assert ("trust_region/shift_max" in log) == (getattr(args, "trust_region", "ratio_clip") != "ratio_clip")
        assert (log["query/weight_max"] == log["query/weight_min"]) == (args.query_weight == "uniform")


@pytest.mark.parametrize("name", ["vllm_colocate", "vllm_server"])
def test_without_vllm_the_sentence_says_what_to_install(name, tmp_path, monkeypatch):
    monkeypatch.setattr("trl.generation.vllm_generation.is_vllm_available", lambda *args: False)
    name = f"qwen2.5-0.5b/{name}.yaml"
    keys = yaml.safe_load((RECIPES / name).read_text())
    with pytest.raises(InputError, match=r"vLLM is not available.*`pip install trl\[vllm\]`"):
        train([*small(name, tmp_path, keys), "--use_vllm", "true"])


# ---- accelerate files


@pytest.mark.parametrize("path", ACCELERATE, ids=lambda path: path.stem)
def test_accelerate_file(path):
    """accelerate's own loader takes it; it drops nested keys that it does not know without a word, so they are checked here."""
    config = load_config_from_file(str(path))
    text = yaml.safe_load(path.read_text())
    known = vars(launch_command_parser().parse_args(["script.py"]))
    for section in ("deepspeed_config", "fsdp_config"):
        assert set(text.get(section, ())) <= set(known), section
    arguments = launch_arguments(path)
    assert arguments.num_processes == config.num_processes
    assert config.num_processes % config.num_machines == 0
    assert arguments.mixed_precision == "no"  # the recipe's to decide
    kind = {
        "single": DistributedType.NO,
        "ddp": DistributedType.MULTI_GPU,
        "fsdp2": DistributedType.FSDP,
    }.get(path.stem, DistributedType.DEEPSPEED)
    assert config.distributed_type == kind
    assert (arguments.use_deepspeed, arguments.use_fsdp) == (
        kind == DistributedType.DEEPSPEED,
        kind == DistributedType.FSDP,
    )
    if arguments.use_deepspeed:
        assert arguments.zero_stage == (2 if path.stem == "zero2" else 3)
        # "auto": DeepSpeed takes the recipe's
        assert arguments.gradient_accumulation_steps is None and arguments.gradient_clipping is None
    if arguments.use_fsdp:
        assert int(arguments.fsdp_version) == 2
        # As the tests on several processes launch it
        assert arguments.fsdp_cpu_ram_efficient_loading is True
