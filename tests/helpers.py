"""Tiny models, a byte tokenizer and instruments for the tests: everything is built in code, nothing is downloaded.

The instruments (`count_forwards`, `Recorder`, `step_gradient`) know only TRL's public behaviour and design formulas,
never the package's internals, so that a test compares two independent computations.
"""

import contextlib
import copy
import logging
import zlib
from dataclasses import dataclass, field
from datetime import datetime

import torch
from accelerate.utils import gather_object
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    TrainerCallback,
)
from transformers.utils import chat_template_utils
from transformers.utils import logging as transformers_logging
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

SPECIALS = ["<pad>", "<s>", "</s>", "<unk>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"]
PAD, BOS, EOS = 0, 1, 2
VOCAB = len(SPECIALS) + 256
# A random model ends a completion after a few tokens only if many ids end it; TRL honours every eos id of the model.
EAGER_EOS = [EOS, *range(8, VOCAB, 6)]

TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
# Gemma's habit: a system turn is an error.
TEMPLATE_WITHOUT_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}" + TEMPLATE
)


# --------------------------------------------------------------------------------------------------- tokenizer, models
def byte_tokenizer(pad_is_eos: bool = False, bos: bool = False, template: str = TEMPLATE) -> PreTrainedTokenizerFast:
    """Byte-level tokenizer: one token per UTF-8 byte. `bos`: post-processor and template both write `<s>`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*SPECIALS, *alphabet])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    if bos:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
        template = "{{ bos_token }}" + template
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="</s>" if pad_is_eos else "<pad>",
        unk_token="<unk>",
        additional_special_tokens=[t for t in SPECIALS if t.startswith("<|")],
        padding_side="left",
    )
    tokenizer.chat_template = template
    return tokenizer


_COMMON = {"vocab_size": VOCAB, "pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS}
# A large init makes the distributions far from uniform: soft-capping, scales and temperatures then show in the values.
_TRUNK = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}


def tiny_model(kind: str = "qwen2", seed: int = 0, dtype: torch.dtype = torch.float32, **overrides):
    """A two-layer causal language model of the named family with fixed random weights."""
    configs = {
        "llama": lambda: (
            LlamaForCausalLM,
            LlamaConfig(**_COMMON, **_TRUNK | {"tie_word_embeddings": False, **overrides}),
        ),
        "llama_tied": lambda: (
            LlamaForCausalLM,
            LlamaConfig(**_COMMON, **_TRUNK | {"tie_word_embeddings": True, **overrides}),
        ),
        "qwen2": lambda: (
            Qwen2ForCausalLM,
            Qwen2Config(**_COMMON, **_TRUNK | {"tie_word_embeddings": True, **overrides}),
        ),
        "gemma2": lambda: (
            Gemma2ForCausalLM,
            Gemma2Config(
                **_COMMON,
                **_TRUNK
                | {"head_dim": 8, "final_logit_softcapping": 3.0, "attn_logit_softcapping": 5.0, "sliding_window": 64}
                | overrides,
            ),
        ),
        "cohere": lambda: (CohereForCausalLM, CohereConfig(**_COMMON, **_TRUNK | {"logit_scale": 0.25} | overrides)),
        "gpt2": lambda: (
            GPT2LMHeadModel,
            GPT2Config(
                **_COMMON,
                **{"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256, "initializer_range": 0.2}
                | {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
                | overrides,
            ),
        ),
        "qwen2_moe": lambda: (
            Qwen2MoeForCausalLM,
            Qwen2MoeConfig(
                **_COMMON,
                **_TRUNK
                | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 1}
                | {"shared_expert_intermediate_size": 16, "router_aux_loss_coef": 0.001}
                | overrides,
            ),
        ),
    }
    torch_state = torch.get_rng_state()
    torch.manual_seed(seed)
    model_class, config = configs[kind]()
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"  # the grouped kernel has no float64
    model = model_class(config).to(dtype)
    torch.set_rng_state(torch_state)
    model.generation_config.eos_token_id = list(EAGER_EOS)
    return model


def lora_config(**overrides) -> LoraConfig:
    return LoraConfig(
        **{"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"} | overrides
    )


def lora_model(pretrained: bool, kind: str = "llama", seed: int = 0):
    """A model wrapped in LoRA; `pretrained`: lora_B is random, so the adapter already changes the policy."""
    torch.manual_seed(seed)
    model = get_peft_model(tiny_model(kind, seed=seed), lora_config())
    if pretrained:
        generator = torch.Generator().manual_seed(seed + 1)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)
    return model


@contextlib.contextmanager
def captured_warnings(caplog):
    """What the package warns of, in `caplog`; transformers' loggers keep to themselves."""
    transformers_logging.enable_propagation()
    try:
        with caplog.at_level(logging.WARNING):
            yield
    finally:
        transformers_logging.disable_propagation()


