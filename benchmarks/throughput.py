"""How fast steps are, and which part of one takes the time.

  python benchmarks/throughput.py --out docs/throughput.json \\
      --page docs/speed.md
  python benchmarks/throughput.py --batch_size 64 --devices 1,2

--devices are those of a CPU that share its cores; of several numbers all are
measured in turns, and compared with the first, which must be 1. --out keeps a
result for each network, batch and number of devices; --page gets a table of all
that are in it.

Whole steps of several methods are compiled as `loop.py` compiles them, and so
are two of their parts alone: sampling with augmentation, and all that is done
with whole trees of parameters (ε, buffer, optimizer, averages, norms, the look
whether all is finite). What is left is the network, forward and backward. Each
runs once a round, in an order drawn anew, so that whatever else the machine
does, and whatever ran before, falls on all alike; ratios and shares are taken
round by round, and their median and quartiles reported. CPU seconds, of all
threads, hardly feel other programs and stand beside those of the clock.

The host's part is measured in the loop of `loop.py` without what is done at
intervals only: its thread's CPU time a step. The device is given its next step
while one is running, so that this is work beside the step, not added to it.
"""

import argparse
import json
import os
import pathlib
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from benchmarks import pages, steps
from configs import cifar10
from flatmatch_jax.data import resident
from flatmatch_jax.run import watch
from flatmatch_jax.run.progress import Progress
from flatmatch_jax.system import cli, files, sharding, signals, startup
from flatmatch_jax.types import UserError

METHODS = 'fixmatch,freematch,flatmatch,flatmatch_e'
_HOST_STEPS = 3
_MARKS = '<!-- benchmarks/throughput.py -->', '<!-- end -->'


class Timed:
  """A compiled function that is run again and again on its own result."""

  def __init__(self, function, state, *given):
    began = time.perf_counter()
    jitted = jax.jit(function, donate_argnums=0)
    self.compiled = jitted.lower(state, *given).compile()
    self.compile_seconds = time.perf_counter() - began
    self.state, self._given = state, given

  def run(self) -> tuple[float, float]:
    """Seconds by the clock, and of CPUs."""
    began, used = time.perf_counter(), time.process_time()
    self.state, rest = self.compiled(self.state, *self._given)
    jax.block_until_ready((self.state, rest))
    return time.perf_counter() - began, time.process_time() - used

  def counts(self) -> dict[str, float]:
    """What XLA counts on all devices; loops, RandAugment's, once."""
    cost = self.compiled.cost_analysis()
    devices = len(jax.tree.leaves(self.state)[0].devices())
    return {
      'flops': devices * cost['flops'],
      'bytes': devices * cost['bytes accessed'],
    }


def build(names, model, batch_size, devices=None) -> dict[str, Timed]:
  """Whole steps by method, and the parts of each: 'sample', 'update METHOD'."""
  timed = {}
  for name in names:
    setup = steps.create(name, 'split', model, batch_size, devices=devices)
    state, data = steps.arrays(setup)
    sample = lambda state, data, setup=setup: (
      state.replace(step=state.step + 1),
      setup.sample(data, state),
    )
    if 'sample' not in timed:  # The same for all: two views.
      copy = jax.tree.map(jnp.copy, state)
      timed['sample'] = Timed(sample, copy, data)
    copy = jax.tree.map(jnp.copy, state)
    timed[f'update {name}'] = Timed(
      steps.update(setup), copy, steps.gradients(state)
    )
    timed[name] = Timed(steps.step(setup), state, data)
    print(
      f'{name}: compiled in {timed[name].compile_seconds:.0f} s',
      file=sys.stderr,
      flush=True,
    )
  return timed


def rounds(timed: dict[Any, Timed], seconds: float) -> dict[Any, np.ndarray]:
  """[rounds, 2] of clock and CPU seconds by name; at least three rounds."""
  names, draw = list(timed), np.random.RandomState(0)
  for name in names:
    timed[name].run()
  found: dict[Any, list] = {name: [] for name in names}
  end = time.perf_counter() + seconds
  while len(found[names[0]]) < 3 or time.perf_counter() < end:
    for number in draw.permutation(len(names)):
      found[names[number]].append(timed[names[number]].run())
  return {name: np.array(rows) for name, rows in found.items()}


