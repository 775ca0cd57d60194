"""Fixtures shared by all tests. Nothing is downloaded and nothing is written outside the test's own folder."""

import gc
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch
from helpers import keep_raw_advantages, make_config


def pytest_collection_finish(session):
    """What the imports made stays for good, so that the garbage collection at the start of every `train()` need not look at
    it again: that took longer than the training of a tiny model.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def private_caches(tmp_path, monkeypatch):
    """Data set and table caches below tmp_path; one thread, so that sums are reproducible."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def config(tmp_path):
    """`config(**fields)`: an ERPOConfig whose table lies below tmp_path."""
    return lambda **fields: make_config(tmp_path, **fields)


@pytest.fixture
def raw_advantages(monkeypatch):
    """Each row keeps its advantage as it was before any query weight; see `helpers.rows_of`."""
    keep_raw_advantages(monkeypatch)
