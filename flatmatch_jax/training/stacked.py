"""Runs that share a compiled step: their states are stacked, [M, …] arrays.

The step is vmapped over the members that a device holds; devices do not talk.
Each member keeps a folder of its own, with ordinary checkpoints in it.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from flatmatch_jax.data import resident
from flatmatch_jax.system import memory, messages, sharding, startup
from flatmatch_jax.training import loop, setup, traced
from flatmatch_jax.training.engine import Engine, compile_step
from flatmatch_jax.types import TrainState


def over_members(function, mesh):
  """Makes a function of (state, given) one of many members' [M, …]."""
  members, everywhere = PartitionSpec('data'), PartitionSpec()
  axes: list[Any] = [None, None, 0, 0]  # Images are there once.
  specs: list[Any] = [everywhere, everywhere, members, members]
  return jax.shard_map(
    jax.vmap(function, in_axes=(0, (0, resident.Data(*axes)))),
    mesh=mesh,
    in_specs=(members, (members, resident.Data(*specs))),
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

  They have a `config` and `files` that are not finished, and are `chosen`
  splits with equal numbers of images. The step takes the settings `names` as
  arrays. Those that stop at `config.max_skipped` are named, and get no result.
  """
  config = members[0].config
  shape = dataset.train_images.shape[1:]
  functions = traced.make_functions(
    config, names, setup.info_of(dataset, chosen[0]), shape
  )
  mesh = functions.program.mesh
  everywhere = sharding.replicated(mesh)
  init = jax.jit(functions.init, out_shardings=everywhere)
  shapes = init.eval_shape(
    jax.random.key(config.seed), traced.values_of(config, names)
  )
  memory.check(config, shapes, shape, functions.program.views)
  weights = None
  if config.pretrained:
    weights = setup.read_weights(config.pretrained, shapes)
  pairs = list(zip(members, chosen, strict=True))
  for member, split in pairs:
    setup.write_description(member.files, member.config, dataset, split)
  setup.tell_data(config, dataset, chosen[0])

  data = resident.place(dataset, chosen[0], everywhere)
  if len(dataset.test_labels):  # Once for all members.
    test_images = sharding.place(dataset.test_images, everywhere)
    dataset = dataset._replace(test_images=test_images)
  stack = Stack(functions)
  size = size_of_stack(len(members), at_once, mesh.size)
  for first in range(0, len(pairs), size):
    at: dict[int, list[_Member]] = {}
    for member, split in pairs[first : first + size]:
      values = traced.values_of(member.config, names)
      own = data._replace(
        labeled=jnp.asarray(split.labeled, jnp.int32),
        unlabeled=jnp.asarray(split.unlabeled, jnp.int32),
      )
      run, state = setup.open_run(
        member.config,
        member.files,
        dataset,
        split,
        setup.evaluation_sets(dataset, split, everywhere),
        init(jax.random.key(member.config.seed), values),
        weights,
        name=member.files.path.name,
      )
      group = at.setdefault(int(state.step), [])
      group.append(_Member(run, state, (values, own)))
    # A process that dies while it saves leaves some a checkpoint behind.
    for step, group in at.items():
      runs = [member.run for member in group]
      together = ', '.join(run.name for run in runs)
      messages.say(f'{together}: from step {step} of {config.steps}.')
      phases = startup.Phases()
      state = stack.load(group, size)
      loop.train(runs, stack, state, phases)


class _Member(NamedTuple):
  """A run of a stack, before it is stacked."""

  run: setup.Run
  state: TrainState
  given: tuple[list[jax.Array], resident.Data]  # Settings, and its data.


class Stack(Engine):
  """Takes the steps of stack after stack by functions compiled once."""

  def __init__(self, functions: traced.Functions):
    self.program = functions.program
    self._step = over_members(functions.step, self.program.mesh)
    self._look = jax.jit(functions.look) if functions.look else None
    self._probe = jax.jit(functions.probe)
    self._take: Any = jax.jit(
      lambda state, i: jax.tree.map(lambda x: x[i], state),
      out_shardings=sharding.replicated(self.program.mesh),
    )
    self._new = True  # No step of this stack was taken yet.
    self._given_of: list[tuple] = []  # Of each member.

  def load(self, members: list[_Member], size: int):
    """Their stacked state; copies of the last fill it up to `size`.

    Empties the list, or all states would be there twice.
    """
    fill = lambda rows: [*rows, *[rows[-1]] * (size - len(rows))]
    place = lambda rows: jax.device_put(
      jax.tree.map(lambda *x: jnp.stack(x), *fill(rows)),
      sharding.over_batch(self.program.mesh),
    )
    self._given_of = [member.given for member in members]
    values, data = zip(*self._given_of, strict=True)
    labeled, unlabeled = place([(d.labeled, d.unlabeled) for d in data])
    images = data[0]._replace(labeled=labeled, unlabeled=unlabeled)
    self._given = place(values), images
    self._new = True
    state = place([member.state for member in members])
    members.clear()
    return state

  def prepare(self, step: int, state) -> bool:
    del step
    if self.compiled is None:
      members = sharding.over_batch(self.program.mesh)
      self.compiled = compile_step(self._step, state, self._given, members)
    new, self._new = self._new, False
    return new

  def given(self, run: int) -> tuple:
    return self._given_of[run]

  def member(self, state, run: int) -> TrainState:
    return sharding.settle(self._take(state, run))

  def metrics(self, metrics: dict, run: int) -> dict:
    return {key: x[run] for key, x in jax.device_get(metrics).items()}

  def row(self, metrics: dict, run: int, step: int) -> dict:
    del step
    return self.metrics(metrics, run)
