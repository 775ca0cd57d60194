"""How histograms and images reach each tracker, through the run that transformers' callback has open."""

import os
from collections.abc import Mapping

import numpy as np

# Name -> (N,) values, name -> (H, W, 3) uint8
Histograms = Mapping[str, np.ndarray]
Images = Mapping[str, np.ndarray]


def open_wandb_run(args, group: str) -> None:
    """Open the W&B run that transformers would open, in a group; where one is open, it stays as it is.

    Args: args: the run's `TrainingArguments`; group: used unless `WANDB_RUN_GROUP` names another.
    """
    import wandb

    if wandb.run is None:
        wandb.init(
            project=os.getenv("WANDB_PROJECT", "huggingface"),
            name=args.run_name,
            group=os.getenv("WANDB_RUN_GROUP", group),
        )


def to_wandb(trainer, step: int, histograms: Histograms, images: Images) -> None:
    """Args: trainer: whose W&B run is open; step: optimizer step; histograms, images: what to send."""
    import wandb

    content = {name: wandb.Histogram(values) for name, values in histograms.items()}
    content |= {name: wandb.Image(image) for name, image in images.items()}
    # transformers logs by this axis, not by W&B's own count of calls
    wandb.log({**content, "train/global_step": step})


def to_trackio(trainer, step: int, histograms: Histograms, images: Images) -> None:
    """As [`to_wandb`]."""
    import trackio

    content = {name: trackio.Histogram(values) for name, values in histograms.items()}
    content |= {name: trackio.Image(image) for name, image in images.items()}
    trackio.log({**content, "train/global_step": step})


def to_tensorboard(trainer, step: int, histograms: Histograms, images: Images) -> None:
    """As [`to_wandb`], into the writer of transformers' callback."""
    from transformers.integrations import TensorBoardCallback

    writer = next(c.tb_writer for c in trainer.callback_handler.callbacks if isinstance(c, TensorBoardCallback))
    for name, values in histograms.items():
        writer.add_histogram(name, values, step)
    for name, image in images.items():
        writer.add_image(name, image, step, dataformats="HWC")
    writer.flush()


# Name in `report_to` -> how to send
TRACKERS = {"wandb": to_wandb, "tensorboard": to_tensorboard, "trackio": to_trackio}
