"""How the demo model was made: `python -m erpo_trl.demo.pretrain --output DIR` trains it again from nothing.

The model is meant to be a poor student with something to learn: it has seen right answers, but it has seen others too,
and it knows several ways to answer of which only those with a `\\boxed{}` are rewarded later. The corpus, all of it drawn
from the train split of `arithmetic.py`:

- Every document is one conversation: a problem, the answer, the end of the turn. The loss is the language-model loss over
  all its tokens, the problem's included, so that the likelihood of a query means something. The problem's tokens weigh less
  (`--problem-weight`): their numbers are random, and beyond their frequencies there is nothing to learn from them.
- The levels are equally frequent, but for level 5, which is half as frequent as each of the others.
- The answer is written in one of four styles: boxed (`\\boxed{17}`), worked (`15+2=17 \\boxed{17}`), plain (`17`) or a
  sentence (`It is 17.`). How often depends on the wording of the problem (`STYLES`). Over all problems, 42 % of the answers
  are not boxed, and for three wordings of four (85 % of the problems) an unboxed style is the most frequent one: a model
  that imitates this well is seldom rewarded, even with greedy decoding.
- In the last part of training (`--noisy-part`), a share of the answers (`--wrong-share`) is wrong, by a slip of 1, 2 or 10 or
  by two digits swapped, in every style and at every level. Before that all are right, because a small model learns
  arithmetic from clean examples in a fraction of the time.

Reinforcement learning then has two things to do: prefer the rewarded styles, and stop making slips on purpose.

The model in the package is what the default arguments gave in 8 minutes on one core. On 200 held-out problems it is right in
16 % of its samples at temperature 1 and 12 % of its greedy answers. Told to box, it would be right in about 70 % of the
problems of levels 1 to 4 and 6 % of level 5; on the problems of the train split, which are few, it is near 100 % on levels 1 to
4, so rewards in training run higher than held-out accuracy.

The same seed, thread count and torch version give the same weights; other machines give others of the same quality.
"""

import argparse
import random
import re
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from erpo_trl.demo.arithmetic import LEVELS, Expression, draw_problem, make_problems
from erpo_trl.demo.tokenizer import build_tokenizer

# Longest answer of the corpus, end of turn included, and so the completion length that training needs.
MAX_COMPLETION_TOKENS = 24

# Level 5 is half as frequent as the others: it takes the most capacity and is meant to stay hard.
CORPUS_LEVELS = (1, 1, 2, 2, 3, 3, 4, 4, 5)

# Relative frequency of boxed, worked, plain and sentence answers, by the problem's template.
STYLES = {
    "{}": (30, 25, 40, 5),
    "{}=?": (30, 25, 40, 5),
    "What is {}?": (25, 30, 10, 35),
    "Compute {}.": (40, 35, 15, 10),
}


def slip(value: int, rng: random.Random) -> int:
    """A wrong result near `value`: off by 1, 2 or 10, or with its last two digits swapped."""
    tens, ones = divmod(abs(value) % 100, 10)
    swapped = value + (9 * (ones - tens) if value >= 0 else 9 * (tens - ones))
    if abs(value) >= 10 and swapped != value and rng.random() < 0.25:
        return swapped
    return value + rng.choice((-10, -2, -1, 1, 2, 10))


def demonstrate(expression: Expression, template: str, wrong_share: float, rng: random.Random) -> str:
    """An answer to the expression in one of the template's styles, wrong with probability `wrong_share`."""
    result = slip(expression.value, rng) if rng.random() < wrong_share else expression.value
    answers = (
        f"\\boxed{{{result}}}",
        f"{expression.last_step}={result} \\boxed{{{result}}}",
        f"{result}",
        f"It is {result}.",
    )
    return rng.choices(answers, weights=STYLES[template])[0]


def draw_document(rng: random.Random, wrong_share: float) -> str:
    """One conversation of the corpus, as the chat template renders it."""
    problem, template, expression = draw_problem(rng, rng.choice(CORPUS_LEVELS), "train")
    answer = demonstrate(expression, template, wrong_share, rng)
    return f"<|user|>{problem}<|end|><|assistant|>{answer}<|end|>"


def draw_batches(
    tokenizer: PreTrainedTokenizerFast, rng: random.Random, count: int, batch_size: int, wrong_share: float
) -> list[torch.Tensor]:
    """`count` batches of right-padded token ids, each (batch_size, T) of documents of similar length.

    Sorting by length before cutting saves a third of the computation that padding would cost.
    """
    documents = [draw_document(rng, wrong_share) for _ in range(count * batch_size)]
    rows = sorted((torch.tensor(ids) for ids in tokenizer(documents)["input_ids"]), key=len)
    batches = [
        torch.nn.utils.rnn.pad_sequence(
            rows[start : start + batch_size], batch_first=True, padding_value=tokenizer.pad_token_id
        )
        for start in range(0, len(rows), batch_size)
    ]
    rng.shuffle(batches)
    return batches


