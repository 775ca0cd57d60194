"""What a preset gives to the config fields that the user left unset (None)."""

import math

PAPER = {
    "query_kl_estimator": "k3",
    "query_kl_level": "token",
    "query_weight": "nll_ratio",
    "query_weight_clip": (0.0, 2.0),
    "query_weight_source": "reference",
    "query_kl_coef": 1e-2,
}
PRESETS = {
    "paper": PAPER,
    "release": PAPER | {"query_weight_clip": (0.0, math.inf), "query_weight_source": "policy"},
    "drpo": PAPER
    | {
        "query_kl_coef": 0.0,
        "query_weight": "uniform",
        "trust_region": "drpo",
        "trust_region_delta": 12.5,
        "loss_type": "dr_grpo",
        "scale_rewards": "none",
    },
}
