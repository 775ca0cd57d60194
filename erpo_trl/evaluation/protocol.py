"""What is drawn for a benchmark at a temperature, and what becomes of the draws. No files and no model here."""

from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa

from ..rewards import format_reward
from .backends import Draw, Request
from .metrics import problem_values
from .sampling import PASS_AT_1_DRAW, sample_seed
from .scoring import score_texts

DRAWN = pa.schema(
    {
        "benchmark": pa.string(),
        "temperature": pa.float64(),
        "row": pa.int32(),  # of the benchmark, from 0
        "sample": pa.int32(),  # index of the draw; -1 is Pass@1's own
        "seed": pa.int64(),
        "text": pa.string(),
        "tokens": pa.int32(),  # of the completion, its end of turn included
        "finish": pa.string(),  # "stop"; "length": cut at the limit; "no_room": the prompt fills the context, nothing was drawn
    }
)
SCORED = pa.schema(
    [
        *DRAWN,
        pa.field("answer", pa.string()),  # as read from the last box; null where there is none
        pa.field("verdict", pa.float32()),  # 1 right, 0 wrong, null where the gold cannot be read
        pa.field("format", pa.bool_()),  # in the format that training asks for
    ]
)


def tokenize_prompts(tokenizer, prompts: list, template: Mapping | None = None) -> list[tuple[int, ...]]:
    """Token ids of prompts: chat messages through the chat template with a generation prompt, as in training; or plain texts.

    Args: template: arguments that chats are rendered with.
    """
    if isinstance(prompts[0], str):
        ids = tokenizer(prompts)["input_ids"]
    else:
        ids = tokenizer.apply_chat_template(
            prompts, add_generation_prompt=True, tokenize=True, return_dict=True, **(template or {})
        )["input_ids"]
    return [tuple(row) for row in ids]


def draw_indices(temperature: float, samples: int, own_draw: bool = True) -> list[int]:
    """Indices of the samples that a problem gets. Greedy decoding is drawn once: its k samples would be copies."""
    if temperature == 0:
        return [0]
    return [*range(samples), *([PASS_AT_1_DRAW] if own_draw else [])]


def make_requests(
    benchmark: str,
    prompt_ids: Sequence[tuple[int, ...]],
    temperature: float,
    samples: int,
    seed: int,
    max_new_tokens: int,
    context: int | None,
    own_draw: bool = True,
) -> list[Request]:
    """Every draw of a benchmark at a temperature, by row and sample.

    Args: benchmark: its name; prompt_ids: of each row; samples: k; seed: of the run; context: the model's, in tokens, or None
    without a limit: a completion may be shorter than `max_new_tokens` for its sake, and a prompt that leaves no room gets no
    request; own_draw: with a draw for Pass@1.
    """
    requests = []
    for row, ids in enumerate(prompt_ids):
        room = max_new_tokens if context is None else min(max_new_tokens, context - len(ids))
        for sample in draw_indices(temperature, samples, own_draw) if room > 0 else ():
            requests.append(
                Request(row, sample, sample_seed(seed, benchmark, row, sample, temperature), temperature, ids, room)
            )
    return requests


def drawn_table(benchmark: str, batch: Sequence[Request], draws: Sequence[Draw], tokenizer) -> pa.Table:
    """Requests and what came of them, as rows of `DRAWN`."""
    texts = tokenizer.batch_decode([draw.token_ids for draw in draws], skip_special_tokens=True)
    return pa.table(
        {
            "benchmark": [benchmark] * len(batch),
            "temperature": [request.temperature for request in batch],
            "row": [request.row for request in batch],
            "sample": [request.sample for request in batch],
            "seed": [request.seed for request in batch],
            "text": texts,
            "tokens": [len(draw.token_ids) for draw in draws],
            "finish": ["stop" if draw.finished else "length" for draw in draws],
        },
        schema=DRAWN,
    )


def complete_table(
    drawn: pa.Table, benchmark: str, rows: int, temperature: float, samples: int, own_draw: bool = True
):
    """`drawn` with a row for every draw that had no room, by row and sample.

    Raises: RuntimeError when a sample is there twice.
    """
    indices = draw_indices(temperature, samples, own_draw)
    there = set(zip(drawn["row"].to_pylist(), drawn["sample"].to_pylist()))
    if len(there) != len(drawn):
        raise RuntimeError(f"{benchmark} at T={temperature:g}: {len(drawn)} samples of {len(there)} draws")
    missing = [(row, sample) for row in range(rows) for sample in indices if (row, sample) not in there]
    filler = pa.table(
        {
            "benchmark": [benchmark] * len(missing),
            "temperature": [temperature] * len(missing),
            "row": [row for row, _ in missing],
            "sample": [sample for _, sample in missing],
            "seed": pa.nulls(len(missing), pa.int64()),
            "text": [""] * len(missing),
            "tokens": [0] * len(missing),
            "finish": ["no_room"] * len(missing),
        },
        schema=DRAWN,
    )
    return pa.concat_tables([drawn, filler]).sort_by([("row", "ascending"), ("sample", "ascending")])


def score_table(drawn: pa.Table, golds: Sequence, workers: int, time_limit_s: float) -> pa.Table:
    """`drawn` with `answer`, `verdict` and `format`. Args: golds: of each row of the benchmark."""
    texts = drawn["text"].to_pylist()
    answers, verdicts = score_texts([golds[row] for row in drawn["row"].to_pylist()], texts, workers, time_limit_s)
    columns = {name: drawn[name] for name in DRAWN.names}
    in_format = [bool(value) for value in format_reward(texts)]
    return pa.table({**columns, "answer": answers, "verdict": verdicts, "format": in_format}, schema=SCORED)


def table_values(scored: pa.Table, samples: int) -> dict[str, np.ndarray]:
    """Every metric's value per problem, from all samples of a benchmark at one temperature.

    Args: scored: rows of `SCORED`, text aside, sorted by row and sample, each problem with the same draws; samples: k.
    Returns: name -> (P,): those of `problem_values`, and over the draws of Avg@k (Pass@1's own where k is 0) `tokens`,
    `truncated` and `format`. A gold that cannot be read counts as wrong: it cannot raise a metric.
    """
    index = scored["sample"].to_numpy()
    draws = len(np.unique(index))
    right = (scored["verdict"].to_numpy(zero_copy_only=False) == 1).reshape(
        -1, draws
    )  # null becomes NaN, which is not 1
    index = index.reshape(-1, draws)[0]
    if not (scored["row"].to_numpy().reshape(-1, draws) == scored["row"].to_numpy()[::draws, None]).all():
        raise RuntimeError("samples are not sorted by row and sample, or some are missing")
    greedy = scored["temperature"][0].as_py() == 0
    shared = index != PASS_AT_1_DRAW
    answers = np.array(scored["answer"].to_pylist(), dtype=object).reshape(-1, draws)[:, shared]
    own = right[:, 0] if greedy else right[:, ~shared][:, 0] if not shared.all() else None
    if greedy and samples == 0:
        shared = np.zeros_like(shared)
    values = problem_values(right[:, shared], answers, own, samples)
    counted = shared if shared.any() else np.ones_like(shared)
    finish = np.array(scored["finish"].to_pylist()).reshape(-1, draws)[:, counted]
    values["tokens"] = scored["tokens"].to_numpy().reshape(-1, draws)[:, counted].mean(1)
    values["truncated"] = (finish == "length").mean(1)
    values["format"] = scored["format"].to_numpy(zero_copy_only=False).reshape(-1, draws)[:, counted].mean(1)
    return values
