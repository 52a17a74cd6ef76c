"""Trees of arrays compared leaf by leaf."""

from typing import Any

import jax
import numpy as np

from llmx import sharding


def relative_errors(got: Any, wanted: Any) -> dict[str, float]:
    """By path: |got - wanted| / |wanted|; of a leaf of zeros 0 if it stayed so, else infinite."""
    got, wanted = jax.device_get((got, wanted))
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    errors = {}
    leaves = zip(jax.tree_util.tree_leaves_with_path(wanted), jax.tree.leaves(got), strict=True)
    for (path, leaf), found in leaves:
        distance = np.linalg.norm(np.asarray(found, "f8") - np.asarray(leaf, "f8"))
        size = np.linalg.norm(np.asarray(leaf, "f8"))
        error = distance / size if size else np.inf if distance else 0.0
        errors[sharding.path_name(path)] = float(error)
    return errors


def assert_close(got: Any, wanted: Any, tolerance: float):
    """Every leaf differs by at most `tolerance` of its norm."""
    errors = relative_errors(got, wanted)
    wrong = {name: error for name, error in errors.items() if not error <= tolerance}
    assert not wrong, f"relative errors above {tolerance}: {wrong}"


def assert_same(got: Any, wanted: Any):
    """Bit for bit."""
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for (path, leaf), found in zip(
        jax.tree_util.tree_leaves_with_path(wanted), jax.tree.leaves(got), strict=True
    ):
        np.testing.assert_array_equal(
            np.asarray(found), np.asarray(leaf), err_msg=sharding.path_name(path)
        )


def assert_trained_alike(got: Any, wanted: Any, tolerance: float):
    """Losses and gradient norms of every step, and parameters after them (`runs.Trained`)."""
    np.testing.assert_allclose(got[0], wanted[0], rtol=tolerance)
    np.testing.assert_allclose(got[1], wanted[1], rtol=tolerance)
    assert_close(got[2], wanted[2], tolerance)
