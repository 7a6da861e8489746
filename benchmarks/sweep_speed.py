"""Members of a sweep side by side against one after another.

  python benchmarks/sweep_speed.py [--members 4] [--model wrn_10_1]

On digits, FlatMatch, members with other seeds and ρ, in one process and in
turns: `run` is the step that main.py compiles, once for each member; `stack of
1` the step that a sweep compiles once for all and calls member by member;
`stack of M` the vmapped one. Prints the seconds to compile each, milliseconds
of a step of one member (the median of the rounds), and what a sweep of --steps
steps comes to: on the clock, and in seconds of all cores, which other programs
beside change less.
"""

import argparse
import os
import pathlib
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import jax
import jax.numpy as jnp
import numpy as np

from configs import digits
from flatmatch_jax import data as data_lib
from flatmatch_jax.data import resident
from flatmatch_jax.system import sharding
from flatmatch_jax.training import program, setup, stacked, traced

NAMES = ['recipe_args.rho']


def now() -> np.ndarray:
  """Seconds on the clock, and of all cores."""
  return np.array([time.perf_counter(), time.process_time()])


def compiled(function, *args):
  began = now()
  jitted = jax.jit(function, donate_argnums=0)
  return jitted.lower(*args).compile(), now() - began


def stack(functions, data, count, mesh):
  """State and given of `count` members, placed."""
  place = lambda rows: jax.device_put(
    jax.tree.map(lambda *x: jnp.stack(x), *rows), sharding.over_batch(mesh)
  )
  values = [[jnp.float32(0.01 * (i + 1))] for i in range(count)]
  states = [
    functions.init(jax.random.key(i), value) for i, value in enumerate(values)
  ]
  indices = place([(data.labeled, data.unlabeled)] * count)
  mine = data._replace(labeled=indices[0], unlabeled=indices[1])
  return place(states), (place(values), mine)


def measure(step, state, given, count):
  """Milliseconds of a step of one member, twice as `now`."""
  began = now()
  for _ in range(count):
    state, metrics = step(state, given)
  jax.block_until_ready(metrics)
  return state, 1e3 * (now() - began) / count


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--members', type=int, default=4)
  parser.add_argument('--model', default='wrn_10_1')
  parser.add_argument('--rounds', type=int, default=7)
  parser.add_argument('--steps', type=int, default=400)
  args = parser.parse_args()
  config = digits.get_config()
  config.model = args.model
  dataset = data_lib.from_config(config)
  split = setup.choose_split(config, dataset)
  mesh = sharding.make_mesh()
  data = resident.place(dataset, split, sharding.replicated(mesh))
  info = setup.info_of(dataset, split)
  shape = dataset.train_images.shape[1:]
  functions = traced.make_functions(config, NAMES, info, shape)
  single = program.create(config, info, shape)
  sample = program.make_sample(config, single.views, None)
  side_by_side = stacked.over_members(functions.step, mesh)

  # Name: function, state, given, members in a call, compilations of a sweep.
  ways = {
    'run': (
      lambda state, given: single.step(state, sample(given, state)),
      single.init(jax.random.key(0)),
      data,
      1,
      args.members,
    )
  }
  for count in (mesh.size, mesh.size * args.members):
    given = stack(functions, data, count, mesh)
    ways[f'stack of {count}'] = (side_by_side, *given, count, 1)
  steps, seconds, states = {}, {}, {}
  for name, (function, state, given, *_) in ways.items():
    steps[name], seconds[name] = compiled(function, state, given)
    states[name], _ = measure(steps[name], state, given, 1)
  times: dict[str, list[np.ndarray]] = {name: [] for name in ways}
  for _ in range(args.rounds):
    for name, (_, _, given, count, _) in ways.items():
      calls = max(1, 12 // count)
      states[name], took = measure(steps[name], states[name], given, calls)
      times[name].append(took / count)
  load = os.getloadavg()[0]
  print(f'{mesh.size} {jax.default_backend()} devices, load {load:.1f}')
  print('             | on the clock               | of all cores')
  print('way          | compile s | step ms | sweep s | the same')
  for name, (*_, compilations) in ways.items():
    step = np.median(times[name], axis=0)
    total = (
      compilations * seconds[name] + args.members * args.steps * step / 1e3
    )
    columns = [
      f'{c:9.1f} | {s:7.1f} | {t:7.0f}'
      for c, s, t in zip(seconds[name], step, total, strict=True)
    ]
    print(' | '.join([f'{name:12}', *columns]))


if __name__ == '__main__':
  main()
