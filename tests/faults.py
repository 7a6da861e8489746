"""Hurts real runs in every way we know, and looks whether anything is lost.

  make faults, or python tests/faults.py [--seed N] [--only disk] [--out FILE]

After each fault the finished run equals an undisturbed one bit for bit, or a
line says what is wrong and everything is still there. Prints a table, and ends
with 1 if something was lost. The program is main.py with a network that starts
quickly (tests/tiny_main.py). A few of the faults are part of `make test`.
"""

import argparse
from concurrent import futures
import functools
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
import traceback

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

import conftest  # noqa: F401  Compiles fast.
import faults_buckets as buckets
import faults_disks as disks
import faults_files as files
import faults_others as others
import faults_signals as signals
import lab as lab_lib
import runs
import tiny_main

from flatmatch_jax import models

# It has averaged weights, momenta and averaged gradients, and no strong views,
# which take seconds to trace.
METHOD = 'method=pseudo_label+flatmatch_e'
COMMAND = {
  'config': f'--config={runs.ROOT}/configs/digits.py:{METHOD},seed=1',
  'main': runs.ROOT / 'tests' / 'tiny_main.py',
  # So low that guesses are used from the first step on.
  'args': ('--config.steps=60', '--config.method_args.threshold=0.1'),
}


UNSHARE = ('unshare', '--map-root-user', '--mount')
PROBE = ('mount', '-t', 'tmpfs', 'tmpfs', '/tmp')


def is_permitted(*command):
  try:
    return not subprocess.call(command, stderr=subprocess.DEVNULL)
  except FileNotFoundError:
    return False


def with_arguments(function, *args, **options):
  return lambda lab: function(lab, *args, **options)


FAULTS = {
  'SIGKILL, again and again in one run': signals.kills,
  'SIGTERM': with_arguments(signals.stops, signal.SIGTERM),
  'Ctrl-C': with_arguments(signals.stops, signal.SIGINT),
  'one of two processes killed': with_arguments(signals.one_of_two, 1),
  'process 0 of two killed': with_arguments(signals.one_of_two, 0),
  'full disk (tmpfs)': disks.full_disk,
  'limited files (RLIMIT_FSIZE)': disks.limited_files,
  'read-only workdir': disks.read_only,
  'truncated latest checkpoint': with_arguments(
    files.damage, files.truncate, 4
  ),
  'bits flipped in the latest checkpoint': with_arguments(
    files.damage, files.flip_bits, 5
  ),
  'deleted latest checkpoint': with_arguments(files.damage, files.delete, 1),
  'all checkpoints damaged': files.damage_all,
  'dataset file damaged, .npz': with_arguments(
    files.change_data, 'npz', files.make_npz, METHOD
  ),
  'dataset file damaged, folder': with_arguments(
    files.change_data, 'folder', files.make_images, f'{METHOD},image_size=8'
  ),
  'two runs on one workdir': others.two_runs,
  'clock jumps': others.clock_jumps,
  'bucket: SIGKILL while saving': buckets.kills,
  'bucket: 429, 503, connections reset, answers lost': buckets.storms,
  'bucket: gone, no permission, no quota': buckets.refusals,
}


def attempt(lab, name, fault):
  """A row of the table, and whether nothing was lost."""
  kept = True
  try:
    tried, outcome = fault(lab)
  except lab_lib.NotTriedError as reason:
    tried, outcome = 0, f'not tried: {reason}'
  except Exception:
    traceback.print_exc()
    tried, outcome, kept = '–', 'LOST: see above', False
  row = f'| {name} | {tried} | {outcome} |'
  print(row, file=sys.stderr, flush=True)  # It takes long.
  return row, kept


def main():
  parser = argparse.ArgumentParser(description='Hurts real runs.')
  parser.add_argument('--seed', type=int, default=time.time_ns() % 10**6)
  parser.add_argument('--only', default='', help='faults with one of WORD,…')
  parser.add_argument('--out', help='a file for the table')
  args = parser.parse_args()
  words = args.only.split(',')
  chosen = {
    name: fault
    for name, fault in FAULTS.items()
    if any(word in name for word in words)
  }
  if not chosen:
    parser.error(f'no fault has {args.only!r} in it: {", ".join(FAULTS)}')
  print(f'python tests/faults.py --seed {args.seed}', flush=True)
  models.create = tiny_main.create
  # Tolerant: what a fault leaves behind must not hide its outcome.
  with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
    folder = pathlib.Path(name)
    lab = lab_lib.start(folder, folder / 'finished', args.seed, **COMMAND)
    with futures.ThreadPoolExecutor(2) as pool:
      rows = list(
        pool.map(functools.partial(attempt, lab), chosen, chosen.values())
      )
  lines = ['| fault | times tried | outcome |', '|---|---|---|']
  table = '\n'.join([*lines, *(row for row, _ in rows)])
  print(table)
  if args.out:
    pathlib.Path(args.out).write_text(f'{table}\n')
  return not all(kept for _, kept in rows)


if __name__ == '__main__':
  # Mounts of our own: none is left behind, and no rights are needed.
  if not lab_lib.can_mount() and is_permitted(*UNSHARE, *PROBE):
    os.environ['FAULTS_MAY_MOUNT'] = 'yes'
    os.execvp(UNSHARE[0], [*UNSHARE, sys.executable, *sys.argv])
  sys.exit(main())
