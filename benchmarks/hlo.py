"""What a compiled program sends between devices, read from its text."""

import functools
import math
import re
from typing import NamedTuple

KINDS = (
  'all-reduce',
  'all-gather',
  'reduce-scatter',
  'collective-permute',
  'collective-broadcast',
  'all-to-all',
  'ragged-all-to-all',
)
_BODY = re.compile(r'(?:ENTRY )?%(\S+) \(.*\{$')
# A name, its type, an operation and what it is applied to.
_LINE = re.compile(r'\s*(?:ROOT )?%(\S+) = (.*?) ([a-z][a-z0-9-]*)\((.*)')
_CALL = re.compile(
  r'(?:body|condition|calls|to_apply|\w+_computations?)=(\{[^}]*\}|\S+)'
)
# An element's type, its array's sizes, and on a TPU their order and tiles.
_ARRAY = re.compile(
  r'([a-z]\w*)\[([^\]]*)\](?:\{([\d,]*)(?::T\((\d+),(\d+)\))?)?'
)
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


class Collective(NamedTuple):
  """One instruction by which devices exchange arrays."""

  kind: str  # One of KINDS.
  # Of a device's arrays before it or after, whichever are larger: what is
  # gathered, or what is reduced.
  bytes: int
  # How often a run of the program executes it. Loops multiply it by their
  # turns; where XLA does not know them, by one. Of a condition both branches
  # count.
  times: int
  operation: str  # The name of the operation in JAX that asked for it.
  arrays: tuple[int, ...]  # The bytes of each array.


def collectives(text: str) -> list[Collective]:
  """The collectives of `compiled.as_text()`.

  Those in two parts, such as all-gather-start and -done, are one.
  """
  entry, bodies = parse(text)
  lines = {line[0]: line for body in bodies.values() for line in body}
  times = _times(entry, bodies)
  found = []
  for body, content in bodies.items():
    for _, shape, operation, rest in content:
      kind = operation.removesuffix('-done')
      if kind not in KINDS:
        continue
      given = operands(rest)
      if kind != operation:  # The first part has the arrays.
        given = operands(lines[given[0]][3])
      arrays = max(
        sizes(shape),
        sizes(' '.join(lines[name][1] for name in given)),
        key=sum,
      )
      found.append(
        Collective(kind, sum(arrays), times(body), source(rest), arrays)
      )
  return found


def totals(found: list[Collective]) -> dict[str, tuple[int, int]]:
  """How many collectives of each kind a program executes, and their bytes."""
  return {
    kind: (
      sum(c.times for c in of_kind),
      sum(c.times * c.bytes for c in of_kind),
    )
    for kind in KINDS
    if (of_kind := [c for c in found if c.kind == kind])
  }


def parse(text):
  """The name of the entry, and by name all computations as lists of lines."""
  entry, body = '', None
  bodies: dict[str, list] = {}
  for line in text.splitlines():
    if start := _BODY.match(line):
      body = bodies.setdefault(start[1], [])
      entry = start[1] if line.startswith('ENTRY') else entry
    elif body is not None and (found := _LINE.match(line)):
      body.append(found.groups())
  return entry, bodies


def operands(rest):
  """The names in the parentheses that `rest` begins in."""
  depth = 1
  for end, letter in enumerate(rest):
    depth += (letter == '(') - (letter == ')')
    if not depth:
      return re.findall(r'%([^\s,()]+)', rest[:end])
  raise ValueError(f'No end of the operands in {rest!r}.')


def source(rest):
  """The name that JAX gave to the operation of an instruction, or ''."""
  _, _, after = rest.partition('op_name="')
  return after.partition('"')[0]


def sizes(shape, in_tiles=False):
  """Bytes of an array, or of each in a tuple.

  `in_tiles` fills up the last two dimensions to whole ones of a TPU's tiles.
  """
  found = []
  for kind, dimensions, order, rows, columns in _ARRAY.findall(shape):
    size = [int(d) for d in re.findall(r'\d+', dimensions)]
    if in_tiles and rows and len(size) > 1:
      last, before = (int(d) for d in order.split(',')[:2])
      size[last] = math.ceil(size[last] / int(columns)) * int(columns)
      size[before] = math.ceil(size[before] / int(rows)) * int(rows)
    found.append(math.prod(size) * _bits(kind) // 8)
  return tuple(found)


def _bits(kind):
  """Of an element; the width is the first number of the name: f8e4m3fn."""
  width = re.search(r'\d+', kind)
  return 8 if kind == 'pred' else int(width[0]) if width else 0  # Tokens: 0.


def _times(entry, bodies):
  """Returns a function: how often a computation is executed."""
  callers: dict = {}
  for caller, content in bodies.items():
    for *_, operation, rest in content:
      trips = _TRIPS.search(rest) if operation == 'while' else None
      called = ' '.join(_CALL.findall(rest))
      for name in bodies.keys() & set(re.findall(r'%([^\s,()}]+)', called)):
        callers.setdefault(name, []).append(
          (caller, int(trips[1]) if trips else 1)
        )

  @functools.cache
  def times(name):
    return (name == entry) + sum(
      trips * times(caller) for caller, trips in callers.get(name, [])
    )

  return times
