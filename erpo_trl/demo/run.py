"""`erpo-trl demo`: train the embedded model with ERPO and with GRPO on one seed and budget, and print what came of it.

Each method trains in a process of its own, so that peak memory and random state are its own. Nothing is staged: the table
holds what this run measured.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers
from datasets import Dataset
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback

from ..cli import InputError, check_folder
from ..data import load_arithmetic
from ..query.divergence import query_kl
from ..query.likelihood import scored_token_mask
from ..rewards import score_answer
from ..train import make_trainer, parse
from . import MODEL_DIR

RECIPE = Path(__file__).with_name("demo.yaml")
TEMPERATURES = (0.1, 0.6, 1.0, 1.5)
# What each method changes in the recipe
METHODS = {
    "ERPO": ["--trainer", "grpo"],
    "GRPO": ["--trainer", "grpo", "--query_kl_coef", "0", "--query_weight", "uniform", "--beta", "0.01"],
}
HELD_OUT = 200  # problems of the test split
SAMPLES = 4  # answers to each at each temperature
PROBE = 64  # problems the drift is measured on while training
PROBE_EVERY = 10  # optimizer steps


def sample(model, tokenizer, prompts: list, temperature: float, max_new_tokens: int, samples: int = 1):
    """Completions of chat prompts.

    Returns: token ids (N, P+C), prompt mask (N, P) and texts, N = len(prompts) * samples, a prompt's samples together.
    """
    inputs = tokenizer.apply_chat_template(
        prompts, add_generation_prompt=True, padding=True, return_dict=True, return_tensors="pt"
    )
    output = model.generate(
        **inputs.to(model.device),
        do_sample=True,
        temperature=temperature,
        top_k=0,
        top_p=1.0,
        num_return_sequences=samples,
        max_new_tokens=max_new_tokens,
    )
    mask = inputs["attention_mask"].repeat_interleave(samples, 0)
    texts = tokenizer.batch_decode(output[:, mask.shape[1] :], skip_special_tokens=True)
    return output, mask, texts


def accuracies(model, tokenizer, problems: Dataset, max_new_tokens: int, seed: int) -> dict[float, float]:
    """Share of right answers (Avg@SAMPLES) at each of `TEMPERATURES`."""
    result = {}
    for temperature in TEMPERATURES:
        torch.manual_seed(seed)
        *_, texts = sample(model, tokenizer, problems["prompt"][:], temperature, max_new_tokens, SAMPLES)
        golds = [gold for gold in problems["answer"] for _ in range(SAMPLES)]
        result[temperature] = sum(score_answer(gold, text) for gold, text in zip(golds, texts)) / len(texts)
    return result


def distributions(model, ids: Tensor, mask: Tensor) -> Tensor:
    """(N, T-1, V) log-probs in nats of every next token."""
    return model(input_ids=ids, attention_mask=mask).logits[:, :-1].float().log_softmax(-1)


class DriftProbe(TrainerCallback):
    """Query-KL and Policy-KL to the pre-RL model on held-out problems, measured alike for every method.

    Query-KL: k3 per prompt token, averaged over the prompt, then over prompts. Policy-KL: KL(π‖π_0) of the next-token
    distributions along completions sampled from the policy at T=1, summed over the vocabulary and averaged over tokens.
    Leaves the random state as found.
    """

    def __init__(self, problems: Dataset, tokenizer, max_new_tokens: int):
        self.prompts, self.tokenizer, self.max_new_tokens = problems["prompt"][:], tokenizer, max_new_tokens
        self.base = AutoModelForCausalLM.from_pretrained(MODEL_DIR).eval()
        self.curve: list[dict] = []  # step, query_kl, policy_kl

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.measure(model, 0)

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step % PROBE_EVERY == 0 or state.global_step == state.max_steps:
            self.measure(model, state.global_step)

    @torch.no_grad()
    def measure(self, model, step: int) -> None:
        training = model.training
        model.eval()
        self.base.to(model.device)
        with torch.random.fork_rng(devices=[model.device] if model.device.type == "cuda" else []):
            torch.manual_seed(step)
            ids, prompt_mask, _ = sample(model, self.tokenizer, self.prompts, 1.0, self.max_new_tokens)
        completion = ids[:, prompt_mask.shape[1] :]
        ended = (completion == self.tokenizer.eos_token_id).cumsum(1)
        # Everything up to the first end of turn, that one included
        real = (ended == 0) | ((ended == 1) & (completion == self.tokenizer.eos_token_id))
        mask = torch.cat([prompt_mask, real.long()], dim=1)
        now, before = distributions(model, ids, mask), distributions(self.base, ids, mask)
        width = prompt_mask.shape[1] - 1
        logps, ref_logps = (x[:, :width].gather(-1, ids[:, 1 : width + 1, None]).squeeze(-1) for x in (now, before))
        drift = query_kl(logps, ref_logps, scored_token_mask(prompt_mask))
        policy = (now.exp() * (now - before)).sum(-1)[:, width:][real].mean()
        self.curve.append({"step": step, "query_kl": drift.mean().item(), "policy_kl": policy.item()})
        model.train(training)


class ProgressLine(TrainerCallback):
    """One line per log: where the run is and what it has learned."""

    def __init__(self, method: str):
        self.method = method

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "reward" in logs and state.is_world_process_zero:
            print(
                f"  {self.method}  step {state.global_step:>4}/{state.max_steps}  reward {logs['reward']:.3f}  "
                f"query/kl {logs['query/kl']:.4f}  entropy {logs['entropy']:.3f}  {logs['step_time']:.2f} s/step",
                flush=True,
            )


def train_method(method: str, output: Path, options: Sequence[str], held_out: int) -> None:
    """Train one method and leave `result.json`, `log_history.json` and `model/` in `output`."""
    arguments = ["--config", str(RECIPE), *options, "--output_dir", str(output / "model"), *METHODS[method]]
    trainer = make_trainer(*parse(arguments))
    problems = load_arithmetic("test", n=held_out)
    tokenizer, length = trainer.processing_class, trainer.max_completion_length
    probe = DriftProbe(problems.select(range(min(PROBE, held_out))), tokenizer, length)
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(ProgressLine(method))
    trainer.add_callback(probe)
    trainer.train()
    trainer.save_model()
    trainer.save_state()
    model = trainer.accelerator.unwrap_model(trainer.model).eval()
    steps = [log for log in trainer.state.log_history if "step_time" in log]
    on_gpu = model.device.type == "cuda"
    # ru_maxrss counts bytes on macOS and kilobytes elsewhere
    unit = 1 if sys.platform == "darwin" else 1024
    memory = torch.cuda.max_memory_allocated() if on_gpu else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    result = {
        "accuracy": accuracies(model, tokenizer, problems, length, trainer.args.seed),
        "query_kl": probe.curve[-1]["query_kl"],
        "policy_kl": probe.curve[-1]["policy_kl"],
        "drift": probe.curve,
        "seconds_per_step": sum(log["step_time"] for log in steps) / len(steps),
        "peak_memory_mb": memory / 2**20,
        "steps": trainer.state.global_step,
    }
    (output / "log_history.json").write_text(json.dumps(trainer.state.log_history, indent=1))
    (output / "result.json").write_text(json.dumps(result, indent=1))


def table(before: dict[float, float], results: dict[str, dict]) -> str:
    """Markdown table of what the run measured."""
    head = ["", *(f"T={t}" for t in TEMPERATURES), "Query-KL", "Policy-KL", "s/step", "peak MB"]
    rows = [["before", *(f"{before[t]:.3f}" for t in TEMPERATURES), "0", "0", "", ""]]
    for method, result in results.items():
        rows.append(
            [
                f"after {method}",
                *(f"{result['accuracy'][str(t)]:.3f}" for t in TEMPERATURES),
                f"{result['query_kl']:.4f}",
                f"{result['policy_kl']:.4f}",
                f"{result['seconds_per_step']:.2f}",
                f"{result['peak_memory_mb']:.0f}",
            ]
        )
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    lines = [head, ["-" * width for width in widths], *rows]
    return "\n".join("| " + " | ".join(cell.ljust(w) for cell, w in zip(line, widths)) + " |" for line in lines)


def plot_drift(results: dict[str, dict], path: Path) -> bool:
    """Write the two drift curves of every method as a PNG; False without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False

    figure = Figure(figsize=(9, 3.4), layout="constrained")
    axes = figure.subplots(1, 2)
    for axis, name, label in zip(axes, ("query_kl", "policy_kl"), ("Query-KL", "Policy-KL")):
        for method, result in results.items():
            axis.plot([p["step"] for p in result["drift"]], [p[name] for p in result["drift"]], label=method)
        axis.set(xlabel="optimizer step", ylabel=f"{label} (nats per token)", title=f"{label} to the pre-RL model")
        axis.grid(alpha=0.3)
    axes[0].legend()
    figure.savefig(path, dpi=150)
    return True


