"""The scoring pass: `DatasetMapper` against the forward it cannot do without and against the obvious loop; rows against memory."""

import json
import resource
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset
from trl.trainer.utils import add_fused_lm_head

from ..config import ERPOConfig
from ..query.reference import DatasetMapper
from .measure import Comparison, interleaved, own_clock, seconds
from .workload import Workload

MAPPER, BARE, LOOP = "DatasetMapper", "bare forward", "obvious loop"
_LOOP_ROWS = 16  # of a batch of the obvious loop
_CPU_TOKENS = 2048  # of a bare forward on a CPU, where larger ones are no faster and often slower


def mapper_config(work: Workload, folder: Path) -> ERPOConfig:
    """Settings of a mapping whose table lies below `folder`."""
    return ERPOConfig(
        output_dir=str(folder / "run"),
        use_cpu=not work.gpu,
        bf16=work.gpu,
        report_to="none",
        disable_tqdm=True,
        reference_cache_dir=str(folder / "reference"),
    )


def measure_scoring(work: Workload, lengths: np.ndarray, repetitions: int, folder: Path) -> list[Comparison]:
    """Tokens a second of random prompts: tokenized, scored, written and attached by the mapper; the forward alone.

    The bare forward runs the same number of tokens in rows of one length, so without padding, through backbone and fused
    head. The rows are as long as makes its attention cost what that of the prompts costs. The obvious loop takes the prompts
    in their order, padded to the longest of a batch, and makes logits and their log-softmax.
    """
    rows, texts = len(lengths), work.prompts(lengths)
    data = Dataset.from_dict({"prompt": texts})
    model, config = work.model().eval(), mapper_config(work, folder)
    ids = [torch.tensor(row) for row in work.tokenizer(texts)["input_ids"]]
    tokens = sum(map(len, ids))
    width = round(sum(len(row) ** 2 for row in ids) / tokens)
    packed = torch.cat(ids)[: tokens // width * width].view(-1, width)
    fused = work.model().eval()
    add_fused_lm_head(fused, temperature=config.temperature)
    amp = torch.autocast("cuda", dtype=torch.bfloat16, enabled=work.gpu)

    def mapped():
        shutil.rmtree(folder / "reference", ignore_errors=True)
        DatasetMapper(model, work.tokenizer, config)(data)

    @torch.no_grad()
    def bare():
        for batch in packed.split(max(1, (config.reference_batch_tokens if work.gpu else _CPU_TOKENS) // width)):
            batch = batch.to(model.device)
            with amp:
                fused(input_ids=batch, labels=batch, fused_lm_head=True).log_probs.float().cpu()

    @torch.no_grad()
    def loop():
        for start in range(0, rows, _LOOP_ROWS):
            batch = work.tokenizer(texts[start : start + _LOOP_ROWS], padding=True, return_tensors="pt")
            batch = {name: batch[name].to(model.device) for name in ("input_ids", "attention_mask")}
            with amp:
                logps = model(**batch).logits[:, :-1].float().log_softmax(-1)
            logps.gather(-1, batch["input_ids"][:, 1:, None]).squeeze(-1).cpu()

    times = interleaved({BARE: bare, MAPPER: mapped, LOOP: loop}, repetitions)
    rates = {side: (tokens / np.asarray(values)).tolist() for side, values in times.items()}
    name = f"{rows} prompts of {min(lengths)} to {max(lengths)} tokens, half of them up to {np.median(lengths):.0f}"
    return [
        Comparison(f"scoring {name}", "tokens/s", rates, {MAPPER: (">=", 0.85)}),
        Comparison(
            f"scoring against the obvious loop {name}",
            "tokens/s",
            {LOOP: rates[LOOP], MAPPER: rates[MAPPER]},
            {MAPPER: (">=", 3.0)},
        ),
    ]


def measure_warm(work: Workload, rows: int, repetitions: int, folder: Path) -> Comparison:
    """Seconds of a mapping whose queries are all in the table already."""
    data, model, config = work.dataset(rows, 24), work.model(), mapper_config(work, folder)
    DatasetMapper(model, work.tokenizer, config)(data)
    clock = own_clock()
    times = [seconds(lambda: DatasetMapper(model, work.tokenizer, config)(data), clock) for _ in range(repetitions)]
    limit = {"warm table": 2.0} if rows == 10_000 else {}
    return Comparison(f"second mapping of {rows} rows", "s", {"warm table": times}, limit=limit)


def measure_memory(work: Workload, rows: tuple[int, ...], folder: Path) -> Comparison:
    """Peak resident memory that a mapping adds to its process, at several numbers of rows, each in a process of its own.

    The rows are made here: a peak never falls, so that making them there would hide what mapping them takes.
    """
    grown = {}
    for count in rows:
        data = folder / f"data-{count}"
        work.dataset(count, 24).save_to_disk(data)
        done = subprocess.run(
            [sys.executable, "-m", __name__, *work.arguments(), str(data)],
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise RuntimeError(f"A mapping of {count} rows failed:\n{done.stderr}")
        grown[f"{count} rows"] = [json.loads(done.stdout.splitlines()[-1])]
    return Comparison("memory that a mapping adds, prompts of 24 tokens", "bytes", grown)


def _map_alone(work: Workload, saved: str) -> int:
    """Bytes that mapping the rows saved in a folder adds to the peak resident memory of this process."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = Dataset.load_from_disk(saved)
        scored = work.model()
        DatasetMapper(scored, work.tokenizer, mapper_config(work, folder / "warm"))(data.select(range(16)))
        before = _peak_resident()
        DatasetMapper(scored, work.tokenizer, mapper_config(work, folder))(data)
        return _peak_resident() - before


def _peak_resident() -> int:
    """Bytes that this process held at most. On Linux `ru_maxrss` begins with what the process that started this one held."""
    status = Path("/proc/self/status")
    if status.exists():
        [line] = [line for line in status.read_text().splitlines() if line.startswith("VmHWM:")]
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(_map_alone(Workload.again(*sys.argv[1:4]), sys.argv[4]))
