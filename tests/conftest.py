"""Settings of all tests: one torch thread (two on a shared machine are several times slower)."""

import os

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")

# Each of these takes seconds: training, and a few subprocesses. `make check` leaves them out, `make test` does not.
SLOW = (
    "test_scale_training.py",
    "test_gradient_signal.py",
    "test_trained_logits.py",
    "test_attention_maps.py",
    "[scale_training",
    "[fold_scale-steps",
    "test_the_deck_is_clean",
    "[attention_maps",
    "[attention_is_not_explanation",
    "[trained_logits",
    "[roofline",
    "tests/export/",
    "test_training_learns_and",
    "test_executors.py",
    "test_the_estimate_holds_where",
    "test_a_bound_is_refused",
    "test_what_a_large_run_held",
    "test_an_export_prints_what_the_app_measures",
)


def pytest_collection_modifyitems(items):
    for item in items:
        if any(part in item.nodeid for part in SLOW):
            item.add_marker(pytest.mark.slow)