def main(argv: Sequence[str]) -> None:
    """Run both methods, print the table, write everything to the output folder."""
    parser = argparse.ArgumentParser(
        prog="erpo-trl demo",
        description="Train the embedded model with ERPO and with GRPO on the same seed and budget, and compare them.",
        epilog="Further options override the recipe of both methods, e.g. --max_steps 50 --learning_rate 5e-4.",
    )
    parser.add_argument("--output", type=Path, default=Path("runs/demo"), help="folder for table, plot, logs, models")
    parser.add_argument("--held_out", type=int, default=HELD_OUT, help="held-out problems to measure accuracy on")
    parser.add_argument("--method", choices=METHODS, help=argparse.SUPPRESS)  # the child processes' own entry
    options, rest = parser.parse_known_args(argv)
    if options.held_out < 1:
        raise InputError(f"--held_out must be at least 1, found {options.held_out}")
    check_folder(options.output, "--output")
    # More threads gain nothing on a model this small, and wait for each other wherever a core is busy with something else
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)))
    transformers.utils.logging.disable_progress_bar()
    # TRL and transformers warn of each other's deprecations; nothing the user of a demo can act on
    warnings.filterwarnings("ignore", category=FutureWarning)
    if options.method:
        train_method(options.method, options.output / options.method.lower(), rest, options.held_out)
        return

    _, args, _ = parse(["--config", str(RECIPE), *rest])  # a wrong option shows now, not in the child
    start = time.perf_counter()
    options.output.mkdir(parents=True, exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(MODEL_DIR).eval()
    problems = load_arithmetic("test", n=options.held_out)
    print(f"Before training: {options.held_out} held-out problems, {SAMPLES} answers each at T = {TEMPERATURES}")
    before = accuracies(model, tokenizer, problems, args.max_completion_length, args.seed)

    results = {}
    for method in METHODS:
        folder = options.output / method.lower()
        folder.mkdir(parents=True, exist_ok=True)
        print(f"{method}: {args.max_steps} steps of {args.generation_batch_size} completions", flush=True)
        # fmt: off
        command = [
            sys.executable, "-m", "erpo_trl.cli", "demo", "--output", str(options.output), "--method", method,
            "--held_out", str(options.held_out), *rest,
        ]
        # fmt: on
        if subprocess.run(command).returncode:
            raise InputError(f"training with {method} failed; its messages stand above")
        results[method] = json.loads((folder / "result.json").read_text())

    text = table(before, results)
    (options.output / "table.md").write_text(text + "\n")
    (options.output / "metrics.json").write_text(json.dumps({"before": before, "after": results}, indent=1))
    plotted = plot_drift(results, options.output / "drift.png")
    print(f"\nShare of right answers by sampling temperature, and drift from the model before training\n\n{text}\n")
    print(
        f"{time.perf_counter() - start:.0f} s in all. Written to {options.output}: table.md, metrics.json, logs and models"
    )
    print(
        f"Drift curves: {options.output / 'drift.png'}"
        if plotted
        else "For the drift curves: pip install erpo-trl[plot]"
    )
