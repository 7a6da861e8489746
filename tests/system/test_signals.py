"""Requests to stop, where whoever read the log has stopped before."""

import os
import signal
import subprocess
import sys
import time

import pytest
import runs

ALONE = """
import os, signal
from flatmatch_jax.system import messages, signals
with signals.stop_requests() as request:
  os.kill(os.getpid(), signal.SIGINT)
  messages.say('Saving.')
print(request.signal, flush=True)
os._exit(0)
"""

RUN = """
import os, pathlib, sys, time
from flatmatch_jax.system import signals
with signals.stop_requests() as request:
  pathlib.Path('group').write_text(str(os.getpgid(0)))
  pathlib.Path('ready').touch()
  while not request.signal:
    time.sleep(0.05)
  time.sleep(1)
  pathlib.Path('saved').touch()
sys.exit(128 + request.signal)
"""

STUDY = f"""
import pathlib, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # As on a terminal.
from benchmarks import cifar10_fast as study
command = [sys.executable, '-c', {RUN!r}]
study.Cell.command = lambda self, runs, data_dir: command
study.run_all([study.Cell('flatmatch', 250, 0)], pathlib.Path(), '', 1, 60)
"""


def environment():
  return os.environ | {'PYTHONPATH': str(runs.ROOT)}


def test_run_is_saved_when_nobody_reads_its_log():
  """As of `main.py 2>&1 | tee log`, whose tee ends by the same Ctrl-C."""
  reader, writer = os.pipe()
  os.close(reader)
  done = subprocess.run(
    [sys.executable, '-c', ALONE],
    env=environment(),
    stdout=subprocess.PIPE,
    stderr=writer,
    text=True,
    timeout=300,
  )
  os.close(writer)
  assert done.stdout == f'{signal.SIGINT.value}\n'


TWICE = """
import os, signal
from flatmatch_jax.system import signals
with signals.stop_requests() as request:
  os.kill(os.getpid(), signal.SIGINT)
  assert request.signal == signal.SIGINT
  os.kill(os.getpid(), signal.SIGINT)
  print('still here')
"""


def test_second_request_ends_the_process_without_waiting_for_python():
  done = runs.python('-c', TWICE)
  assert done.returncode == -signal.SIGINT
  assert done.stdout == ''
  assert 'Traceback' not in done.stderr


BUSY = """
import hashlib
from flatmatch_jax.system import signals
with signals.stop_requests():
  print('ready', flush=True)
  hashlib.pbkdf2_hmac('sha256', b'', b'', 10**9)  # As XLA compiles.
"""


@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM])
def test_both_requests_are_answered_while_python_waits(number):
  process = subprocess.Popen(
    [sys.executable, '-c', BUSY],
    env=environment(),
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
  )
  try:
    assert process.stdout.readline() == b'ready\n'
    process.send_signal(number)
    assert process.stderr.readline() == b'\n'
    assert b'Stopping after this step' in process.stderr.readline()
    time.sleep(0.2)
    assert process.poll() is None
    process.send_signal(number)
    assert process.wait(timeout=20) == -number
  finally:
    process.kill()
    process.communicate()


FORKS = """
import os, signal, time
from flatmatch_jax.system import signals
with signals.stop_requests() as request:
  child = os.fork()
  while not child:
    signal.pause()
  time.sleep(0.2)
  os.kill(child, signal.SIGTERM)  # Caught there: the child goes on.
  time.sleep(0.2)
  assert request.signal is None
  os.kill(os.getpid(), signal.SIGTERM)
  time.sleep(0.2)
  assert request.signal == signal.SIGTERM
os.kill(child, signal.SIGKILL)
"""


def test_requests_to_children_are_theirs():
  """And one that lives on, with copies of all pipes, is not waited for."""
  done = runs.python('-W', 'ignore', '-c', FORKS)
  assert done.returncode == 0, done.stderr
  assert done.stderr.count('Stopping') == 1


def test_study_lets_its_runs_save(tmp_path):
  """A terminal sends Ctrl-C to a whole group; ours would be the second."""
  process = subprocess.Popen(
    [sys.executable, '-c', STUDY],
    env=environment(),
    cwd=tmp_path,
    start_new_session=True,
    stderr=subprocess.DEVNULL,
  )
  end = time.monotonic() + 240
  while not (tmp_path / 'ready').exists():
    assert process.poll() is None
    assert time.monotonic() < end
    time.sleep(0.05)
  os.killpg(process.pid, signal.SIGINT)
  process.wait(timeout=60)
  assert (tmp_path / 'saved').exists()
  assert int((tmp_path / 'group').read_text()) != process.pid