def host_seconds(step: Timed) -> tuple[float, float]:
  """CPU seconds of the loop's thread, and seconds by the clock, a step."""
  progress = Progress([], 0, _HOST_STEPS, 1)
  watcher = watch.Watch(cifar10.get_config(), np.full(10, 0.1))
  feed = resident.Feed(step._given[0])
  state, pending = step.state, None
  jax.block_until_ready(state)
  with signals.stop_requests() as request:
    began, used = time.perf_counter(), time.thread_time()
    for number in range(_HOST_STEPS):
      state, metrics = sharding.settle(step.compiled(state, next(feed)))
      if pending is not None:
        watcher.step(number, pending, lambda: None)
      pending = metrics
      progress.step()
      request.at_this_step()
    used = time.thread_time() - used
    jax.block_until_ready(state)
    clock = time.perf_counter() - began
  step.state = state
  return used / _HOST_STEPS, clock / _HOST_STEPS


def check_devices(counts: list[int]) -> list[int]:
  """The numbers of devices, if they can be compared, and are there."""
  there, cores = jax.device_count(), len(os.sched_getaffinity(0))
  too_many = max(counts) > min(there, cores)
  if too_many or min(counts) < 1 or (len(counts) > 1 and counts[0] != 1):
    raise UserError(
      f'--devices {",".join(map(str, counts))}: there are {there} devices and '
      f'{cores} cores; give no more, and of several numbers 1 first.'
    )
  return list(dict.fromkeys(counts))


def images_of(names: list[str], model: str, batch_size: int) -> int:
  """Images of a step; UserError where not all methods take the same."""
  if batch_size < 1:
    raise UserError(f'--batch_size {batch_size} must be at least 1.')
  made = [steps.create(name, 'split', model, batch_size) for name in names]
  takes = lambda setup: (
    setup.config.unlabeled_batch_size * bool(setup.program.views),
    setup.program.views,
    bool(setup.program.pretrain_step),  # A batch with fixed labels, too.
  )
  for name, setup in zip(names, made, strict=True):
    if takes(setup) != takes(made[0]):
      raise UserError(
        f'--methods: {name} takes {takes(setup)} as unlabeled images, views of '
        f'each and fixed labels, {names[0]} {takes(made[0])}; compare those '
        'that take equal ones.'
      )
  return batch_size + takes(made[0])[0]


def spread(values) -> list[float]:
  """Lower quartile, median and upper quartile."""
  return [float(f'{x:.4g}') for x in np.percentile(values, (25, 50, 75))]


def row(name, first, times, timed, images, before=None) -> dict:
  """All about one method, compared with the `first`.

  `before` are the times of all with another number of devices.
  """
  whole, wall, cpu = times[name], times[name][:, 0], times[name][:, 1]
  update, sample = times[f'update {name}'], times['sample']
  host, clock = host_seconds(timed[name])
  counts = {
    'whole': timed[name].counts(),
    'sample': timed['sample'].counts(),
    'update': timed[f'update {name}'].counts(),
  }
  network = whole - sample - update
  parts = {'sample': sample, 'network': network, 'update': update}
  return {
    'method': name,
    'ms': spread(1e3 * wall),
    'cpu_ms': spread(1e3 * cpu),
    'images_per_second': spread(images / wall),
    'gflop_per_cpu_second': spread(counts['whole']['flops'] / cpu / 1e9),
    'ratio': spread(wall / times[first][:, 0]),
    'cpu_ratio': spread(cpu / times[first][:, 1]),
    'faster': spread(before[name][:, 0] / wall) if before else None,
    'shares': {
      part: spread(values[:, 0] / wall) for part, values in parts.items()
    },
    'cpu_shares': {
      part: spread(values[:, 1] / cpu) for part, values in parts.items()
    },
    'host_ms': round(1e3 * host, 3),
    'host_share': float(f'{host / clock:.3g}'),
    'counts': counts,
    'compile_seconds': round(timed[name].compile_seconds, 1),
  }


