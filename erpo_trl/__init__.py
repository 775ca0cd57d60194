"""ERPO (Environment-Regularized Policy Optimization) on Hugging Face TRL."""

import importlib

from ._trl import require_supported_trl
from ._version import __version__

require_supported_trl()

# Public name -> module; imported on first use, so that `import erpo_trl` costs no torch
_PUBLIC = {
    "ERPOConfig": "config",
    "ERPOTrainer": "trainer",
    "ERPORLOOConfig": "config",
    "ERPORLOOTrainer": "trainer",
    "ERPODPOConfig": "config",
    "ERPODPOTrainer": "trainer",
    "DatasetMapper": "query.reference",
    "ReferenceUnavailableError": "query.reference",
    "EvalConfig": "evaluation.config",
    "EvaluationCallback": "evaluation.callback",
    "evaluate": "evaluation.run",
    "load_benchmark": "evaluation.benchmarks",
    "train_eval_gap": "evaluation.metrics",
    "CollapseCallback": "report.collapse",
    "LiveLine": "report.live",
    "make_report": "report.command",
    "query_kl": "query.divergence",
    "query_weights": "query.weights",
    "accuracy_reward": "rewards",
    "format_reward": "rewards",
    "score_answer": "rewards",
    "load_arithmetic": "data",
    "load_math_levels_3_to_5": "data",
    "load_preferences": "preferences",
    "load_problems": "data",
}
__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str):
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_PUBLIC[name]}", __name__), name)


def __dir__():
    return sorted(__all__)
