"""Every private name of TRL and transformers that the package leans on, in one place, and the versions it was tested with.

`tests/test_trl_surface.py` fails with the missing name when a new release renames one.
"""

from importlib.metadata import PackageNotFoundError, version

from packaging.specifiers import SpecifierSet

SUPPORTED_TRL = SpecifierSet(">=1.15,<1.17", prereleases=True)

# module -> class or None -> names; what each is for stands beside it
PRIVATE_NAMES = {
    "trl.trainer.grpo_trainer": {
        "GRPOTrainer": (
            "_tokenize_prompts",  # the ids generation uses; the reference scores the same
            "_generate_single_turn",  # in the model's mode
            "_generate_and_score_completions",  # rows gain the reference columns here
            "_calculate_rewards",  # the rewards of all processes, for advantages without a baseline
            "_prepare_inputs",  # a step's micro-batches are settled here
            "_get_per_token_logps_and_entropies",  # makes the one forward that the query reader stands in for
            "_get_train_sampler",  # advanced past finished epochs on resume
            "_set_signature_columns_if_needed",  # keeps the reference columns with remove_unused_columns
            "_save_checkpoint",  # the checkpoint names its reference
            "get_off_policy_mask",  # applied with the advantages before a trust region weights them
            "loss_is_scaled_for_ga",  # whether the penalty must be scaled for accumulation
        ),
    },
    "trl.trainer.rloo_trainer": {
        "RLOOTrainer": (  # for what GRPOTrainer's are
            "_tokenize_prompts",
            "_generate_single_turn",
            "_generate_and_score_completions",
            "_prepare_inputs",
            "_get_per_token_logps_and_entropies",
            "_get_train_sampler",
            "_set_signature_columns_if_needed",
            "_save_checkpoint",
            "loss_is_scaled_for_ga",
        ),
    },
    "trl.trainer.dpo_trainer": {
        "DPOTrainer": (  # for what GRPOTrainer's are, or
            "_compute_loss",  # all of its inputs go to the model: the columns are taken out before
            "compute_ref_log_probs",  # likewise
            "_prepare_dataset",  # makes `prompt_ids`, which the reference scores
            "_prepare_inputs",
            "_get_train_sampler",
            "_set_signature_columns_if_needed",
            "_save_checkpoint",
            "loss_is_scaled_for_ga",
        ),
        "DataCollatorForPreference": ("torch_call",),  # lays pairs out as [chosen; rejected], padded on the right
    },
    "trl.trainer.utils": {
        None: (
            "add_fused_lm_head",
            "pad",
            "_ChunkedLogProbFunction",  # the top-K regions read the head's weight while it is whole
        )
    },
    "trl.generation.vllm_generation": {
        "VLLMGeneration": ("generate",),  # the top-K regions ask it for more log-probs and reorder them
    },
    "transformers": {
        "Trainer": (
            "get_batch_samples",  # the raw batches of one optimizer step
            "_run_epoch",  # none of a finished run
            "_get_output_dir",  # where the checkpoint's state goes
        )
    },
}
# Attributes that the trainers set in __init__ or during training
_SHARED_ATTRIBUTES = (
    "_step",  # micro-batches so far
    "_buffered_inputs",  # slices of the current generation batch
    "_metrics",  # TRL's metric lists per mode
    "_signature_columns",
    "current_gradient_accumulation_steps",
)
PRIVATE_ATTRIBUTES = {
    "GRPOTrainer": (
        *_SHARED_ATTRIBUTES,
        "epsilon_low",  # set to infinity under a trust region
        "epsilon_high",
        "_logs",  # what the completions table shows as advantage
        "off_policy_mask_threshold",  # taken over under a trust region
        "aux_loss_enabled",  # these three: whether a step's gradient depends on how its rows are cut into micro-batches
        "top_entropy_quantile",
        "_entropy_bonus_enabled",
    ),
    "RLOOTrainer": (*_SHARED_ATTRIBUTES, "aux_loss_enabled"),
    "DPOTrainer": (
        "_metrics",
        "_signature_columns",
        "data_collator",  # wrapped, so that batches carry the reference columns
        "current_gradient_accumulation_steps",
    ),
}


def require_supported_trl() -> None:
    """Refuse to run on a TRL whose internals were not tested.

    Raises:
        ImportError: TRL is missing or outside `SUPPORTED_TRL`.
    """
    try:
        found = version("trl")
    except PackageNotFoundError as error:
        raise ImportError(f"erpo_trl needs TRL ({SUPPORTED_TRL}): pip install 'trl{SUPPORTED_TRL}'") from error
    if found not in SUPPORTED_TRL:
        raise ImportError(
            f"erpo_trl supports TRL {SUPPORTED_TRL}, found {found}: pip install 'trl{SUPPORTED_TRL}', or a release of "
            "erpo_trl that names this TRL"
        )


def metrics_mode(model) -> str:
    """Under which of two names, `train` or `eval`, TRL's trainers keep in `_metrics` what they measure of `model` now."""
    return "train" if model.training else "eval"
