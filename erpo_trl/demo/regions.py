"""`python -m erpo_trl.demo.regions`: train the embedded model once under every trust region, off-policy, and tabulate.

Each generation serves four optimizer steps, so three of them meet a policy that has moved. Every region starts from the
same weights, seed and prompts; nothing is tuned to any of them.
"""

import argparse
import json
import os
import warnings
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import torch
import transformers
from transformers import PrinterCallback

from ..data import load_arithmetic
from ..rewards import score_answer
from ..train import make_trainer, parse
from .run import HELD_OUT, RECIPE, sample

UPDATES_PER_GENERATION = 4
SETTINGS = {
    "per_device_train_batch_size": 64,
    "steps_per_generation": UPDATES_PER_GENERATION,
    "learning_rate": 1e-3,
    "lr_scheduler_type": "constant",
    "loss_type": "dr_grpo",
    "scale_rewards": "none",
    "logging_steps": 1,
    "query_kl_coef": 1e-2,
    "trust_region_topk": 8,
}
# Row of the table -> what the region is set to; c of the ablations is ours, the paper gives none
RUNS = {
    "ratio_clip": {},
    "none": {},
    "spo": {"spo_epsilon": 0.2},
    "dppo_tv": {"trust_region_delta": 0.2},
    "dppo_kl": {"trust_region_delta": 0.05},
    "dppo_topk_tv": {"trust_region_delta": 0.2},
    "dppo_topk_kl": {"trust_region_delta": 0.05},
    "drpo": {"trust_region_delta": 0.2},
    "drpo, δ = 12.5": {"trust_region_delta": 12.5},
    "drpo_mask": {"trust_region_delta": 0.2},
    "drpo_no_advantage": {"trust_region_delta": 0.2},
    "drpo_tv": {"trust_region_coef": 0.1},
    "drpo_kl": {"trust_region_coef": 0.1},
    "drpo_k3": {"trust_region_coef": 0.1},
}
METRICS = ("shift_mean", "shift_p99", "shift_max", "violation_rate", "weight_min", "weight_max", "corrective_rate")


@torch.no_grad()
def listing_rollout(prompts, trainer) -> dict:
    """A `rollout_func` that samples with transformers and lists the likeliest tokens of every step, for one process."""
    tokenizer, args = trainer.processing_class, trainer.args
    model = trainer.accelerator.unwrap_model(trainer.model)
    inputs = tokenizer.apply_chat_template(
        prompts, add_generation_prompt=True, padding=True, return_dict=True, return_tensors="pt"
    ).to(model.device)
    training = model.training
    output = model.eval().generate(
        **inputs,
        do_sample=True,
        temperature=args.temperature,
        top_k=0,
        max_new_tokens=args.max_completion_length,
        output_scores=True,
        return_dict_in_generate=True,
    )
    model.train(training)
    width = inputs["input_ids"].shape[1]
    logps = torch.stack(output.scores, dim=1).float().log_softmax(-1)  # (B, C, V)
    completions, logprobs, token_ids = [], [], []
    for ids, row in zip(output.sequences[:, width:], logps):
        end = (ids == tokenizer.eos_token_id).nonzero()
        length = int(end[0]) + 1 if len(end) else len(ids)
        top = row[:length].topk(args.trust_region_topk)
        own = row[:length].gather(1, ids[:length, None])
        # The sampled token last; where it is among the likeliest too, it is the same token twice
        logprobs.append(torch.cat([top.values, own], dim=1).tolist())
        token_ids.append(torch.cat([top.indices, ids[:length, None]], dim=1).tolist())
        completions.append(ids[:length].tolist())
    mask = inputs["attention_mask"].bool()
    return {
        "prompt_ids": [row[keep].tolist() for row, keep in zip(inputs["input_ids"], mask)],
        "completion_ids": completions,
        "logprobs": logprobs,
        "logprob_token_ids": token_ids,
    }


def train_region(name: str, fields: dict, output: Path, options: Sequence[str], held_out: int) -> dict:
    """Train under one region. Returns what the table shows: means over the last quarter of the steps."""
    region = name.partition(",")[0]
    settings = SETTINGS | fields | {"trust_region": region, "output_dir": output / region}
    arguments = [part for key, value in settings.items() for part in (f"--{key}", str(value))]
    rollout = listing_rollout if region.startswith("dppo_topk") else None
    trainer = make_trainer(*parse(["--config", str(RECIPE), *arguments, *options]), rollout_func=rollout)
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    model = trainer.accelerator.unwrap_model(trainer.model).eval()
    problems = load_arithmetic("test", n=held_out)
    torch.manual_seed(0)
    *_, texts = sample(model, trainer.processing_class, problems["prompt"][:], 1.0, trainer.max_completion_length, 4)
    golds = [gold for gold in problems["answer"] for _ in range(4)]
    log = [entry for entry in trainer.state.log_history if "step_time" in entry]
    # The first step after a generation meets the policy that sampled
    moved = [entry for i, entry in enumerate(log) if i % UPDATES_PER_GENERATION]

    def mean(key):
        # Rewards are logged where completions were generated
        values = [entry[key] for entry in log if key in entry]
        last = values[-max(1, len(values) // 4) :]
        return sum(last) / len(last)

    result = {
        "reward": mean("reward"),
        "accuracy": sum(score_answer(gold, text) for gold, text in zip(golds, texts)) / len(texts),
        "entropy": mean("entropy"),
        "query_kl": mean("query/kl"),
        "grad_norm_max": max(entry["grad_norm"] for entry in log),
    }
    if region != "ratio_clip":
        # Extremes over the run, the rest over the steps that met a moved policy
        for metric in METRICS:
            values = [entry[f"trust_region/{metric}"] for entry in moved]
            pick = min if metric.endswith("_min") else max if metric.endswith("_max") else None
            result[metric] = pick(values) if pick else sum(values) / len(values)
    return result


def table(results: dict[str, dict]) -> str:
    """Markdown, a row per region."""
    columns = ["reward", "accuracy", "entropy", "query_kl", "grad_norm_max", *METRICS]
    lines = ["| region | set to | " + " | ".join(columns) + " |", "|" + "---|" * (len(columns) + 2)]
    for name, result in results.items():
        fields = ", ".join(f"{k.removeprefix('trust_region_')} {v}" for k, v in RUNS[name].items()) or "-"
        cells = [f"{result[c]:.3g}" if c in result else "" for c in columns]
        lines.append(f"| {name.partition(',')[0]} | {fields} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Train every region one after the other; write `table.md` and `results.json`."""
    parser = argparse.ArgumentParser(prog="python -m erpo_trl.demo.regions", description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, default=Path("runs/regions"), help="folder for table and results")
    parser.add_argument("--held_out", type=int, default=HELD_OUT, help="held-out problems to measure accuracy on")
    parser.add_argument("--only", nargs="+", choices=RUNS, default=list(RUNS), help="rows to run")
    options, rest = parser.parse_known_args(argv)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)))
    transformers.utils.logging.disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning)
    options.output.mkdir(parents=True, exist_ok=True)
    results = {}
    for name in options.only:
        results[name] = train_region(name, RUNS[name], options.output, rest, options.held_out)
        print(f"{name}: {json.dumps({k: round(v, 4) for k, v in results[name].items()})}", flush=True)
        state = {"settings": SETTINGS, "options": rest, "torch": torch.__version__, "trl": version("trl")}
        (options.output / "results.json").write_text(json.dumps({**state, "results": results}, indent=1))
    text = table(results)
    (options.output / "table.md").write_text(text + "\n")
    print(f"\n{text}")


if __name__ == "__main__":
    main()
