"""Evaluation while training: a fixed set of problems, drawn every so many steps by the policy's own generation backend.

Logs `eval/<benchmark>/avg@k@T…` and `pass@k@T…`, and the train–eval gap of the ERPO paper's Tables 4 and 5.
"""

import contextlib
from collections.abc import Sequence

import torch
from accelerate.utils import gather_object
from transformers import TrainerCallback
from trl.models import unwrap_model_for_generation

from ..query.sharding import is_sharded
from ..rewards import TIME_LIMIT_S
from .backends import Draw, Request, TransformersBackend
from .benchmarks import Benchmark
from .protocol import complete_table, drawn_table, make_requests, score_table, table_values
from .sampling import sample_seed
from .scoring import default_workers


class EvaluationCallback(TrainerCallback):
    """Evaluates the policy on fixed benchmarks every `every` steps, and after the last.

    Add it to the trainer that it is made with:

    ```python
    trainer.add_callback(EvaluationCallback(trainer, [load_benchmark("aime24")], temperatures=[0.6, 1.0], every=40))
    ```

    Training itself is not touched: the samples come from seeds of their own, the same at every step, and the model returns to
    the mode it was in.

    Args:
        trainer: a TRL trainer of the GRPO family; its temperature is set aside while samples are drawn.
        benchmarks: what to evaluate on.
        temperatures: of the samples; 0 is greedy, drawn once.
        samples: k, per problem and temperature.
        every: optimizer steps between evaluations.
        include_step_zero: also evaluate the policy before the first step, and count it in the gap, as the paper does.
        max_new_tokens: longest completion. Default: as in training.
        batch_tokens: token budget of one batch when the policy generates by transformers.
        train_metric: logged name of the accuracy on training problems. Default: the accuracy reward's mean.
        seed: of the samples.

    Logs, besides the accuracies: `gap/train_eval`, training accuracy since the last log minus the mean `avg@k` over benchmarks and
    temperatures, at this checkpoint (Table 5's difference; that of step 0 is logged with step 1, whose rollouts come from the
    policy of step 0), and `gap/train_eval_mean`, its mean over the checkpoints so far (Table 4).
    """

    def __init__(
        self,
        trainer,
        benchmarks: Sequence[Benchmark],
        temperatures: Sequence[float] = (1.0,),
        samples: int = 8,
        every: int = 40,
        include_step_zero: bool = True,
        max_new_tokens: int | None = None,
        batch_tokens: int = 65536,
        train_metric: str = "rewards/accuracy_reward/mean",
        seed: int = 0,
    ):
        if every < 1 or samples < 1:
            raise ValueError(f"every and samples must be at least 1, found {every} and {samples}")
        if not benchmarks or not temperatures:
            raise ValueError("give at least one benchmark and one temperature")
        reward = train_metric.removeprefix("rewards/").removesuffix("/mean")
        if train_metric == f"rewards/{reward}/mean" and reward not in trainer.reward_func_names:
            raise ValueError(
                f"train_metric is {train_metric!r}; the trainer's rewards are {', '.join(trainer.reward_func_names)}"
            )
        self.trainer, self.benchmarks, self.temperatures = trainer, list(benchmarks), list(temperatures)
        self.samples, self.every, self.include_step_zero = samples, every, include_step_zero
        self.max_new_tokens = max_new_tokens or trainer.max_completion_length
        self.train_metric, self.seed = train_metric, seed
        self.policy = Policy(trainer, self.max_new_tokens, batch_tokens)
        self._waiting: list[float] = []  # evaluation accuracies whose training accuracy is not logged yet

    def on_train_begin(self, args, state, control, **kwargs):
        if self.include_step_zero and state.global_step == 0:
            self._evaluate()

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step % self.every == 0 or state.global_step == state.max_steps:
            self._evaluate()
        # So that the training accuracy is that of the steps up to here
        control.should_log |= bool(self._waiting)
        return control

    def on_log(self, args, state, control, logs=None, **kwargs):
        waiting = self._waiting
        # Logs of an evaluation and the summary at the end hold no training metric
        if not waiting or "loss" not in logs:
            return
        if self.train_metric not in logs:
            raise ValueError(f"train_metric: {self.train_metric!r} is not logged; logged are {', '.join(logs)}")
        if logs[self.train_metric] is None:  # every reward of the window abstained
            return
        self._waiting = []
        gaps = [entry["gap/train_eval"] for entry in state.log_history if "gap/train_eval" in entry]
        for accuracy in waiting:
            gaps.append(logs[self.train_metric] - accuracy)
            self._log({"gap/train_eval": gaps[-1], "gap/train_eval_mean": sum(gaps) / len(gaps)})

    def _evaluate(self) -> None:
        metrics = self.measure()
        accuracies = [value for name, value in metrics.items() if f"/avg@{self.samples}@" in name]
        self._waiting.append(sum(accuracies) / len(accuracies))
        self._log(metrics)

    def _log(self, metrics: dict[str, float]) -> None:
        # In evaluation mode TRL's log leaves the training metrics that it has gathered alone
        with _evaluation_mode(self.trainer.model):
            self.trainer.log(metrics)

    def measure(self) -> dict[str, float]:
        """The policy's accuracies now, by the names they are logged under; on all processes together."""
        metrics = {}
        tokenizer = self.policy.tokenizer
        with self.policy.generating() as generate:
            for benchmark in self.benchmarks:
                name, golds = benchmark.name, benchmark.dataset["answer"][:]
                ids = self.policy.tokenize(benchmark.dataset["prompt"][:])
                for t in self.temperatures:
                    requests = make_requests(
                        name, ids, t, self.samples, self.seed, self.max_new_tokens, self.policy.context, own_draw=False
                    )
                    draws = generate(requests)
                    drawn = drawn_table(name, requests, draws, tokenizer)
                    drawn = complete_table(drawn, name, len(ids), t, self.samples, own_draw=False)
                    values = [None]
                    if self.trainer.accelerator.is_main_process:
                        scored = score_table(drawn, golds, default_workers(), TIME_LIMIT_S)
                        values = [{key: float(v.mean()) for key, v in table_values(scored, self.samples).items()}]
                    [values] = gather_object(values)[:1]
                    for key in (f"avg@{self.samples}", f"pass@{self.samples}", "tokens", "truncated"):
                        if key in values:
                            metrics[f"eval/{name}/{key}@T{t:g}"] = values[key]
        return metrics


