"""Runs that share a compiled step: their states are stacked, [M, …] arrays.

The step is vmapped over the members that a device holds; devices do not talk.
Each member keeps a folder of its own, with ordinary checkpoints in it.
"""

import contextlib
import math
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from flatmatch_jax.data import resident
from flatmatch_jax.run import results, watch
from flatmatch_jax.run.checkpoint import Checkpoints
from flatmatch_jax.run.progress import Progress
from flatmatch_jax.run.workdir import Workdir
from flatmatch_jax.system import memory, messages, sharding, signals
from flatmatch_jax.training import estimate, loop, setup, traced
from flatmatch_jax.types import TrainState


class Run(NamedTuple):
  """What the loop keeps of a member."""

  config: Any
  files: Workdir
  given: tuple[list[jax.Array], resident.Resident]  # Settings, and its data.
  held_out: dict[str, tuple]
  unseen: Any  # Images for probes.
  checkpoints: Checkpoints
  notes: dict[str, Any]
  watcher: watch.Watch


def over_members(function, mesh):
  """Makes a function of (state, given) one of many members' [M, …]."""
  members, everywhere = PartitionSpec('data'), PartitionSpec()
  axes: list[Any] = [None, None, 0, 0]  # Images are there once.
  specs: list[Any] = [everywhere, everywhere, members, members]
  return jax.shard_map(
    jax.vmap(function, in_axes=(0, (0, resident.Resident(*axes)))),
    mesh=mesh,
    in_specs=(members, (members, resident.Resident(*specs))),
    out_specs=members,
    check_vma=False,
  )


