"""The embedded demo: its problems, its tokenizer, and the model that was trained on them."""

import ast
import operator
import random
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import erpo_trl.demo
from erpo_trl.demo.arithmetic import LEVELS, TEMPLATES, draw_problem, make_problems, split_of
from erpo_trl.demo.pretrain import (
    MAX_COMPLETION_TOKENS,
    STYLES,
    build_model,
    demonstrate,
    draw_batches,
    draw_document,
    sampled_accuracy,
    slip,
)
from erpo_trl.demo.tokenizer import CHARACTERS, build_tokenizer

MODEL_DIR = Path(erpo_trl.demo.__file__).parent / "model"
# The share of boxed answers that `pretrain.py` documents.
BOXED_SHARE = 0.58
HELD_OUT = [
    {"problem": "38+42+16=?", "answer": "96", "level": 5},
    {"problem": "9+1", "answer": "10", "level": 1},
    {"problem": "16-2=?", "answer": "14", "level": 2},
    {"problem": "Compute 9+1+7.", "answer": "17", "level": 3},
    {"problem": "What is 8-5*2?", "answer": "-2", "level": 4},
]
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


def expression_in(problem: str) -> str:
    (expression,) = re.findall(r"\d+(?:[+\-*]\d+)+", problem)
    return expression


def evaluate(expression: str) -> int:
    """The value by Python's own grammar, which knows nothing of how the problem was built. A leading minus is allowed."""

    def walk(node):
        if isinstance(node, ast.BinOp):
            return OPERATORS[type(node.op)](walk(node.left), walk(node.right))
        if isinstance(node, ast.UnaryOp):
            return -walk(node.operand)
        return node.value

    return walk(ast.parse(expression, mode="eval").body)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(MODEL_DIR)


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(MODEL_DIR)


class TestProblems:
    def test_same_arguments_give_the_same_list(self):
        assert make_problems(200, seed=3) == make_problems(200, seed=3)
        assert make_problems(200, seed=3) != make_problems(200, seed=4)

    def test_held_out_set_stays_what_it_was(self):
        # Published accuracies refer to these problems: a change of the generator must be seen.
        assert make_problems(5, seed=1, split="test") == HELD_OUT

    @pytest.mark.parametrize("split", ["train", "test"])
    def test_answers_are_right(self, split):
        for row in make_problems(1000, seed=0, split=split):
            assert row["answer"] == str(evaluate(expression_in(row["problem"]))), row

    def test_splits_share_no_expression_whatever_the_seed_and_wording(self):
        train = {expression_in(row["problem"]) for seed in range(3) for row in make_problems(2000, seed)}
        test = {expression_in(row["problem"]) for seed in range(3) for row in make_problems(500, seed, split="test")}
        assert len(test) > 500 and not train & test

    def test_levels_come_in_equal_parts_and_only_those_asked_for(self):
        assert sorted(row["level"] for row in make_problems(50, seed=0)) == sorted(LEVELS * 10)
        assert {row["level"] for row in make_problems(20, seed=0, levels=[2, 4])} == {2, 4}

    def test_texts_are_distinct_until_a_level_has_no_more(self):
        texts = [row["problem"] for row in make_problems(500, seed=1, split="test")]
        assert len(set(texts)) == len(texts)
        every_easy_test_problem = {
            template.format(f"{a}{sign}{b}")
            for a in range(10)
            for b in range(10)
            for sign in "+-"
            for template in TEMPLATES
            if split_of(f"{a}{sign}{b}") == "test"
        }
        texts = [
            row["problem"] for row in make_problems(2 * len(every_easy_test_problem), 0, levels=[1], split="test")
        ]
        assert set(texts) == every_easy_test_problem

    def test_unknown_split_and_level_are_named(self):
        with pytest.raises(ValueError, match="split is 'dev', expected one of"):
            make_problems(1, seed=0, split="dev")
        with pytest.raises(ValueError, match="level is 6, expected one of"):
            make_problems(1, seed=0, levels=[6])


class TestTokenizer:
    def test_saved_tokenizer_is_the_one_in_code(self, tokenizer):
        built = build_tokenizer()
        assert tokenizer.get_vocab() == built.get_vocab()
        assert tokenizer.chat_template == built.chat_template
        assert tokenizer.eos_token == "<|end|>" and tokenizer.pad_token == "<|pad|>"

    def test_every_problem_and_character_round_trips(self, tokenizer):
        texts = [row["problem"] for split in ("train", "test") for row in make_problems(500, seed=0, split=split)]
        texts += ["".join(CHARACTERS), "two  spaces , and a \n line", "\\boxed{-12}"]
        for text in texts:
            ids = tokenizer(text)["input_ids"]
            assert tokenizer.decode(ids) == text
            assert len(ids) == len(text) and tokenizer.unk_token_id not in ids

    def test_a_character_outside_the_vocabulary_is_one_unknown_token(self, tokenizer):
        assert tokenizer("3é")["input_ids"][1:] == [tokenizer.unk_token_id]

    def test_template_ids_are_those_of_the_rendered_text(self, tokenizer):
        messages = [{"role": "system", "content": "Add."}, {"role": "user", "content": "3+4"}]
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        assert text == "<|system|>Add.<|end|><|user|>3+4<|end|><|assistant|>"
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        # Added special tokens would show up here: the tokenizer must put none around a text that has its own.
        assert ids == tokenizer(text)["input_ids"] == tokenizer(text, add_special_tokens=False)["input_ids"]
        assert len(ids) == len("Add.") + len("3+4") + 5

    def test_an_answered_conversation_extends_its_prompt(self, tokenizer):
        prompt = [{"role": "user", "content": "3+4"}]
        start = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
        whole = tokenizer.apply_chat_template([*prompt, {"role": "assistant", "content": "7"}], tokenize=False)
        assert whole == start + "7<|end|>"

    def test_assistant_mask_covers_the_answer_and_its_end(self, tokenizer):
        messages = [{"role": "user", "content": "3+4"}, {"role": "assistant", "content": "7"}]
        encoded = tokenizer.apply_chat_template(messages, return_assistant_tokens_mask=True, return_dict=True)
        assert encoded["assistant_masks"] == [0] * 6 + [1, 1]

    def test_unknown_role_is_named(self, tokenizer):
        with pytest.raises(Exception, match="role is 'tool', expected system, user or assistant"):
            tokenizer.apply_chat_template([{"role": "tool", "content": "7"}], tokenize=False)