# --------------------------------------------------------------------------------------------------------- data, runs
LAYOUTS = [(1, 1), (4, 4), (2, 4), (4, 2), (3, 2)]  # (gradient accumulation, steps per generation)
UNEQUAL = ["2+2=", "what is 17+5?", "1*1=", "compute 9-4 please", "7+7", "sum of 3 and 8:", "6/2=", "10-3-2 is"]
EQUAL = ["11+11=", "12+13=", "91-14=", "25*31=", "70/10=", "64-46=", "35+53=", "88-81="]


def prompts_dataset(prompts=UNEQUAL, **columns) -> Dataset:
    return Dataset.from_dict({"prompt": list(prompts), **columns})


def chat(text: str, system: str | None = None) -> list[dict]:
    turns = [{"role": "system", "content": system}] if system else []
    return [*turns, {"role": "user", "content": text}]


def checksum_reward(completion_ids, **kwargs):
    """A deterministic reward in [0, 1) that differs between completions."""
    return [zlib.crc32(bytes(str(list(ids)), "ascii")) % 1009 / 1009 for ids in completion_ids]


def constant_reward(completion_ids, **kwargs):
    """All advantages are 0: what remains of the loss is not the policy term."""
    return [1.0] * len(completion_ids)


def fixed_rollouts(lengths=(3, 5, 2, 4), prompt_ids_of=None):
    """A `rollout_func` whose k-th completion of a prompt depends on (prompt ids, k) only, not on weights or RNG.

    k counts the earlier rows of the prompt over all ranks, so a group that straddles two ranks has the completions it has
    on one.
    """

    def rollout(prompts, trainer):
        ids = (prompt_ids_of or prompt_token_ids)(prompts, trainer)
        everywhere = gather_object([tuple(row) for row in ids])
        start = trainer.accelerator.process_index * len(ids)
        seen, completions = {}, []
        for i, row in enumerate(everywhere):
            k = seen[row] = seen.get(row, -1) + 1
            if start <= i < start + len(ids):
                completions.append(fixed_completion(row, k, lengths))
        return {"prompt_ids": ids, "completion_ids": completions, "logprobs": [[-1.0] * len(c) for c in completions]}

    return rollout


def fixed_completion(prompt_ids, k: int, lengths=(3, 5, 2, 4)) -> list[int]:
    seed = zlib.crc32(bytes(str((list(prompt_ids), k)), "ascii"))
    generator = torch.Generator().manual_seed(seed)
    length = lengths[seed % len(lengths)]
    return [*torch.randint(9, VOCAB, (length - 1,), generator=generator).tolist(), EOS]


def prompt_token_ids(prompts, trainer) -> list[list[int]]:
    """The ids TRL itself would give the model for these prompts; prompts that are ids already come back."""
    if isinstance(prompts[0][0], int):
        return prompts
    return trainer._tokenize_prompts(prompts)[0]


def set_day(monkeypatch, day: int, module: str) -> None:
    """That day of December 2031, for chat templates and for the `datetime` of one of the package's modules."""

    class Clock(datetime):
        @classmethod
        def now(cls, tz=None):
            return datetime(2031, 12, day)

    monkeypatch.setattr(chat_template_utils, "datetime", Clock)
    monkeypatch.setattr(f"{module}.datetime", Clock)


def make_config(tmp_path, cls=None, **overrides):
    """Quick, exact settings: CPU float32, plain SGD without clipping, every step logged, caches below tmp_path."""
    from erpo_trl import ERPOConfig

    cls = cls or ERPOConfig
    rloo = issubclass(cls, RLOOConfig)
    settings = {
        "output_dir": str(tmp_path / "run"),
        "use_cpu": True,
        "bf16": False,
        "report_to": "none",
        "disable_tqdm": True,
        "gradient_checkpointing": False,
        "optim": "sgd",
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "logging_steps": 1,
        "save_strategy": "no",
        "per_device_train_batch_size": 4,
        "num_generations": 2,
        "max_completion_length": 6,
        "max_steps": 1,
        **({} if rloo else {"loss_type": "grpo"}),
        "seed": 3,
    }
    if cls not in (GRPOConfig, RLOOConfig):
        settings["reference_cache_dir"] = str(tmp_path / "reference")
    return cls(**settings | overrides)


