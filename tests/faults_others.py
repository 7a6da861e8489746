"""Faults: another run in the same folder, and clocks that are set."""

import re

import lab as lab_lib
import runs

DAY = 24 * 60 * 60

# Of the small network that tests/faults.py trains.
EVALUATE = """
import sys
sys.path.insert(0, sys.argv.pop(1))
import tiny_main
from flatmatch_jax import evaluate, models
models.create = tiny_main.create
evaluate.main()
"""


def two_runs(lab):
  """The second is refused, readers are not."""
  workdir = lab.folder / 'two'
  first = lab.stop(workdir, 'step', 9)
  before = runs.hashes(workdir)
  for _ in range(2):
    found = lab.run(workdir)
    lab_lib.assert_refused(found, 'in use', f'process {first.pid} on ')
  assert runs.hashes(workdir) == before
  read = ['-c', EVALUATE, runs.ROOT / 'tests', '--workdir', workdir]
  done = runs.run(lab.folder, map(str, read))
  assert done.returncode == 0, done.stderr
  code, stderr = runs.go_on(first)
  assert code == 0, stderr
  runs.assert_same_run(workdir, lab.finished, lab.state, lab.steps)
  return 2, 'refused in a line; the first ended with the same bits'


def clock_jump(lab, workdir, seconds):
  code, said = lab.hurt(workdir, 'clock', seconds)
  assert code == 0, said
  assert not re.search(r'-\d+ day|-\d+:|-\d+ (s|images)', said), said
  runs.assert_same_run(workdir, lab.finished, lab.state, lab.steps)


def clock_jumps(lab):
  jumps = (-3600, -20000 * DAY, 10000 * DAY)
  for number, seconds in enumerate(jumps):
    clock_jump(lab, lab.half(f'clock-{number}'), seconds)
  return len(jumps), 'the same bits; no negative times'
