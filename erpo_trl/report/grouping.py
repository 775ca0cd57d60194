"""Which runs are the same but for their seed."""

import json
from collections.abc import Mapping
from pathlib import PurePath

import xxhash

# Settings that say where a run writes, what it shows and when it stops to look: they do not change what is trained
_NEUTRAL = {
    "seed", "data_seed", "output_dir", "run_name", "project", "resume_from_checkpoint", "disable_tqdm", "do_eval",
    "do_predict", "do_train", "push_to_hub", "report_to", "reference_cache_dir", "reference_batch_tokens", "query_log_steps",
    "ignore_data_skip", "load_best_model_at_end", "metric_for_best_model", "greater_is_better", "local_rank",
    "num_completions_to_print", "vllm_server_base_url", "vllm_server_host", "vllm_server_port", "vllm_group_port",
}  # fmt: skip
_NEUTRAL_PREFIXES = ("save_", "logging_", "log_", "eval_", "hub_", "trackio_", "dataloader_num", "dataloader_pin")


def training_settings(args: Mapping) -> dict:
    """The settings that decide what is trained, out of a run's `TrainingArguments` as a dict."""
    return {
        name: value for name, value in args.items() if name not in _NEUTRAL and not name.startswith(_NEUTRAL_PREFIXES)
    }


def group_key(state: Mapping) -> str | None:
    """8 hex digits that runs share which differ in nothing but their seed; None where the state does not hold the settings.

    Args: state: of `erpo_state.json`; its reference stands for the model, its data fingerprint for the data.
    """
    if not state.get("args"):
        return None
    decisive = [state["fingerprint"], state["adapter"], state["data_fingerprint"], training_settings(state["args"])]
    return xxhash.xxh3_64_hexdigest(json.dumps(decisive, sort_keys=True, default=str).encode())[:8]


def group_name(state: Mapping, model: str) -> str:
    """A name for the group that says what a reader looks for first. Args: state: as in [`group_key`]; model: path or hub id."""
    args = state["args"]
    return (
        f"{PurePath(model or 'model').name}-alpha{args['query_kl_coef']:g}-{args['query_weight']}-"
        f"beta{args['beta']:g}-{group_key(state)}"
    )
