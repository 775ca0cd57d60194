"""One date for a whole run, where the chat template writes today's into every prompt (Llama 3.2, GPT-OSS).

Prompts are scored once and rendered anew at every generation: past midnight they would be others than the scored ones.
"""

import re
from datetime import datetime

_NAME = "strftime_now"
_CALL = re.compile(_NAME + r"""\(\s*(?P<quote>['"])(?P<format>[^'"\\]*)(?P=quote)\s*\)""")
_IS_THERE = re.compile(_NAME + r"\s+is\s+(?P<no>not\s+)?defined")


def asks_for_the_time(template) -> bool:
    """Whether a chat template calls what transformers tells it the time by. Args: template: text, or several by name."""
    return _NAME in str(template)


def at(template: str, now: datetime) -> str | None:
    """The template with the time in place of its calls; None where one has another argument than a text in quotes.

    transformers makes text of whatever a template is given, so that a clock of one's own cannot be handed to it.
    """
    told = _CALL.sub(lambda call: repr(now.strftime(call["format"])), template)
    told = _IS_THERE.sub(lambda question: "false" if question["no"] else "true", told)
    return None if _NAME in told else told