def table(results: list[dict]) -> str:
  """The medians of all results in Markdown, with quartiles of the ratio."""
  head = (
    'images, devices, method, ms, images/s, × first, quartiles, '
    'sampling %, update %, host %'
  )
  lines = [head.split(', ')]
  lines.append(['---'] * len(lines[0]))
  for result, r in ((one, r) for one in results for r in one['rows']):
    low, middle, high = r['ratio']
    lines.append(
      [
        batch_of(result),
        str(result['devices']),
        r['method'],
        f'{r["ms"][1]:.0f}',
        f'{r["images_per_second"][1]:.1f}',
        f'{middle:.2f}',
        f'{low:.2f}–{high:.2f}',
        f'{100 * r["shares"]["sample"][1]:.1f}',
        f'{100 * r["shares"]["update"][1]:.1f}',
        f'{100 * r["host_share"]:.1f}',
      ]
    )
  text = '\n'.join(f'| {" | ".join(line)} |' for line in lines)
  rounds = '; '.join(
    f'{batch_of(result)} on {result["devices"]}: {result["rounds"]}'
    for result in results
  )
  return f'{text}\n\nRounds (images on devices): {rounds}.'


def batch_of(result: dict) -> str:
  batch = result['batch_size']
  return f'{batch} + {result["images"] - batch}'


def kept(path: pathlib.Path, new: list[dict]) -> list[dict]:
  """The results in a file, new ones among them in the place of their like."""
  key = lambda one: (one['model'], one['batch_size'], one['devices'])
  old = json.loads(path.read_text()) if path.exists() else []
  results = {key(one): one for one in old + new}
  return [results[name] for name in sorted(results)]


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--methods', default=METHODS, help='the first is 1')
  parser.add_argument('--model', default='wrn_28_2')
  parser.add_argument('--batch_size', type=int, default=8, help='labeled')
  parser.add_argument(
    '--devices', default='', help='of a CPU, such as 1,2; else as by main.py'
  )
  parser.add_argument('--seconds', type=float, default=90, help='of rounds')
  parser.add_argument('--out', type=pathlib.Path, help='JSON file')
  parser.add_argument('--page', type=pathlib.Path, help='to put the table into')
  args = parser.parse_args()
  if args.out:
    files.check_target('--out', args.out)
  if args.page:
    pages.check_marks(args.page, _MARKS)
  names = args.methods.split(',')
  config = steps.config_of(names[0], args.model, args.batch_size)
  try:
    counts = [int(number) for number in args.devices.split(',') if number]
  except ValueError:
    raise UserError(
      f'--devices {args.devices} must be whole numbers, such as 1,2.'
    ) from None
  config.cpu_devices = max(counts, default=0)
  startup.use_cores(config)
  counts = check_devices(counts or [jax.device_count()])
  images = images_of(names, args.model, args.batch_size)
  load = os.getloadavg()[0]
  timed = {
    number: build(names, args.model, args.batch_size, number)
    for number in counts
  }
  together = {(n, name): timed[n][name] for n in counts for name in timed[n]}
  measured = rounds(together, args.seconds)
  times = {n: {name: measured[n, name] for name in timed[n]} for n in counts}
  results = []
  for number in counts:
    before = times[counts[0]] if number != counts[0] else None
    results.append(
      {
        'model': args.model,
        'batch_size': args.batch_size,
        'images': images,
        'rounds': len(times[number][names[0]]),
        'devices': number,
        'cores': len(os.sched_getaffinity(0)),
        'load_before': load,
        'rows': [
          row(name, names[0], times[number], timed[number], images, before)
          for name in names
        ],
      }
    )
  print(table(results))
  if args.out:
    results = kept(args.out, results)
    with files.replacing(args.out, 'w') as file:
      file.write(json.dumps(results, indent=1) + '\n')
  if args.page:
    pages.put_between(args.page, _MARKS, table(results))


if __name__ == '__main__':
  with cli.errors_as_lines():
    main()
