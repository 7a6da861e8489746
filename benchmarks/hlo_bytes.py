"""Which operations of a compiled program carry its bytes.

  python benchmarks/tpu_compile.py … --hlo program.txt
  python benchmarks/hlo_bytes.py program.txt

Sums what the instructions read and write, with the padding of a TPU's tiles,
by the part of the program and by JAX's operation. Loops count once, as in XLA's
own count. What a gather takes from counts as what it takes. Beside them stand
the cycles that the compiler expects, where it says so: estimates, which need
not grow with the arrays.
"""

import argparse
import collections
import pathlib
import re
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from benchmarks import hlo
from flatmatch_jax.system import cli
from flatmatch_jax.types import UserError

_FREE = (
  'parameter',
  'get-tuple-element',
  'tuple',
  'bitcast',
  'constant',
  'while',
  'conditional',
  'call',
  'after-all',
  'partition-id',
)


def padded(shape: str) -> int:
  """Bytes of the arrays of a type, in whole tiles."""
  return sum(hlo.sizes(shape, in_tiles=True))


def part(source: str, operation: str) -> str:
  """Where in the step an instruction belongs, by the name JAX gave it."""
  way = 'backward' if 'transpose(' in source else 'forward'
  last = source.rsplit('/', 1)[-1]
  if 'jvp(' in source or 'WideResNet' in source:
    kind = 'norms, sums, activations'
    if last in ('conv_general_dilated', 'dot_general'):
      kind = 'convolutions with what is fused into them'
    return f'network {way}: {kind}'
  if '/while/' in source:
    return 'RandAugment, a turn of its loops'
  if 'gather' in last or 'take' in source or 'data.' in source:
    return 'taking and shifting images'
  if not source:
    return f'copies between memories ({operation})'
  return 'all else: losses, optimizer, averages'


def instructions(text: str):
  """Of what is executed: bytes, cycles, operation, JAX's and XLA's name."""
  _, bodies = hlo.parse(text)
  lines = {line[0]: line for body in bodies.values() for line in body}
  inner = set()
  for body in bodies.values():
    for _, _, operation, rest in body:
      if operation not in ('while', 'conditional', 'call'):
        inner.update(re.findall(r'(?:calls|to_apply)=%([^\s,]+)', rest))
  for name, body in bodies.items():
    if name in inner:
      continue
    for instruction, shape, operation, rest in body:
      if operation in _FREE or operation.endswith('-done'):
        continue
      given = [lines[name][1] for name in hlo.operands(rest) if name in lines]
      source = hlo.source(rest)
      size, read = padded(shape), [padded(x) for x in given]
      if source.endswith('gather'):
        read = [min(x, size) for x in read]
      cycles = re.search(r'"estimated_cycles":"(\d+)"', rest)
      expected = int(cycles[1]) if cycles else 0
      yield size + sum(read), expected, operation, source, instruction


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('files', nargs='+', type=pathlib.Path)
  for file in parser.parse_args().files:
    text = file.read_text(errors='replace') if file.is_file() else ''
    if 'ENTRY %' not in text:
      raise UserError(
        f'{file} is not the text of a compiled program; make one by '
        '`python benchmarks/tpu_compile.py … --hlo FILE`.'
      )
    sizes: collections.Counter = collections.Counter()
    number: collections.Counter = collections.Counter()
    cycles: collections.Counter = collections.Counter()
    for size, some, operation, source, _ in instructions(text):
      sizes[part(source, operation)] += size
      cycles[part(source, operation)] += some
      number[part(source, operation)] += 1
    print(
      f'{file}: {sum(sizes.values()) / 1e9:.2f} GB, '
      f'{sum(cycles.values()) / 1e6:.1f} Mcycles'
    )
    for name, size in sizes.most_common():
      print(
        f'{size / 1e6:10.1f} MB {cycles[name] / 1e6:8.2f} Mcycles '
        f'{number[name]:5} {name}'
      )


if __name__ == '__main__':
  with cli.errors_as_lines():
    main()
