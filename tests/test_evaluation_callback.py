"""The callback: what it logs, that training does not notice it, and the gap by hand."""

import inspect
from types import SimpleNamespace

import pytest
import torch
from helpers import byte_tokenizer, make_trainer, tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.generation.vllm_generation import VLLMGeneration

from erpo_trl import EvaluationCallback, accuracy_reward, evaluate, load_arithmetic, train_eval_gap
from erpo_trl.demo import MODEL_DIR
from erpo_trl.evaluation.benchmarks import Benchmark
from erpo_trl.evaluation.callback import Policy
from erpo_trl.evaluation.protocol import make_requests


def demo_trainer(folder, **settings):
    return make_trainer(
        folder,
        model=AutoModelForCausalLM.from_pretrained(MODEL_DIR),
        tokenizer=AutoTokenizer.from_pretrained(MODEL_DIR),
        dataset=load_arithmetic("train", n=64),
        reward=accuracy_reward,
        **{"max_completion_length": 24, "per_device_train_batch_size": 32, "num_generations": 4, "max_steps": 5}
        | {"learning_rate": 0.1, "logging_steps": 10} | settings,
    )  # fmt: skip


def small_set(rows=12):
    return Benchmark("arithmetic", load_arithmetic("test", n=rows))


def test_logs_accuracies_and_the_gap(tmp_path, monkeypatch):
    """Steps 0, 2, 4 and the last; the gap is that of the logged training accuracy, and the mean is Table 4's."""
    monkeypatch.setattr("erpo_trl.evaluation.run.plot_sweeps", lambda *args: False)
    trainer = demo_trainer(tmp_path)
    callback = EvaluationCallback(trainer, [small_set()], temperatures=[0, 0.8], samples=4, every=2)
    trainer.add_callback(callback)
    trainer.train()
    history = trainer.state.log_history
    evaluated = [entry for entry in history if "eval/arithmetic/avg@4@T0.8" in entry]
    assert [entry["step"] for entry in evaluated] == [0, 2, 4, 5]
    assert {"eval/arithmetic/pass@4@T0.8", "eval/arithmetic/tokens@T0.8", "eval/arithmetic/truncated@T0"} <= set(
        evaluated[0]
    )
    assert not any("reward" in entry or "query/kl" in entry for entry in evaluated)
    training = [entry for entry in history if "loss" in entry]
    # An evaluated step is logged, and step 1, whose rollouts are those of the policy at step 0
    assert [entry["step"] for entry in training] == [1, 2, 4, 5]
    train = [entry["rewards/accuracy_reward/mean"] for entry in training]
    accuracy = [(entry["eval/arithmetic/avg@4@T0"] + entry["eval/arithmetic/avg@4@T0.8"]) / 2 for entry in evaluated]
    assert len(set(accuracy)) > 1, "the policy does not change: the test would prove nothing"
    gaps = [entry for entry in history if "gap/train_eval" in entry]
    assert [entry["gap/train_eval"] for entry in gaps] == pytest.approx([t - e for t, e in zip(train, accuracy)])
    assert [entry["gap/train_eval_mean"] for entry in gaps] == pytest.approx(
        [train_eval_gap(train[:n], accuracy[:n]) for n in (1, 2, 3, 4)]
    )
    # The samples are those that `evaluate` draws from the saved policy
    trainer.save_model(str(tmp_path / "saved"))
    metrics = evaluate(
        model=str(tmp_path / "saved"), output=str(tmp_path / "out"), benchmarks=["arithmetic"], max_rows=12, samples=4,
        temperatures=[0, 0.8], max_new_tokens=24, bootstrap=10,
    )  # fmt: skip
    found = metrics["benchmarks"]["arithmetic"]["temperatures"]
    for t in ("0", "0.8"):
        assert evaluated[-1][f"eval/arithmetic/avg@4@T{t}"] == found[t]["avg@4"]["value"]


def test_training_does_not_notice(tmp_path):
    """Weights to the bit, and every logged training metric but times."""
    outcomes = []
    for name in ("without", "with"):
        trainer = demo_trainer(tmp_path / name, logging_steps=1, max_steps=3)
        if name == "with":
            trainer.add_callback(EvaluationCallback(trainer, [small_set(3)], samples=2, every=1))
        trainer.train()
        assert trainer.model.training
        logs = [entry for entry in trainer.state.log_history if "loss" in entry]
        logs = [{k: v for k, v in entry.items() if "time" not in k and "per_second" not in k} for entry in logs]
        outcomes.append((logs, trainer.model.state_dict()))
    (logs, weights), (other_logs, other_weights) = outcomes
    assert len(logs) == 3 and logs == other_logs
    assert all(torch.equal(weights[name], other_weights[name]) for name in weights)