class TestCorpus:
    def test_documents_are_rendered_as_the_template_does(self, tokenizer):
        for seed in range(50):
            document = draw_document(random.Random(seed), wrong_share=0.15)
            problem, answer = re.fullmatch(r"<\|user\|>(.*)<\|end\|><\|assistant\|>(.*)<\|end\|>", document).groups()
            messages = [{"role": "user", "content": problem}, {"role": "assistant", "content": answer}]
            assert document == tokenizer.apply_chat_template(messages, tokenize=False)
            assert split_of(expression_in(problem)) == "train"

    def test_right_answers_are_right_and_worked_ones_hold(self):
        rng = random.Random(0)
        for level in LEVELS * 100:
            _, template, expression = draw_problem(rng, level, "train")
            answer = demonstrate(expression, template, 0.0, rng)
            assert str(expression.value) in answer
            if "=" in answer:
                left, right = answer.split(" ")[0].split("=")
                assert evaluate(left) == int(right) == expression.value

    def test_wrong_share_and_boxed_share_are_as_documented(self):
        rng = random.Random(0)
        wrong = boxed = 0
        for _ in range(4000):
            _, template, expression = draw_problem(rng, rng.choice(LEVELS), "train")
            answer = demonstrate(expression, template, 0.15, rng)
            wrong += int(re.findall(r"-?\d+", answer.replace("-", " -"))[-1]) != expression.value
            boxed += "\\boxed" in answer
        assert wrong / 4000 == pytest.approx(0.15, abs=0.02)
        weights = {template: sum(STYLES[template][:2]) / sum(STYLES[template]) for template in TEMPLATES}
        share = sum(TEMPLATES[template] * weights[template] for template in TEMPLATES) / sum(TEMPLATES.values())
        assert share == pytest.approx(BOXED_SHARE, abs=0.005)
        assert boxed / 4000 == pytest.approx(share, abs=0.03)

    @pytest.mark.parametrize("value", [0, 7, -7, 11, 12, -12, 40, 100, 345])
    def test_a_slip_is_never_the_value(self, value):
        rng = random.Random(0)
        assert value not in {slip(value, rng) for _ in range(200)}

    def test_batches_are_right_padded_and_fit_the_completion_length(self, tokenizer):
        for batch in draw_batches(tokenizer, random.Random(0), count=4, batch_size=32, wrong_share=0.15):
            assert batch.shape[0] == 32
            answer = (batch == tokenizer.convert_tokens_to_ids("<|assistant|>")).int().argmax(1)
            length = (batch != tokenizer.pad_token_id).sum(1)
            assert (length - answer - 1).max() <= MAX_COMPLETION_TOKENS
            last = batch.gather(1, length[:, None] - 1)
            assert (last == tokenizer.eos_token_id).all()


class TestModel:
    def test_it_is_small(self, model):
        assert sum(parameter.numel() for parameter in model.parameters()) <= 1_000_000
        assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
        assert sum(path.stat().st_size for path in MODEL_DIR.iterdir()) < 4 * 2**20

    def test_it_is_what_the_script_builds(self, model, tokenizer):
        built = build_model(tokenizer, model.config.hidden_size, model.config.num_hidden_layers)
        shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        assert shapes == {name: parameter.shape for name, parameter in built.named_parameters()}

    def test_generation_stops_at_the_end_of_a_turn_and_samples_the_full_distribution(self, model, tokenizer):
        generation = model.generation_config
        assert generation.eos_token_id == model.config.eos_token_id == tokenizer.eos_token_id
        assert generation.pad_token_id == tokenizer.pad_token_id != tokenizer.eos_token_id
        assert (generation.do_sample, generation.top_k, generation.top_p) == (True, 0, 1.0)

    def test_it_answers_rarely_but_not_never(self, model, tokenizer):
        problems = make_problems(100, seed=1, split="test")
        assert 0.10 < sampled_accuracy(model, tokenizer, problems, temperature=1.0, samples=2) < 0.45

    def test_evaluation_leaves_the_random_state_alone(self, model, tokenizer):
        torch.manual_seed(5)
        expected = torch.rand(3)
        torch.manual_seed(5)
        sampled_accuracy(model, tokenizer, make_problems(2, seed=1, split="test"), temperature=1.0)
        assert torch.equal(torch.rand(3), expected)

    @torch.no_grad()
    def test_queries_differ_in_likelihood_and_are_likelier_than_noise(self, model, tokenizer):
        def nll(problem: str) -> float:
            """Negative log-likelihood of the whole prompt after its first token, in nats."""
            messages = [{"role": "user", "content": problem}]
            ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")["input_ids"]
            logps = model(input_ids=ids).logits[0, :-1].log_softmax(-1)
            return -logps.gather(1, ids[0, 1:, None]).sum().item()

        nlls = torch.tensor([nll(row["problem"]) for row in make_problems(30, seed=1, split="test")])
        assert nlls.std() / nlls.mean() > 0.1
        assert nll("What is 3+4?") < nll("?4+3 si tahW") / 3