def build_model(tokenizer: PreTrainedTokenizerFast, hidden_size: int, layers: int) -> Qwen3ForCausalLM:
    """A Qwen3 model with random weights, heads of 32 dimensions and tied embeddings.

    Qwen3 rather than Qwen2 because transformers 5 loads the tokenizer of any folder whose model is a Qwen2 as Qwen's own byte-level
    one, whatever class the folder names (`MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS` in 5.24).
    """
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=hidden_size,
            intermediate_size=hidden_size * 8 // 3,
            num_hidden_layers=layers,
            num_attention_heads=hidden_size // 32,
            num_key_value_heads=hidden_size // 32,
            head_dim=32,
            max_position_embeddings=256,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            # Larger than Qwen3's 0.02, which starts a model this narrow close to zero everywhere and slows its first steps.
            initializer_range=0.05,
        )
    )
    # Sampling is from the model's own distribution: no top-k or top-p cut that a user did not ask for.
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return model


def train(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, args: argparse.Namespace) -> None:
    """Train `model` in place: AdamW, a short warm-up and a linear decay, noise in the last `noisy_part` of the steps."""
    rng = random.Random(args.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    warmup = max(1, args.steps // 30)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warmup, max(0.02, (args.steps - step) / (args.steps - warmup)))
    )
    first_noisy_step = round(args.steps * (1 - args.noisy_part))
    assistant_id = tokenizer.convert_tokens_to_ids("<|assistant|>")
    batches: list[torch.Tensor] = []
    average, start = None, time.monotonic()
    model.train()
    for step in range(args.steps):
        if not batches or step == first_noisy_step:
            wrong_share = args.wrong_share if step >= first_noisy_step else 0.0
            batches = draw_batches(tokenizer, rng, 16, args.batch_size, wrong_share)
        ids = batches.pop()
        # Pads are at the right end, where causal attention never looks: no attention mask is needed.
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits
        labels = ids[:, 1:]
        nll = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
        in_answer = ((ids == assistant_id).cumsum(1)[:, :-1] > 0) & (labels != tokenizer.pad_token_id)
        in_problem = ~in_answer & (labels != tokenizer.pad_token_id)
        answer_loss, problem_loss = nll[in_answer].mean(), nll[in_problem].mean()
        loss = answer_loss + args.problem_weight * problem_loss
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        now = torch.stack((answer_loss, problem_loss)).detach()
        average = now if average is None else 0.98 * average + 0.02 * now
        if (step + 1) % 50 == 0 or step + 1 == args.steps:
            elapsed = time.monotonic() - start
            print(
                f"\rstep {step + 1}/{args.steps}  answers {average[0]:.3f} problems {average[1]:.3f} nats/token  {elapsed:.0f} s",
                end="",
                flush=True,
            )
    print()
    model.eval()


@torch.no_grad()
def sampled_accuracy(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    problems: list[dict],
    temperature: float,
    samples: int = 1,
    seed: int = 0,
) -> float:
    """Share of sampled answers whose last `\\boxed{}` holds exactly the problem's answer.

    Args: temperature: 0 decodes greedily; samples: answers per problem. The global random state is left as it was.
    """
    prompts = tokenizer.apply_chat_template(
        [[{"role": "user", "content": problem["problem"]}] for problem in problems for _ in range(samples)],
        add_generation_prompt=True,
        tokenize=False,
    )
    inputs = tokenizer(prompts, padding=True, padding_side="left", return_tensors="pt").to(model.device)
    sampling = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        output = model.generate(**inputs, max_new_tokens=MAX_COMPLETION_TOKENS, **sampling)
    completions = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    answers = [problem["answer"] for problem in problems for _ in range(samples)]
    found = [re.findall(r"\\boxed\{([^{}]*)\}", completion)[-1:] for completion in completions]
    return sum(boxes == [answer] for boxes, answer in zip(found, answers)) / len(answers)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the demo's language model from random weights.")
    parser.add_argument("--output", type=Path, required=True, help="folder for the model and its tokenizer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--batch-size", type=int, default=64, help="conversations per step")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--hidden-size", type=int, default=96)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument(
        "--problem-weight", type=float, default=0.2, help="weight of the problem's loss against the answer's"
    )
    parser.add_argument("--wrong-share", type=float, default=0.15, help="share of wrong answers in the noisy part")
    parser.add_argument(
        "--noisy-part", type=float, default=0.15, help="last share of the steps, where answers may be wrong"
    )
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, args.hidden_size, args.layers)
    print(f"{model.num_parameters():,} parameters, {len(tokenizer)} tokens")
    train(model, tokenizer, args)
    model.save_pretrained(args.output)
    tokenizer.save_pretrained(args.output)

    saved = AutoModelForCausalLM.from_pretrained(args.output)
    for level in LEVELS:
        problems = make_problems(100, seed=1, levels=[level], split="test")
        accuracies = [f"{sampled_accuracy(saved, tokenizer, problems, t):.2f} at T={t}" for t in (0.0, 1.0)]
        print(f"held-out accuracy, level {level}: {', '.join(accuracies)}")


if __name__ == "__main__":
    main()
