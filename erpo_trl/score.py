"""`erpo-trl score`: make the reference table of a recipe, alone, where and when it suits."""

import os
from collections.abc import Sequence

from .cli import InputError
from .train import make_trainer, parse

# Fields that cost an engine, a second model or rollouts and change nothing in a query's likelihood
_WITHOUT = {
    "use_vllm": False,
    "beta": 0.0,
    "log_policy_kl_steps": 0,
    "trust_region": "ratio_clip",
    "trust_region_delta_target": None,
}


def main(argv: Sequence[str]) -> None:
    """Score every prompt of a recipe's data under its model and say where the table lies.

    Takes the options of `erpo-trl train`, and launches as it does. Training finds the table by its fingerprint: weights,
    model config, adapter, head settings (temperature, `cast_lm_head_to_fp32`), precision, token ids and versions. In 16-bit training
    the precision is that of the launch (plain, DeepSpeed, FSDP).
    """
    data, args, model = parse(argv, prog="erpo-trl score")
    for name, value in _WITHOUT.items():
        if hasattr(args, name):  # RLOO has no trust regions
            setattr(args, name, value)
    trainer = make_trainer(data, args, model)
    mapper = trainer.dataset_mapper
    try:
        trainer.prepare_reference()
    except (ValueError, OSError) as error:
        raise InputError(str(error)) from error
    settings = ", ".join(f"{name}={value}" for name, value in mapper.head_settings().items())
    trainer.accelerator.print(
        "\n".join(f"{part.capitalize()} data: {report}" for part, report in trainer.scoring_reports) + "\n"
        f"Table: {os.path.abspath(mapper.cache_dir / mapper.reference.fingerprint)} ({settings})\n"
        f"Training with the same recipe, launched likewise, finds it with --reference_cache_dir {os.path.abspath(mapper.cache_dir)}"
    )
