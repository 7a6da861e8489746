"""Faults: processes that are killed, or asked to stop."""

import signal
import time

import processes
import runs

from flatmatch_jax.run.workdir import Workdir
from flatmatch_jax.training import load

# In the start, before a file of a checkpoint is made, written, renamed or
# deleted, between two steps, and at any moment of training.
KINDS = ('start', 'write', 'step', 'moment')


def half_written(workdir):
  """Folders that Orbax has begun and not finished; again is another."""
  found = (workdir / 'checkpoints').glob('*tmp*')
  return {(path.name, path.stat().st_ino) for path in found}


def kill(lab, workdir, random, kind):
  """SIGKILL at a random place of this kind, soon: many are to follow.

  Returns whether it was in time, and whether it left half a checkpoint.
  """
  before = half_written(workdir)
  if kind == 'start':
    process = runs.start(lab.folder, lab.command(workdir))
    time.sleep(random.uniform(0, 5))
  else:
    place, most = ('write', 30) if kind == 'write' else ('step', 9)
    process = lab.stop(workdir, place, random.integers(1, most + 1))
  if kind == 'moment':
    process.send_signal(signal.SIGCONT)
    time.sleep(random.uniform(0, 0.3))
  code, stderr = runs.go_on(process, signal.SIGKILL)
  assert code in (0, -signal.SIGKILL), stderr
  return code != 0, bool(half_written(workdir) - before)


def kills(lab, times=24):
  """One run, long enough for all of them."""
  lab = lab.other('kills-finished', '--config.steps=300')
  random, workdir = lab.random('kills'), lab.folder / 'kills'
  found = [
    kill(lab, workdir, random, KINDS[n % len(KINDS)]) for n in range(times)
  ]
  killed, torn = (sum(column) for column in zip(*found, strict=True))
  lab.finish(workdir)
  assert killed >= 20, f'The run was over after {killed}.'
  assert torn, 'None fell in a write.'
  return killed, (
    f'the same bits; {torn} fell in the write of a checkpoint, and left half '
    'of it behind'
  )


def ask_to_stop(lab, workdir, number, place, count=1):
  """SIGTERM or Ctrl-C: what was computed is saved."""
  code, stderr = runs.go_on(lab.stop(workdir, place, count), number)
  assert code == 128 + number, stderr
  assert 'Traceback' not in stderr, stderr
  saved = f'step {runs.saved_steps(workdir)[-1]} is saved. The same command'
  at_once = 'Stopping after this step is saved'
  assert -1 < stderr.find(at_once) < stderr.find(saved), stderr
  assert not (workdir / 'result.json').exists()


def stops(lab, number):
  name = number.name.lower()
  random, workdir = lab.random(name), lab.folder / name
  places = {'compile': 1, 'step': 3, 'evaluate': 1, 'write': 12}
  for place, most in places.items():
    ask_to_stop(lab, workdir, number, place, random.integers(1, most + 1))
  lab.finish(workdir)
  return len(places), 'saved and said so; the same bits'


def one_of_two(lab, number, times=2):
  """Kills a process of two; the other must end, and say why.

  Without process 0 JAX itself may be the first to notice, and aborts.
  """
  whole, workdir = (
    lab.folder / f'pair-{number}' / name for name in ('whole', 'run')
  )
  env = processes.environment(lab.folder)

  def train(workdir):
    for ended in processes.run(2, lab.command(workdir), env):
      assert ended.returncode == 0, ended.output

  train(whole)
  random, aborted = lab.random(f'pair-{number}'), 0
  for _ in range(times):
    main, *args = lab.command(workdir)
    step = str(random.integers(4, 12))
    told = [main, step, 'SIGKILL', str(number), *args]
    ended = processes.run(2, told, env)
    assert ended[number].returncode == -signal.SIGKILL, ended[number].output
    code, said = ended[1 - number]
    by_jax = not number and code == -signal.SIGABRT
    assert by_jax or code == 1, said
    words = 'another task died' if by_jax else 'error: lost another process'
    assert words in said, said
    assert 'Traceback' not in said, said
    aborted += by_jax
  train(workdir)
  state = load.load_run(Workdir(whole)).state
  runs.assert_same_run(workdir, whole, state, lab.steps)
  way = f' ({aborted} by the abort of JAX)' if aborted else ' with a line'
  return times, f'the other ended{way}; started again, the same bits'