def make_trainer(
    tmp_path,
    model=None,
    cls=None,
    dataset=None,
    tokenizer=None,
    reward=checksum_reward,
    rollout=None,
    callbacks=None,
    args=None,
    trainer_kwargs=None,
    **overrides,
):
    """An ERPOTrainer (or `cls`) with `make_config` settings; `overrides` are config fields."""
    from erpo_trl import ERPORLOOConfig, ERPORLOOTrainer, ERPOTrainer

    cls = cls or ERPOTrainer
    config_class = {GRPOTrainer: GRPOConfig, RLOOTrainer: RLOOConfig, ERPORLOOTrainer: ERPORLOOConfig}.get(cls)
    rloo = issubclass(cls, RLOOTrainer)
    if not rloo:
        trainer_kwargs = {"rollout_func": rollout} | (trainer_kwargs or {})
    if model is None or isinstance(model, str):
        model = tiny_model(model or "qwen2")
    trainer = cls(
        model=model,
        reward_funcs=reward,
        args=args or make_config(tmp_path, config_class, **overrides),
        train_dataset=prompts_dataset() if dataset is None else dataset,
        processing_class=tokenizer or byte_tokenizer(),
        callbacks=callbacks,
        **(trainer_kwargs or {}),
    )
    if rloo and rollout is not None:
        # RLOO takes no rollout_func; where it generates, prompts are token ids
        trainer._generate_single_turn = lambda ids, *more: rollout(ids, trainer)["completion_ids"]
    return trainer


QUICK_RECIPE = """
model_name_or_path: demo
dataset: arithmetic
max_rows: 8
max_steps: 1
per_device_train_batch_size: 4
num_generations: 2
max_completion_length: 4
learning_rate: 1e-3
query_kl_coef: 1e-3
bf16: false
use_cpu: true
gradient_checkpointing: false
report_to: none
logging_steps: 1
"""


def write_recipe(tmp_path, more: str = ""):
    """A recipe of one quick step of the demo model, its outputs and tables below tmp_path; `more`: further lines."""
    path = tmp_path / "recipe.yaml"
    folders = f"output_dir: {tmp_path / 'out'}\nreference_cache_dir: {tmp_path / 'reference'}\n"
    path.write_text(QUICK_RECIPE + more + folders)
    return path


def shift_reference(data: Dataset, shift) -> Dataset:
    """A mapped data set whose reference is moved by `shift` nats (or `shift(row index)`) on every scored token."""
    of = shift if callable(shift) else lambda i: shift
    columns = {
        "ref_query_logps": [[value + of(i) for value in row] for i, row in enumerate(data["ref_query_logps"])],
        "ref_query_nll": [
            nll - of(i) * len(row) for i, (nll, row) in enumerate(zip(data["ref_query_nll"], data["ref_query_logps"]))
        ],
    }
    for name, values in columns.items():
        feature = data.features[name]
        data = data.remove_columns(name).add_column(name, values, feature=feature)
    return data


def logged(trainer, key: str) -> list[float]:
    return [entry[key] for entry in trainer.state.log_history if key in entry]


