"""The embedded demo: a tiny language model, the arithmetic it is trained on, and how both were made."""

from pathlib import Path

# Folder that `from_pretrained` takes
MODEL_DIR = Path(__file__).parent / "model"
