"""Checkpoints of the whole train state, by Orbax.

Kept are the latest two and the best, by validation or else by test error. Orbax
writes asynchronously into a temporary folder and renames it when complete: a
process killed at any moment leaves the previous checkpoint.
"""

import pathlib

from absl import logging as absl_logging
import jax
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers as policies

from flatmatch_jax.types import TrainState, UserError

# Orbax reports each decision at the level of warnings.
absl_logging.set_verbosity(absl_logging.ERROR)


class Checkpoints:
  """The checkpoints of one run, named by the number of steps taken."""

  def __init__(self, directory: pathlib.Path, read_only: bool = False):
    self._directory = directory
    if read_only and not directory.exists():
      raise UserError(f'{directory} does not exist: nothing is saved yet.')
    # The old `max_to_keep` with `best_fn` would delete the latest one.
    preservation = policies.AnyPreservationPolicy(
      [
        policies.LatestN(2),
        policies.BestN(
          get_metric_fn=_error,
          reverse=True,
          n=1,
          keep_checkpoints_without_metrics=False,
        ),
      ]
    )
    self._manager = ocp.CheckpointManager(
      directory,
      options=ocp.CheckpointManagerOptions(
        preservation_policy=preservation,
        best_fn=_error,  # Without it best_step() is the latest.
        best_mode='min',
        read_only=read_only,
      ),
    )

  def latest_step(self) -> int | None:
    return self._manager.latest_step()

  def step_of(self, which: str) -> int:
    """The step of the 'latest' or 'best' checkpoint."""
    if which not in ('latest', 'best'):
      raise UserError(f'Unknown checkpoint {which!r}; known: latest, best.')
    step = (
      self._manager.best_step()
      if which == 'best'
      else self._manager.latest_step()
    )
    if step is None:
      raise UserError(f'{self._directory} holds no {which} checkpoint.')
    return step

  def save(
    self, step: int, state: TrainState, notes: dict, error: float | None
  ) -> None:
    """Starts saving; `notes` are what JSON can hold: seconds, class names."""
    self._manager.save(
      step,
      args=ocp.args.Composite(
        state=ocp.args.StandardSave(state),
        notes=ocp.args.JsonSave(notes),
      ),
      metrics=None if error is None else {'error': error},
      force=True,
    )

  def restore(self, step: int, like: TrainState) -> tuple[TrainState, dict]:
    """The state at `step`, shaped and placed as `like`, and its notes."""
    abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
    restored = self._manager.restore(
      step,
      args=ocp.args.Composite(
        state=ocp.args.StandardRestore(abstract),
        notes=ocp.args.JsonRestore(),
      ),
    )
    return restored['state'], restored['notes']

  def close(self) -> None:
    """Waits until everything is on disk."""
    self._manager.wait_until_finished()
    self._manager.close()


def _error(metrics):
  return metrics['error']
