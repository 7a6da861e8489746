"""Which operations of a step take the time, by a trace of a few steps.

  python benchmarks/op_times.py --model wrn_28_2 --batch_size 8

Sums the time that the CPU's threads spend in each instruction of the compiled
step, by what JAX asked for: convolutions forward and backward, norms and
activations, copies into other layouts, and so on. Where other programs run,
only shares mean something.
"""

import argparse
import collections
import gzip
import json
import pathlib
import sys
import tempfile

import jax

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from benchmarks import hlo, steps
from benchmarks.throughput import Timed


def kind(operation: str, source: str) -> str:
  """What an instruction is for, by its operation and the name JAX gave it."""
  last = source.rsplit('/', 1)[-1]
  in_network = 'WideResNet' in source or 'jvp(' in source
  way = 'backward' if 'transpose(' in source else 'forward'
  if last in ('conv_general_dilated', 'dot_general'):
    return f'convolutions {way}'
  if in_network:
    what = 'sums' if last == 'reduce_sum' else 'norms, activations, additions'
    return f'{what} {way}'
  if not source:
    return 'copies, most into other layouts'
  if 'cond' in operation or 'gather' in last or 'scatter' in last:
    return 'sampling and augmentation'
  return 'all else: losses, optimizer, averages'


def sources(text: str) -> dict[str, tuple[str, str]]:
  """Operation and JAX's name of each instruction of a compiled program."""
  _, bodies = hlo.parse(text)
  found = {}
  for body in bodies.values():
    for name, _, operation, rest in body:
      found[name] = operation, hlo.source(rest)
  return found


def total(events, known) -> collections.Counter:
  """Microseconds by kind, of those events that are `known` instructions."""
  spent: collections.Counter = collections.Counter()
  for event in events:
    if event.get('ph') == 'X' and event['name'] in known:
      spent[kind(*known[event['name']])] += event['dur']
  return spent


def trace(step: Timed, number: int) -> list[dict]:
  """The events of `number` steps."""
  with tempfile.TemporaryDirectory() as folder:
    with jax.profiler.trace(folder):
      for _ in range(number):
        step.run()
    (file,) = pathlib.Path(folder).glob('plugins/profile/*/*.trace.json.gz')
    with gzip.open(file) as content:
      return json.load(content)['traceEvents']


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--method', default='fixmatch')
  parser.add_argument('--model', default='wrn_28_2')
  parser.add_argument('--batch_size', type=int, default=8, help='labeled')
  parser.add_argument('--steps', type=int, default=3)
  args = parser.parse_args()
  setup = steps.create(args.method, 'split', args.model, args.batch_size)
  step = Timed(steps.step(setup), *steps.arrays(setup))
  step.run()
  spent = total(trace(step, args.steps), sources(step.compiled.as_text()))
  print('| part of the step | share |\n|---|---|')
  for name, value in spent.most_common():
    print(f'| {name} | {100 * value / spent.total():.1f}% |')


if __name__ == '__main__':
  main()
