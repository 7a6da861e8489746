"""Losses, gradients and their angle at a checkpoint, batch by batch."""

from collections.abc import Callable, Iterable

import jax
import numpy as np

from flatmatch_jax.types import Batch, TrainState


def over_batches(
  probe: Callable, state: TrainState, batches: Iterable[Batch]
) -> dict[str, np.ndarray]:
  """What a probe sees of each batch, as arrays over the batches."""
  look = jax.jit(probe)
  rows = [jax.device_get(look(state, batch)) for batch in batches]
  return {key: np.array([row[key] for row in rows]) for key in rows[0]}
