"""Checkpoints of the whole train state, by Orbax, and verified when read.

Kept are the latest two and the best, by validation or else by test error. Orbax
writes asynchronously into a temporary folder and renames it when complete, or
in a bucket adds a last object: a process killed at any moment leaves the
previous checkpoint. What disks do to
files afterwards is found out by checksums of the state's arrays in the notes
beside it, and one of the notes.
"""

import json
import pathlib
from typing import Any
import zlib

import jax
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers as policies

from flatmatch_jax.run.checksum import checksums
from flatmatch_jax.run.workdir import COMMITTED, saved_steps
from flatmatch_jax.system import buckets, distributed, files, messages
from flatmatch_jax.system.files import writing
from flatmatch_jax.types import PyTree, TrainState, UserError, check_known

# What Orbax says of arrays by other names or of other shapes.
_OTHERS = ('structures do not match', 'not compatible with the stored shape')

_ARRAYS = (np.ndarray, jax.Array)


class Checkpoints:
  """The checkpoints of one run, named by the number of steps taken."""

  def __init__(self, directory: pathlib.Path, read_only: bool = False):
    self._directory, self._read_only = directory, read_only
    self._manager: ocp.CheckpointManager | None = None
    if read_only and not directory.exists():
      raise UserError(f'{directory} does not exist: nothing is saved yet.')

  def steps(self) -> list[int]:
    """Of all checkpoints, in order; what Orbax began to write is not one."""
    return saved_steps(self._directory)

  def latest_step(self) -> int | None:
    return max(self.steps(), default=None)

  def restore(
    self, like: PyTree, which: str = 'latest'
  ) -> tuple[Any, dict] | None:
    """The state and notes of the 'latest' or the 'best' checkpoint.

    The state is shaped and placed as `like`: a TrainState, or a dict of some
    of its fields if no others are needed. A damaged latest checkpoint is moved
    aside with a warning, and the previous one is used; None if there is none.
    """
    check_known('checkpoint', which, ('latest', 'best'))
    # Disks of several machines may show them at different times.
    steps = distributed.of_the_first(self.steps())
    damaged: dict[int, str] = {}
    for step in reversed(steps) if which == 'latest' else self._best(steps):
      state, notes, reason = self._read(step, like)
      if not reason:
        self._set_aside(self._bad_notes(steps) | damaged, step)
        return state, notes
      if step not in distributed.of_the_first(self.steps()):
        # A run beside us has gone on.
        return self.restore(like, which)
      damaged[step] = reason
    if damaged:
      raise UserError(
        f'{self._directory} has only damaged checkpoints ({which} asked for): '
        + '; '.join(f'{step}: {reason}' for step, reason in damaged.items())
        + '. Nothing was changed. Put back a copy of one'
        + (', take the latest one,' if which == 'best' else '')
        + ' or train in another --workdir.'
      )
    return None

  def _best(self, steps) -> list[int]:
    """The step of the lowest error, and of equals the last; [] without any."""
    bad = self._bad_notes(steps)
    errors = {s: self._notes(s)['error'] for s in steps if s not in bad}
    known = {step: e for step, e in errors.items() if e is not None}
    return [min(reversed(known), key=known.__getitem__)] if known else []

  def _bad_notes(self, steps) -> dict[int, str]:
    """What Orbax's manager would stumble over, step by step."""
    damaged = {}
    for step in steps:
      try:
        self._notes(step)
      except DamagedError as error:
        damaged[step] = str(error)
    return damaged

  def _read(self, step, like):
    """State, notes and '', or what is wrong, on which all processes agree."""
    state, notes, reason = None, {}, ''
    try:
      notes = self._notes(step)
      folder = self._directory / str(step) / 'state'
      with buckets.reading(folder):
        state = _restore(folder, like)
    except (
      MemoryError,
      jax.errors.JaxRuntimeError,
      buckets.UnreachableError,
    ):
      raise
    except Exception as error:  # Whatever tensorstore makes of torn files.
      reason = ' '.join(str(error).split()).split('. See full')[0]
      reason = reason[:200].rstrip('.') or repr(error)
      if any(words in reason for words in _OTHERS):
        reason = (
          'its arrays are of another network, method or number of classes than '
          'config.json and dataset.json say, or of an earlier version'
        )
    if not distributed.everywhere(not reason):
      return None, None, reason or 'another process cannot read it'
    if not checksums(state).items() <= notes['checksums'].items():
      return None, None, 'its checksum is wrong'
    return state, notes, ''

  def _notes(self, step) -> dict:
    folder = self._directory / str(step)
    try:
      notes = files.read_json(folder / 'notes' / 'metadata')
      if notes.pop('crc32') != _crc32(notes):
        raise DamagedError('the checksum of its notes is wrong')
      # By these Orbax chooses what to keep.
      metrics = folder / 'metrics' / 'metrics'
      error = files.read_json(metrics) if metrics.exists() else {}
      if error.get('error') != notes['error']:
        raise DamagedError('its metrics are not those of its notes')
    except buckets.UnreachableError:
      raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
      raise DamagedError(f'its notes cannot be read: {error!r}') from None
    if 'checksums' not in notes:
      raise UserError(
        f'{folder} was saved by an earlier version of flatmatch_jax. Read it '
        'with that version, or train in another --workdir.'
      )
    return notes

  def _set_aside(self, damaged, good):
    """Moves damaged checkpoints away, so that their steps are saved again."""
    for step, reason in damaged.items():
      fate = 'left as it is'
      if not self._read_only:
        aside = self._directory.with_name('damaged') / str(step)
        while aside.exists():
          aside = aside.with_name(f'{aside.name}+')
        fate = f'kept as {aside}'
        if distributed.is_first():
          with writing(aside):
            folder = self._directory / str(step)
            if buckets.holds(aside):
              buckets.move(folder, aside, last=COMMITTED)
            else:
              aside.parent.mkdir(exist_ok=True)
              folder.rename(aside)
      messages.say(
        f'The checkpoint of step {step} is damaged ({reason}) and {fate}; '
        f'that of step {good} is used.'
      )
    if not self._read_only:
      distributed.everywhere(True)  # Nobody goes on before they are away.

  def save(
    self, step: int, state: TrainState, notes: dict, error: float | None
  ) -> None:
    """Starts saving; `notes` are what JSON can hold: seconds, class names."""
    notes = notes | {'checksums': checksums(state), 'error': error}
    notes['crc32'] = _crc32(notes)
    # Orbax warns at each step that has no error to choose the best by.
    with writing(self._directory), messages.errors_only('absl'):
      self._open().save(
        step,
        args=ocp.args.Composite(
          state=ocp.args.StandardSave(state),
          notes=ocp.args.JsonSave(notes),
        ),
        metrics=None if error is None else {'error': error},
        force=True,
      )

  def _open(self) -> ocp.CheckpointManager:
    """Orbax's manager, made when what it would stumble over is set aside."""
    if self._manager is None:
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
        self._directory,
        options=ocp.CheckpointManagerOptions(
          preservation_policy=preservation,
          best_fn=_error,
          best_mode='min',
          cleanup_tmp_directories=True,
          # Otherwise Orbax waits for a folder that is refused for 5 minutes.
          async_options=ocp.AsyncOptions(
            create_directories_asynchronously=False
          ),
        ),
      )
    return self._manager

  def check(self) -> None:
    """Raises what went wrong in a save that has ended."""
    if self._manager and not self._manager.is_saving_in_progress():
      self.wait()

  def wait(self) -> None:
    """Waits until everything is on disk."""
    if self._manager:
      with writing(self._directory):
        self._manager.wait_until_finished()

  def close(self) -> None:
    self.wait()
    if self._manager:
      self._manager.close()


class DamagedError(ValueError):
  """A checkpoint that is not what was saved."""


def _restore(path: pathlib.Path, like):
  # By handlers, since the manager waits for other processes before it raises.
  shapes = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
  if isinstance(like, TrainState):
    args = ocp.args.StandardRestore(shapes)
    return ocp.StandardCheckpointHandler().restore(path, args=args)
  args = ocp.args.PyTreeRestore(
    shapes,
    restore_args=ocp.checkpoint_utils.construct_restore_args(shapes),
    partial_restore=True,
  )
  found = ocp.PyTreeCheckpointHandler().restore(path, args=args)
  # Arrays that are absent stay shapes, and those for the host take any shape.
  leaves = zip(jax.tree.leaves(found), jax.tree.leaves(like), strict=True)
  if not all(isinstance(x, _ARRAYS) and x.shape == y.shape for x, y in leaves):
    raise ValueError(_OTHERS[0])
  return found


def _crc32(notes):
  return zlib.crc32(json.dumps(notes, sort_keys=True).encode())


def _error(metrics):
  return metrics['error']
