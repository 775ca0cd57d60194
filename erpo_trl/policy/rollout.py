"""Whether a rollout's log-probs are those of the policy that is trained: same temperature, whole vocabulary."""

from collections.abc import Sequence

from .metrics import StepMoves

# A rollout of the policy's own weights differs from it by the engine's rounding, which goes both ways. A mean |π - μ| above
# the first bound of which more than the second share goes one way is another temperature, top-p or top-k.
_MEAN_SHIFT, _ONE_SIDED, _TOKENS = 2e-3, 0.5, 64

# Of what shifts or cuts the distribution that vLLM samples from, the values that leave it alone: fields of TRL's and sampling
# parameters of vLLM's. `bad_words` may be empty; a stop at min_tokens 0 forbids no end
_NEUTRAL = {
    "top_p": (1.0,),
    "top_k": (0, -1, None),
    "min_p": (None, 0.0),
    "repetition_penalty": (1.0,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "min_tokens": (0,),
    "logit_bias": (None, {}),
    "bad_words": (None, []),
    "allowed_token_ids": (None,),
    "structured_outputs": (None,),
    "vllm_structured_outputs_regex": (None,),
}


def refuse_filtered_log_probs(args, logprobs_mode: str) -> None:
    """Raise where the engine's log-probs are, by their settings, not the policy's.

    Args:
        args: sampling settings as in GRPOConfig.
        logprobs_mode: vLLM's; `processed_logprobs` are taken after temperature and filters, `raw_logprobs` before.
    """
    temperature = (args.generation_kwargs or {}).get("temperature", args.temperature)
    if temperature != args.temperature:
        raise ValueError(
            f"generation_kwargs sets temperature={temperature}, the policy is read at temperature={args.temperature:g}, so "
            f"trust_region={args.trust_region!r} would see a move that is none. Set temperature itself."
        )
    if logprobs_mode == "processed_logprobs":
        # What TRL hands to the engine beside its own fields beats them
        asked = {name: getattr(args, name) for name in _NEUTRAL if hasattr(args, name)} | (
            args.generation_kwargs or {}
        )
        found = {name: asked[name] for name, values in _NEUTRAL.items() if name in asked and asked[name] not in values}
        if found:
            settings = ", ".join(f"{name}={value}" for name, value in found.items())
            raise ValueError(
                f"trust_region={args.trust_region!r} compares the policy with the rollout's log-probs, which vLLM renormalises "
                f"over the tokens that {settings} leave; the policy's are over the whole vocabulary. Set "
                f"{', '.join(f'{name}={_NEUTRAL[name][0]}' for name in found)}, or run the server "
                "with --logprobs-mode raw_logprobs at temperature 1."
            )
    elif logprobs_mode == "raw_logprobs":
        if args.temperature != 1.0:
            raise ValueError(
                f"The vLLM server's log-probs (--logprobs-mode raw_logprobs) are at temperature 1, the policy's at "
                f"{args.temperature:g}, so trust_region={args.trust_region!r} would see a move that is none. Restart the server "
                "with --logprobs-mode processed_logprobs, or set temperature=1."
            )
    else:
        raise ValueError(
            f"The vLLM server returns {logprobs_mode!r}, which are no log-probs: restart it with --logprobs-mode "
            "processed_logprobs."
        )


def refuse_one_sided_rollout(steps: Sequence[StepMoves], trust_region: str) -> bool:
    """Raise where rollout and policy differ although no update lies between them.

    Args:
        steps: the moves of optimizer steps that each were the first on their rollout.

    Returns: whether they held enough tokens to tell.
    """
    tokens = sum(step.tokens for step in steps)
    if tokens < _TOKENS:
        return False
    mean_shift = sum(step.shift_sum for step in steps) / tokens
    mean_signed = sum(step.signed_sum for step in steps) / tokens
    if mean_shift < _MEAN_SHIFT or abs(mean_signed) < _ONE_SIDED * mean_shift:
        return True
    sharper = "sharper" if mean_signed < 0 else "flatter"
    raise ValueError(
        f"The rollout's log-probs are not the policy's: before any update |π - μ| is {mean_shift:.3g} on average, and π - μ "
        f"{mean_signed:+.3g}, so the rollout is {sharper} throughout. Its log-probs must be at the trainer's temperature and "
        f"over the whole vocabulary (no top-p, top-k, min-p, penalties or constraints), or trust_region={trust_region!r} sees a move that is none. "
        "Rollouts of another policy on purpose: set trust_region_check_rollout=False."
    )