# --------------------------------------------------------------------------------------------------------- instruments
@contextlib.contextmanager
def count_forwards(model):
    """Counts calls of the transformer trunk, whoever makes them and by whichever entry."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    counter = Counter()

    def hook(module, args, kwargs):
        counter.calls += 1

    handle = base.base_model.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield counter
    finally:
        handle.remove()


def out_of_memory_above(model, tokens: int):
    """Forwards of more than so many tokens fail as they do on a full GPU. Returns the sizes that were tried."""
    tried = []

    def refuse(module, args, kwargs):
        tried.append(kwargs["input_ids"].numel())
        if tried[-1] > tokens:
            raise torch.OutOfMemoryError(f"no room for {tried[-1]} tokens")

    model.base_model.register_forward_pre_hook(refuse, with_kwargs=True)
    return tried


@dataclass
class Counter:
    calls: int = 0


@dataclass
class Step:
    """One optimizer step as seen from outside: its micro-batches, their losses and the gradient it applied."""

    batches: list[dict] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    forwards: list[int] = field(default_factory=list)
    prompt_labels: list[torch.Tensor] = field(default_factory=list)  # (B, P) bool: labelled prompt positions
    grads: dict[str, torch.Tensor] = field(default_factory=dict)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)  # parameters before the step


class Recorder(TrainerCallback):
    """Follows a trainer: `steps` holds one `Step` per optimizer step. Pass the trainer to `attach` before `train()`.

    TRL's generation output gets one more column, the advantage before any query weight; it travels with its row.
    """

    def __init__(self):
        self.steps: list[Step] = [Step()]

    def attach(self, trainer, keep_weights: bool = False):
        self.trainer = trainer
        self.keep_weights = keep_weights
        trainer.add_callback(self)
        model = trainer.accelerator.unwrap_model(trainer.model)
        self.base = model.get_base_model() if hasattr(model, "get_base_model") else model
        self._wrap_compute_loss(trainer)
        self._wrap_forward()
        return self

    def _wrap_compute_loss(self, trainer):
        inner = trainer.compute_loss

        def compute_loss(model, inputs, *args, **kwargs):
            if not trainer.model.training:
                return inner(model, inputs, *args, **kwargs)
            step = self.steps[-1]
            step.batches.append({k: v.clone() if torch.is_tensor(v) else v for k, v in inputs.items()})
            if self.keep_weights and not step.weights:
                step.weights = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
            # Preference rows hold prompt and completion in one
            self.prompt_width = inputs["prompt_ids" if "prompt_ids" in inputs else "input_ids"].size(1)
            with count_forwards(trainer.model) as counter:
                loss = inner(model, inputs, *args, **kwargs)
            step.forwards.append(counter.calls)
            step.losses.append(loss.item())
            self.prompt_width = None
            return loss

        trainer.compute_loss = compute_loss

    def _wrap_forward(self):
        self.prompt_width = None
        inner = self.base.forward

        def forward(*args, **kwargs):
            if self.prompt_width is not None and kwargs.get("fused_lm_head"):
                self.steps[-1].prompt_labels.append(kwargs["labels"][:, : self.prompt_width] != -100)
            return inner(*args, **kwargs)

        self.base.forward = forward

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.steps[-1].grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        self.steps.append(Step())

    @property
    def done(self) -> list[Step]:
        return [step for step in self.steps if step.grads]


def keep_raw_advantages(monkeypatch):
    """Adds the column `raw_advantages` to what TRL's own generation returns, before ERPO sees it."""

    def keeping(inner):
        def generate(self, inputs):
            output = inner(self, inputs)
            output["raw_advantages"] = output["advantages"].clone()
            return output

        return generate

    for cls in (GRPOTrainer, RLOOTrainer):
        monkeypatch.setattr(cls, "_generate_and_score_completions", keeping(cls._generate_and_score_completions))


# -------------------------------------------------------------------------- the formulas, once more and independently
def rows_of(batch: dict) -> list[dict]:
    """Unpadded rows of a micro-batch."""
    rows = []
    for i in range(batch["prompt_ids"].size(0)):
        row = {
            "prompt": batch["prompt_ids"][i][batch["prompt_mask"][i].bool()].tolist(),
            "completion": batch["completion_ids"][i][batch["completion_mask"][i].bool()].tolist(),
            "advantage": batch["raw_advantages"][i].item(),
        }
        if "old_per_token_logps" in batch:
            old = batch["old_per_token_logps"][i]
            row["old"] = old[: len(row["completion"])].double()
        rows.append(row)
    return rows


def token_logps(model, ids: list[int], temperature: float = 1.0) -> torch.Tensor:
    """(T-1,) log P(x_t given x_<t) of one unpadded sequence from plain logits."""
    ids = torch.tensor([ids])
    logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0, :-1] / temperature
    return logits.log_softmax(-1).gather(-1, ids[0, 1:, None]).squeeze(-1)


def double_copy(kind_or_model, weights: dict[str, torch.Tensor] | None = None):
    """A float64 copy of a model without TRL's patched forward, optionally with other weights."""
    model = copy.deepcopy(kind_or_model)
    for module in model.modules():
        module.__dict__.pop("forward", None)
    if weights is not None:
        model.load_state_dict(weights, strict=False)
        model.tie_weights()
    return model.double().eval()


def k_estimator(x: torch.Tensor, kind: str) -> torch.Tensor:
    return {"k1": -x, "k2": x**2 / 2, "k3": x.exp() - x - 1}[kind]