def test_step_zero_can_be_left_out(tmp_path):
    trainer = demo_trainer(tmp_path, max_steps=2)
    trainer.add_callback(EvaluationCallback(trainer, [small_set(2)], samples=1, every=2, include_step_zero=False))
    trainer.train()
    for name in ("eval/arithmetic/avg@1@T1", "gap/train_eval"):
        assert [entry["step"] for entry in trainer.state.log_history if name in entry] == [2]


def test_wrong_settings_are_refused(tmp_path):
    trainer = demo_trainer(tmp_path)
    with pytest.raises(
        ValueError, match="train_metric is 'rewards/mine/mean'; the trainer's rewards are accuracy_reward"
    ):
        EvaluationCallback(trainer, [small_set()], train_metric="rewards/mine/mean")
    with pytest.raises(ValueError, match="every and samples must be at least 1, found 0 and 8"):
        EvaluationCallback(trainer, [small_set()], every=0)
    with pytest.raises(ValueError, match="at least one benchmark"):
        EvaluationCallback(trainer, [])
    trainer.add_callback(EvaluationCallback(trainer, [small_set(1)], samples=1, every=1, train_metric="accuracy"))
    with pytest.raises(ValueError, match="train_metric: 'accuracy' is not logged; logged are loss, "):
        trainer.train()


class Generation:
    """What the callback uses of TRL's VLLMGeneration. Answers with the box of the prompt's length and the seed."""

    def __init__(self):
        self.temperature, self.top_p, self.top_k, self.min_p = 1.0, 0.9, 5, 0.1
        self.repetition_penalty, self.max_completion_length, self.generation_kwargs = 1.5, 6, {"stop": "x"}
        self.synced, self.calls = 0, []

    def sync_weights(self):
        self.synced += 1

    def generate(self, prompts, images, num_generations):
        self.calls.append((prompts, vars(self) | {"calls": None}))
        seed = self.generation_kwargs["seed"]
        texts = [f"\\boxed{{{len(ids)}{seed % 10**8}}}" for ids in prompts]
        return prompts, [byte_tokenizer()(text + "</s>")["input_ids"] for text in texts], None, None


@pytest.mark.parametrize("ranks", [1, 2])
def test_vllm_rollouts_are_drawn_by_trls_own_engine(ranks, monkeypatch):
    """Weights are synced first, settings set aside and back, and two rows with one prompt get draws of their own."""
    generation = Generation()
    settings = {k: v for k, v in vars(generation).items() if k not in ("synced", "calls")}
    tokenizer = byte_tokenizer()
    prompts = ["same", "other one", "same"]
    ids = [tuple(row) for row in tokenizer(prompts)["input_ids"]]
    requests = make_requests("set", ids, 0.7, 2, 0, 40, 64, own_draw=False)
    gathered = []
    for rank in range(ranks):
        trainer = SimpleNamespace(
            use_vllm=True,
            vllm_generation=generation,
            model=tiny_model("qwen2"),
            processing_class=tokenizer,
            args=SimpleNamespace(vllm_max_model_length=50),
            accelerator=SimpleNamespace(process_index=rank, num_processes=ranks),
        )
        last = rank == ranks - 1

        def gather(found, last=last):
            gathered.extend(found)
            return gathered if last else [*found, *((r.row, r.sample, None) for r in requests)]

        monkeypatch.setattr("erpo_trl.evaluation.callback.gather_object", gather)
        policy = Policy(trainer, 40, 1000)
        assert policy.context == 50 < trainer.model.config.max_position_embeddings
        with policy.generating() as generate:
            draws = generate(requests)
    assert generation.synced == ranks
    assert {k: v for k, v in vars(generation).items() if k not in ("synced", "calls")} == settings
    texts = tokenizer.batch_decode([draw.token_ids for draw in draws], skip_special_tokens=True)
    assert len(set(texts)) == 6 and all(draw.finished for draw in draws)
    assert all(text.startswith(f"\\boxed{{{len(r.prompt_ids)}") for r, text in zip(requests, texts))
    seen = generation.calls[0][1]
    assert (seen["temperature"], seen["top_p"], seen["top_k"], seen["min_p"]) == (0.7, 1.0, 0, None)
    assert (seen["repetition_penalty"], seen["max_completion_length"]) == (1.0, 40)
    # Every rank makes as many calls with as many prompts: TRL's engine gathers them
    shapes = [[len(call[0]) for call in generation.calls[r::1]] for r in range(ranks)]
    half = len(generation.calls) // ranks
    assert shapes[0][:half] == shapes[0][half:][:half] or ranks == 1
    assert len(gathered) == len({entry[:2] for entry in gathered}) == 6


@pytest.mark.both_trls
def test_trls_engine_still_has_what_the_callback_sets():
    """Settings that TRL would rename would silently keep the training's values."""
    made = inspect.signature(VLLMGeneration.__init__).parameters
    assert {name for name in vars(Generation()) if name not in ("synced", "calls")} <= set(made)
    assert list(inspect.signature(VLLMGeneration.generate).parameters)[1:4] == ["prompts", "images", "num_generations"]
    assert callable(VLLMGeneration.sync_weights)
