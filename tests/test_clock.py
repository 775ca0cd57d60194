"""Chat templates that write the date: one date for a whole run, since prompts are scored once and rendered at every generation."""

from datetime import datetime
from pathlib import Path

import pytest
import trl
from helpers import TEMPLATE, byte_tokenizer, captured_warnings, chat, make_trainer, prompts_dataset, set_day
from transformers import TrainerCallback

from erpo_trl import ERPORLOOTrainer
from erpo_trl.query.clock import asks_for_the_time, at

# As Llama 3.2's template does it
DATED = (
    "{%- if not date_string is defined %}{%- if strftime_now is defined %}{%- set date_string = strftime_now('%d %b %Y') %}"
    "{%- endif %}{%- endif %}"
    "{{ 'Today is ' + date_string }}" + TEMPLATE
)
CHATS = [chat(text) for text in ("ab", "cde", "fghi", "jkl")] * 2
NOON = datetime(2026, 3, 7, 12)


@pytest.mark.parametrize(
    "template, told",
    [
        ("{{ strftime_now('%Y-%m-%d') }}", "{{ '2026-03-07' }}"),
        ('{{ strftime_now( "%d %b %Y" ) + x }}', "{{ '07 Mar 2026' + x }}"),
        (
            "{% if strftime_now is defined %}{{ strftime_now('%Y') }}{% endif %}",
            "{% if true %}{{ '2026' }}{% endif %}",
        ),
        ("{% if strftime_now is not defined %}x{% endif %}", "{% if false %}x{% endif %}"),
        ("{{ strftime_now(format) }}", None),
        ("{{ x }}", "{{ x }}"),
    ],
)
def test_the_time_in_place_of_its_calls(template, told):
    assert at(template, NOON) == told
    assert asks_for_the_time(template) is ("strftime" in template)


@pytest.mark.parametrize("name", ["llama3_2", "gptoss", "gptoss_training"])
def test_templates_of_known_models(name):
    template = (Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja").read_text()
    told = at(template, NOON)
    assert asks_for_the_time(template) and ("2026" in told and "07" in told)


class Midnight(TrainerCallback):
    """transformers' clock goes on to another day after the second step."""

    def __init__(self, monkeypatch):
        self.monkeypatch = monkeypatch

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 2:
            set_day(self.monkeypatch, 30, "erpo_trl.query.preparation")


def build(tmp_path, cls=None, **fields):
    settings = {"max_steps": 4, "save_strategy": "steps", "save_steps": 3} | fields
    tokenizer = byte_tokenizer(template=DATED)
    return make_trainer(
        tmp_path, model="llama", cls=cls, dataset=prompts_dataset(CHATS), tokenizer=tokenizer, **settings
    )


def test_a_run_past_midnight_and_its_resume(tmp_path, monkeypatch):
    """Its prompts hold the date of its beginning throughout, and so do those of the run that goes on the day after."""
    set_day(monkeypatch, 29, "erpo_trl.query.preparation")
    trainer = build(tmp_path)
    trainer.add_callback(Midnight(monkeypatch))
    trainer.train()
    assert trainer.state.global_step == 4
    assert "Today is 29 Dec 2031" in trainer.processing_class.decode(trainer._tokenize_prompts([CHATS[0]])[0][0])
    assert trainer.processing_class.chat_template == DATED, "what is saved with the model asks for the time of its use"

    resumed = build(tmp_path)
    assert "Today is 30 Dec 2031" in resumed.processing_class.decode(resumed._tokenize_prompts([CHATS[0]])[0][0])
    resumed.train(resume_from_checkpoint=str(Path(trainer.args.output_dir) / "checkpoint-3"))
    assert "Today is 29 Dec 2031" in resumed.processing_class.decode(resumed._tokenize_prompts([CHATS[0]])[0][0])
    assert resumed.train_dataset["query_fingerprint"] == trainer.train_dataset["query_fingerprint"]


def test_where_the_date_cannot_be_fixed_it_is_said(tmp_path, monkeypatch, caplog):
    """TRL's RLOO takes no other template than the tokenizer's."""
    set_day(monkeypatch, 29, "erpo_trl.query.preparation")
    with captured_warnings(caplog):
        trainer = build(tmp_path, cls=ERPORLOOTrainer)
    assert "chat template writes the date" in caplog.text and "date_string" in caplog.text
    trainer.add_callback(Midnight(monkeypatch))
    with pytest.raises(ValueError, match="or one that writes the date"):
        trainer.train()


def test_a_date_of_the_users_needs_no_word(tmp_path, monkeypatch, caplog):
    set_day(monkeypatch, 29, "erpo_trl.query.preparation")
    with captured_warnings(caplog):
        trainer = build(tmp_path, cls=ERPORLOOTrainer, chat_template_kwargs={"date_string": "1 May 2020"})
    trainer.add_callback(Midnight(monkeypatch))
    trainer.train()
    assert "writes the date" not in caplog.text