class Policy:
    """Draws samples from the model that a TRL trainer trains, the way the trainer itself generates.

    Every process makes the same requests and gets all draws; each draws its share, padded so that all make the same calls.
    Args: trainer: of the GRPO family; max_new_tokens, batch_tokens: as in the callback.
    """

    def __init__(self, trainer, max_new_tokens: int, batch_tokens: int):
        self.trainer, self.max_new_tokens, self.batch_tokens = trainer, max_new_tokens, batch_tokens
        self.tokenizer = getattr(trainer.processing_class, "tokenizer", trainer.processing_class)
        config = trainer.model.config.get_text_config()
        limits = [getattr(config, "max_position_embeddings", None)]
        limits += [trainer.args.vllm_max_model_length] if trainer.use_vllm else []
        self.context = min((limit for limit in limits if limit is not None), default=None)

    def tokenize(self, prompts: list) -> list[tuple[int, ...]]:
        """The ids that training would generate from."""
        return [tuple(ids) for ids in self.trainer._tokenize_prompts(prompts)[0]]

    @contextlib.contextmanager
    def generating(self):
        """A function from requests to draws, usable inside."""
        trainer = self.trainer
        if trainer.use_vllm:
            # The engine still holds the weights of the last rollout
            trainer.vllm_generation.sync_weights()
            yield self._by_vllm
            return
        with (
            _evaluation_mode(trainer.model),
            unwrap_model_for_generation(
                trainer.model_wrapped,
                trainer.accelerator,
                gradient_checkpointing_kwargs=trainer.args.gradient_checkpointing_kwargs,
            ) as model,
        ):
            backend = TransformersBackend(model, self.tokenizer, self.batch_tokens, in_step=is_sharded(model))
            yield lambda requests: self._by_transformers(backend, requests)

    def _by_transformers(self, backend: TransformersBackend, requests: Sequence[Request]) -> list[Draw]:
        accelerator = self.trainer.accelerator
        batches = backend.plan(requests)
        found = []
        for first in range(0, len(batches), accelerator.num_processes):
            index = first + accelerator.process_index
            # A process without a batch in the last round draws one along: on a sharded model all make the same calls
            batch = batches[min(index, len(batches) - 1)]
            draws = backend.generate(batch)
            if index < len(batches):
                found += [(r.row, r.sample, draw) for r, draw in zip(batch, draws)]
        return _in_order(requests, gather_object(found))

    def _by_vllm(self, requests: Sequence[Request]) -> list[Draw]:
        """Draws by TRL's vLLM client or engine, which take one seed per call: so a call holds each prompt at most once."""
        accelerator, generation = self.trainer.accelerator, self.trainer.vllm_generation
        rounds: list[list[Request]] = []
        seen: dict[tuple, int] = {}
        for request in requests:
            turn = seen[request.prompt_ids] = seen.get(request.prompt_ids, -1) + 1
            rounds += [[] for _ in range(turn + 1 - len(rounds))]
            rounds[turn].append(request)
        found = []
        for turn, members in enumerate(rounds):
            share = -(-len(members) // accelerator.num_processes)
            padded = members + members[:1] * (share * accelerator.num_processes - len(members))
            first = accelerator.process_index * share
            mine = padded[first : first + share]
            settings = {
                "temperature": members[0].temperature, "top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0,
                "max_completion_length": self.max_new_tokens,
                # Some engines keep 32 bits of a seed, and some take a signed number
                "generation_kwargs": {"seed": sample_seed(members[0].seed, "", 0, turn, 0.0) & 0x7FFFFFFF},
            }  # fmt: skip
            with _set_aside(generation, settings):
                _, completions, *_ = generation.generate([list(r.prompt_ids) for r in mine], None, 1)
            eos = self.tokenizer.eos_token_id
            for index, (request, ids) in enumerate(zip(mine, completions), start=first):
                if index < len(members):
                    ids = list(ids)[: request.max_new_tokens]
                    finished = len(ids) < request.max_new_tokens or ids[-1:] == [eos]
                    found.append((request.row, request.sample, Draw(ids, finished)))
        return _in_order(requests, gather_object(found))


def _in_order(requests: Sequence[Request], found: Sequence[tuple[int, int, Draw]]) -> list[Draw]:
    draws = {(row, sample): draw for row, sample, draw in found}
    return [draws[request.row, request.sample] for request in requests]


@contextlib.contextmanager
def _evaluation_mode(model: torch.nn.Module):
    """The model out of training mode, and back in it if it was."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


@contextlib.contextmanager
def _set_aside(target, values: dict):
    """Attributes of `target` at other values, for a while."""
    found = {name: getattr(target, name) for name in values}
    for name, value in values.items():
        setattr(target, name, value)
    try:
        yield
    finally:
        for name, value in found.items():
            setattr(target, name, value)