def size_of_stack(count: int, at_once: int | None, devices: int) -> int:
  """How many of `count` members train side by side: as many on each device.

  Stacks are of one size, so that the step is compiled once.
  """
  if at_once is None:
    at_once = devices if jax.default_backend() == 'cpu' else count
  stacks = -(-count // at_once)
  return -(-count // (stacks * devices)) * devices


def train_all(members, chosen, dataset, names, at_once: int | None) -> None:
  """Trains members that differ in seeds, splits and `names` only.

  Those that stop at `config.max_skipped` are named, and get no result.

  Args:
    members: have a `config` and `files`, a Workdir that is not finished.
    chosen: their splits, with equal numbers of images.
    dataset: of arrays.
    names: settings that the step takes as arrays.
    at_once: how many train side by side; None chooses.
  """
  config = members[0].config
  shape = dataset.train_images.shape[1:]
  functions = traced.make_functions(
    config, names, traced.info_of(dataset, chosen[0]), shape
  )
  mesh = sharding.make_mesh()
  everywhere = sharding.replicated(mesh)
  init = jax.jit(functions.init, out_shardings=everywhere)
  shapes = init.eval_shape(
    jax.random.key(config.seed), traced.values_of(config, names)
  )
  memory.check(config, shapes, shape, len(functions.program.views))
  weights = None
  if config.pretrained:
    weights = setup.read_weights(config.pretrained, shapes.params)
  pairs = list(zip(members, chosen, strict=True))
  for member, split in pairs:
    setup.write_description(member.files, member.config, dataset, split)
  setup.tell_data(config, dataset, chosen[0])

  data = resident.place(dataset, chosen[0], everywhere)
  if len(dataset.test_labels):  # Once for all members.
    test_images = jax.device_put(dataset.test_images, everywhere)
    dataset = dataset._replace(test_images=test_images)
  stack = Loop(functions, mesh)
  size = size_of_stack(len(members), at_once, mesh.size)
  for first in range(0, len(pairs), size):
    at: dict[int, tuple[list[Run], list[TrainState]]] = {}
    for member, split in pairs[first : first + size]:
      given = (
        traced.values_of(member.config, names),
        data._replace(
          labeled=jnp.asarray(split.labeled, jnp.int32),
          unlabeled=jnp.asarray(split.unlabeled, jnp.int32),
        ),
      )
      held_out = setup.evaluation_sets(dataset, split, everywhere)
      run, state = _open(member, split, given, held_out, init, weights, dataset)
      runs, states = at.setdefault(int(state.step), ([], []))
      runs.append(run)
      states.append(state)
    # A process that dies while it saves leaves some a checkpoint behind.
    for runs, states in at.values():
      stack.run(runs, *_stack(runs, states, size, mesh))


def _open(member, split, given, held_out, init, weights, dataset):
  """A member as it stands: new, or at its latest checkpoint."""
  config, files = member.config, member.files
  state = init(jax.random.key(config.seed), given[0])
  checkpoints = Checkpoints(files.checkpoints)
  notes: dict = {'seconds': 0.0, 'class_names': list(dataset.class_names)}
  if (found := checkpoints.restore(state)) is not None:
    state, notes = found
  elif weights:
    state = setup.start_from(weights, state)
  unseen = setup.probe_images(config, held_out)
  watcher = setup.watch_over(config, dataset, split, notes, files.path.name)
  run = Run(config, files, given, held_out, unseen, checkpoints, notes, watcher)
  return run, state


def _stack(runs, states, size, mesh):
  """State and given of a stack; copies of the last fill it up to `size`."""
  fill = lambda rows: [*rows, *[rows[-1]] * (size - len(rows))]
  place = lambda rows: jax.device_put(
    jax.tree.map(lambda *x: jnp.stack(x), *fill(rows)),
    sharding.over_batch(mesh),
  )
  values, data = zip(*(run.given for run in runs), strict=True)
  labeled, unlabeled = place([(d.labeled, d.unlabeled) for d in data])
  given = (
    place(values),
    data[0]._replace(labeled=labeled, unlabeled=unlabeled),
  )
  state = place(states)
  states.clear()  # Else they would be there twice.
  return state, given


class Loop:
  """Trains stack after stack with functions that are compiled once."""

  def __init__(self, functions: traced.Functions, mesh):
    self._program = functions.program
    self._step = over_members(functions.step, mesh)
    self._look: Any = functions.look and jax.jit(functions.look)
    self._probe: Any = jax.jit(functions.probe)
    take: Any = jax.jit(
      lambda state, i: jax.tree.map(lambda x: x[i], state),
      out_shardings=sharding.replicated(mesh),
    )
    self._member = lambda state, i: sharding.settle(take(state, i))
    self._mesh = mesh
    self._compiled: Any = None

  def run(self, runs: list[Run], state, given) -> None:
    """Goes on from the step where all members stand, to the end."""
    began = time.perf_counter()
    config, start = runs[0].config, int(state.step[0])
    selection = results.selection('' in runs[0].held_out, config.num_val)
    names = ', '.join(run.files.path.name for run in runs)
    messages.say(f'{names}: from step {start} of {config.steps}.')
    least = [
      min(
        results.history(run.files.cut_metrics(start), selection),
        default=math.inf,
      )
      for run in runs
    ]
    images = config.batch_size
    images += config.unlabeled_batch_size * bool(self._program.views)
    progress = Progress(
      [run.files for run in runs], start, config.steps, images
    )
    live = list(range(len(runs)))  # A member that breaks stops alone.
    # Of the time that members take together each takes its share.
    seconds = lambda run: (
      run.notes['seconds'] + (time.perf_counter() - began) / len(runs)
    )
    step, pending = start, None
    try:
      if self._compiled is None:
        self._compiled = loop.compile_and_tell(
          self._step, state, given, sharding.over_batch(self._mesh)
        )
      timing = estimate.Estimate(config)
      timing.compiled(start + 1, self._compiled, self._mesh)
      progress.start()
      with signals.stop_requests() as request:
        for step in range(start + 1, config.steps + 1):
          last = step == config.steps
          logs = last or step % config.log_every == 0
          rows: list[dict] = [{} for _ in runs]
          for i in live:
            rows[i] |= self._look_at(runs[i], state, i, step, logs)
          state, metrics = sharding.settle(self._compiled(state, given))
          if pending is not None:  # The device is at most one step behind.
            live = _still_live(live, runs, step - 1, pending)
            timing.step(step - 1)
          if not live:
            break
          pending = metrics
          progress.runs = len(live)
          progress.step()
          if logs:
            found = jax.device_get(metrics)
            for i in live:
              rows[i] |= _row(found, i)
              runs[i].watcher.row(step, rows[i])
          if last or step % config.eval_every == 0:
            self._evaluate(runs, live, state, rows)
          rows = [row if i in live else {} for i, row in enumerate(rows)]
          if any(rows):
            progress.write(step, rows)
            for run in runs:
              run.checkpoints.check()
          errors = [row.get(selection) for row in rows]
          best = _lower(least, errors)
          if (
            best
            or last
            or request.signal
            or step % config.checkpoint_every == 0
          ):  # All together, so that they go on together.
            for i in live:
              # The checkpoint has what the watch has seen.
              runs[i].watcher.look(step, _row(metrics, i))
              notes = runs[i].notes | {
                'seconds': seconds(runs[i]),
                'watch': runs[i].watcher.state(),
              }
              member = self._member(state, i)
              runs[i].files.sync_metrics()
              runs[i].checkpoints.save(step, member, notes, errors[i])
          if request.signal:
            break
      speed = progress.images_per_second()
    finally:
      with contextlib.ExitStack() as closing:  # All of them.
        for run in runs:
          closing.callback(run.checkpoints.close)
        closing.callback(progress.close)
    if request.signal and step < config.steps:
      # Those that stopped before may have saved less, or nothing.
      saved = [run.checkpoints.latest_step() or 0 for run in runs]
      loop.stop(request.signal, max(saved))
    skipped = jax.device_get(state.skipped.total)
    for i in live:
      loop.write_result(
        runs[i].config,
        runs[i].files,
        len(runs[i].given[1].labeled),
        int(skipped[i]),
        runs[i].watcher.warnings,
        seconds(runs[i]),
        speed,
      )
    if request.signal:  # It came in the last step; others may wait.
      loop.stop(request.signal, step)

  def _look_at(self, run, state, i, step, logs) -> dict:
    """What a perturbed step does not measure, of the member `i`."""
    every = run.config.probe_every
    if every and step % every == 0:
      member = self._member(state, i)
      return sharding.settle(self._probe(member, run.given, run.unseen))
    if logs and self._look:
      losses = self._look(self._member(state, i), run.given)
      return {'unlabeled_loss': sharding.settle(losses.unlabeled)}
    return {}

  def _evaluate(self, runs, live, state, rows):
    for i in live:
      member = self._member(state, i)
      sets = runs[i].held_out
      rows[i] |= loop.evaluate(self._program.classify, member, sets)


def _still_live(live, runs, step, metrics) -> list[int]:
  """Members that may go on after this step; names the others."""
  in_a_row = jax.device_get(metrics['skipped_in_a_row'])
  left = []
  for i in live:
    try:
      if in_a_row[i] or runs[i].watcher.looks_at(step):
        last_saved = runs[i].checkpoints.latest_step
        found = _row(jax.device_get(metrics), i)
        runs[i].watcher.step(step, found, last_saved)
      left.append(i)
    except watch.NotFiniteError as error:
      messages.say(f'{runs[i].files.path.name}: {error}')
  return left


def _row(metrics, i) -> dict:
  """The metrics of member `i`, of all that are stacked."""
  return {key: x[i] for key, x in metrics.items()}


def _lower(least: list[float], errors) -> bool:
  """Enters `errors` into the `least` ones; whether any is one of them."""
  errors = [math.inf if error is None else error for error in errors]
  low = any(
    error <= old and error < math.inf
    for error, old in zip(errors, least, strict=True)
  )
  least[:] = map(min, errors, least)
  return low
