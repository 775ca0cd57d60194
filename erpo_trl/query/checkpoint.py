"""What a checkpoint remembers of its reference: `erpo_state.json`, written whole or not at all."""

import json
import os
import re
from pathlib import Path

from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import logging

logger = logging.get_logger(__name__)

STATE_FILE = "erpo_state.json"


def write_state(folder: str, state: dict) -> None:
    """Write the state into a checkpoint's folder, which need not exist yet."""
    os.makedirs(folder, exist_ok=True)
    unfinished = os.path.join(folder, f".{STATE_FILE}")
    with open(unfinished, "w") as file:
        json.dump(state, file, indent=1)
    os.replace(unfinished, os.path.join(folder, STATE_FILE))


def read_state(checkpoint: str) -> dict:
    """The state of a checkpoint. Raises ValueError, with what to do, where there is none."""
    if not os.path.isdir(checkpoint):
        raise ValueError(f"There is no checkpoint {checkpoint} to resume from.")
    path = os.path.join(checkpoint, STATE_FILE)
    if not os.path.isfile(path):
        raise ValueError(
            f"Checkpoint {checkpoint} has no {STATE_FILE}: it was not written by an ERPO trainer, so its reference is "
            "unknown and cannot be recovered from trained weights."
        )
    with open(path) as file:
        return json.load(file)


def checkpoint_step(folder: Path) -> int | None:
    """The step of a folder called checkpoint-STEP; None for any other, as checkpoint-best."""
    match = re.fullmatch(rf"{PREFIX_CHECKPOINT_DIR}-(\d+)", folder.name)
    return int(match[1]) if match else None


def last_whole_checkpoint(output_dir: str) -> str:
    """The newest checkpoint in `output_dir` that was written to its end, as far as its state files tell."""
    found = {path: checkpoint_step(path) for path in Path(output_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*")}
    folders = sorted((path for path, step in found.items() if step is not None), key=found.get, reverse=True)
    for folder in folders:
        if all((folder / name).is_file() for name in (STATE_FILE, "trainer_state.json")):
            return str(folder)
        logger.warning(f"{folder} is incomplete and is passed over.")
    raise ValueError(f"There is no checkpoint of an ERPO trainer in {output_dir} to resume from.")