def penalty_of(model, queries, reference, alpha, temperature=1.0, estimator="k3", level="token", normalize=False):
    """alpha times the mean estimate over distinct queries. `reference`: query ids -> (T-1,) log-probs."""
    values = []
    for query in queries:
        x = reference[query].double() - token_logps(model, list(query), temperature)
        if level == "sequence":
            x = x.sum() / (len(x) if normalize else 1)
            values.append(k_estimator(x, estimator))
        else:
            values.append(k_estimator(x, estimator).mean())
    return alpha * torch.stack(values).mean()


def policy_loss(
    model, batches, weight_of, temperature, loss_type, max_completion_length=6, epsilon=0.2, dapo_tokens=None
):
    """TRL's clipped surrogate of a whole step with every advantage times its query's weight.

    `batches`: list of micro-batches (lists of rows). `dapo_tokens`: tokens that the step's dapo normaliser counts.
    """
    total, micro = 0.0, len(batches)
    for rows in batches:
        sums, counts = [], []
        for row in rows:
            logps = token_logps(model, row["prompt"] + row["completion"], temperature)[len(row["prompt"]) - 1 :]
            old = row.get("old", logps.detach())
            ratio = (logps - old).exp()
            advantage = row["advantage"] * weight_of(tuple(row["prompt"]))
            loss = -torch.minimum(ratio * advantage, ratio.clamp(1 - epsilon, 1 + epsilon) * advantage)
            sums.append(loss.sum())
            counts.append(len(row["completion"]))
        if loss_type == "grpo":
            total = total + sum(s / c for s, c in zip(sums, counts)) / len(rows) / micro
        elif loss_type == "bnpo":
            total = total + sum(sums) / sum(counts) / micro
        elif loss_type == "dr_grpo":
            total = total + sum(sums) / (len(rows) * max_completion_length) / micro
        elif loss_type == "dapo":
            total = total + sum(sums) / dapo_tokens
        else:
            raise ValueError(loss_type)
    return total


def distinct_queries(batches) -> list[tuple[int, ...]]:
    return list(dict.fromkeys(tuple(row["prompt"]) for rows in batches for row in rows))


def prompt_ids(tokenizer, prompts):
    return [tuple(tokenizer(p)["input_ids"]) for p in prompts]


def reference_of(model, queries, temperature=1.0):
    """Query -> (T-1,) reference log-probs from plain float64 logits of the untouched model."""
    reference = double_copy(model)
    with torch.no_grad():
        return {query: token_logps(reference, list(query), temperature) for query in queries}


def weights_of(reference, dataset_queries, clip=(0.0, 2.0)):
    """Query -> clip(mean NLL / NLL); the mean runs over the rows of the data set."""
    nll = {query: -logps.sum().item() for query, logps in reference.items()}
    mean = sum(nll[query] for query in dataset_queries) / len(dataset_queries)
    return {query: min(max(mean / value, clip[0]), clip[1]) for query, value in nll.items()}


def assert_grads_close(found: dict, expected_model, rel: float = 1e-4):
    """Largest deviation of any parameter's gradient, relative to the largest entry of the whole gradient."""
    expected = {n: p.grad for n, p in expected_model.named_parameters() if p.grad is not None}
    assert set(found) == set(expected)
    scale = max(g.abs().max().item() for g in expected.values())
    assert scale > 1e-6, "the expected gradient vanishes: the test would prove nothing"
    worst = max((found[n].double() - expected[n]).abs().max().item() for n in expected)
    assert worst <= rel * scale, f"largest deviation {worst:.3e} at gradient scale {scale:.3e}"


def assert_same_run(ours, theirs):
    """Two runs of four steps, bit for bit; `theirs.initial_weights` says where they began."""
    logs = [[entry for entry in t.state.log_history if "loss" in entry] for t in (ours, theirs)]
    assert len(logs[0]) == len(logs[1]) == 4
    for mine, other in zip(*logs):
        for key, value in other.items():
            if key != "step_time":
                assert mine[key] == value, key
    expected = theirs.model.state_dict()
    for name, value in ours.model.state_dict().items():
        assert torch.equal(value, expected[name]), name
    initial = theirs.initial_weights
    moved = any(not torch.equal(expected[name], initial[name]) for name in expected)
    assert moved, "nothing was trained: the comparison would be empty"
