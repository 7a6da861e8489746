"""What SECURITY.md says of the program itself."""

import ast
import json
import os
import pathlib
import re

import jax
import numpy as np
import pytest
from runs import ROOT

from flatmatch_jax import predict
from flatmatch_jax.run import plots
from flatmatch_jax.run.workdir import Workdir
from flatmatch_jax.system import distributed, messages
from flatmatch_jax.types import UserError

SOURCES = sorted(
  [
    *(ROOT / 'flatmatch_jax').rglob('*.py'),
    *(ROOT / 'configs').glob('*.py'),
    ROOT / 'main.py',
  ]
)
# Modules that run what they read, and those that speak to a network.
FORBIDDEN = {
  'cloudpickle',
  'dill',
  'ftplib',
  'http',
  'joblib',
  'marshal',
  'pickle',
  'requests',
  'shelve',
  'subprocess',
  'torch',
  'urllib',
  'yaml',
}


def calls(tree):
  """Of each call the last name of what is called, and the call."""
  for node in ast.walk(tree):
    if isinstance(node, ast.Call):
      function = node.func
      name = getattr(function, 'attr', getattr(function, 'id', ''))
      yield name, node


@pytest.mark.parametrize(
  'path', SOURCES, ids=lambda path: str(path.relative_to(ROOT))
)
def test_nothing_runs_what_it_reads(path):
  tree = ast.parse(path.read_text())
  imported = set()
  for node in ast.walk(tree):
    if isinstance(node, ast.Import):
      imported |= {alias.name.partition('.')[0] for alias in node.names}
    elif isinstance(node, ast.ImportFrom):
      imported.add((node.module or '').partition('.')[0])
  if path.name == 'clusters.py':
    imported.remove('urllib')  # Asks Google's machines how large a pod is.
  assert not imported & FORBIDDEN
  for name, call in calls(tree):
    assert name not in ('eval', 'exec', 'system', 'popen', 'fromfile'), name
    given = {word.arg: word.value for word in call.keywords}
    if ast.unparse(call.func) == 'np.load' or 'allow_pickle' in given:
      assert ast.unparse(given['allow_pickle']) == 'False'


def listening(lines):
  """The inodes of sockets that wait for somebody, of /proc/net/tcp's lines."""
  rows = [line.split() for line in lines[1:]]
  return {row[9] for row in rows if row[3] == '0A'}


def test_no_socket_listens():
  """Not after JAX computes; tests/test_processes.py starts its coordinator."""
  jax.block_until_ready(jax.numpy.ones(3) + 1)
  waiting = set()
  for kind in ('tcp', 'tcp6'):
    waiting |= listening(
      pathlib.Path(f'/proc/self/net/{kind}').read_text().splitlines()
    )
  mine = set()
  for path in pathlib.Path('/proc/self/fd').iterdir():
    if path.is_symlink():
      mine |= set(re.findall(r'socket:\[(\d+)\]', os.readlink(path)))
  assert not waiting & mine


@pytest.mark.parametrize(
  ('coordinator', 'bound'),
  [
    ('localhost:12345', True),
    ('127.0.0.1:12345', True),
    ('0.0.0.0:12345', True),
    ('192.0.2.1:12345', False),  # Of documents; nobody's.
  ],
)
@pytest.mark.parametrize('process_id', [0, 1])
def test_the_coordinator_listens_where_it_is_told(
  coordinator, bound, process_id, monkeypatch
):
  told = {}
  monkeypatch.setattr(
    distributed, '_initialize', lambda arguments, *_: told.update(arguments)
  )
  distributed.connect(coordinator, 2, process_id)
  here = coordinator if bound and not process_id else None
  assert told.get('coordinator_bind_address') == here


# Whole files.


def test_the_lock_does_not_follow_a_link(tmp_path):
  """It is emptied and written by whoever trains in the folder."""
  other = tmp_path / 'other'
  other.write_text('of somebody')
  (tmp_path / 'run').mkdir()
  (tmp_path / 'run' / '.lock').symlink_to(other)
  with (
    pytest.raises(UserError, match=r'Cannot write .*\.lock'),
    Workdir(str(tmp_path / 'run')).lock(),
  ):
    pass
  assert other.read_text() == 'of somebody'


def test_figures_are_whole_or_the_old_ones(tmp_path, monkeypatch):
  from matplotlib.figure import Figure

  path = tmp_path / 'curves.png'
  plots.curves([{'step': 1, 'error': 50.0}], 'first', path)
  before = path.read_bytes()

  def torn(self, file, **_):
    file.write(b'half')
    raise OSError('No space left on device')

  monkeypatch.setattr(Figure, 'savefig', torn)
  with pytest.raises(OSError, match='No space'):
    plots.curves([{'step': 1, 'error': 40.0}], 'second', path)
  assert path.read_bytes() == before
  assert os.listdir(tmp_path) == ['curves.png']


# Names that come from anywhere.


@pytest.mark.parametrize(
  ('text', 'shown'),
  [
    ('Katze 猫 é', 'Katze 猫 é'),
    ('\x1b[2Jgone', '\\x1b[2Jgone'),
    ('two\nlines\r', 'two\\nlines\\r'),
    ('\u202efdp.exe', '\\u202efdp.exe'),
    ('\udc80', '\\udc80'),  # A byte of a file's name that is no text.
    ('\x9b31m', '\\x9b31m'),
  ],
)
def test_terminals_are_not_steered(text, shown, capsys):
  assert messages.printable(text) == shown
  messages.say(text)
  assert capsys.readouterr().err.endswith(f'] {shown}\n')


@pytest.mark.parametrize(
  ('name', 'file', 'label'),
  [
    ('cat', 'cat', 'cat'),
    ('=1+1', './=1+1', "'=1+1"),
    ('@SUM(A1)', './@SUM(A1)', "'@SUM(A1)"),
    ('+cmd|x', './+cmd|x', "'+cmd|x"),
    ('-1', '-1', '-1'),
    ('+0.5', '+0.5', '+0.5'),
    ('a=1', 'a=1', 'a=1'),
  ],
)
def test_spreadsheets_do_not_compute_names(name, file, label):
  table = predict.Table([name, 'b'], 1, True)
  row = table.row(pathlib.Path(name), np.array([0.75, 0.25]))
  assert row == [file, label, '0', '0.7500', '0.7500', '0.2500']
  assert table.header()[4:] == [f'p_{name}', 'p_b']


def test_names_of_any_bytes_are_written_as_they_are(tmp_path, capsys):
  name, probs = os.fsdecode(b'\xff\x1b.png'), np.array([0.25, 0.75])
  table = predict.Table(['a', 'b'], 1, False)
  for out in (tmp_path / 'out.csv', tmp_path / 'out.jsonl', None):
    with predict._output(out and str(out), table) as write:
      write(pathlib.Path(name), probs)
  _, row = (tmp_path / 'out.csv').read_bytes().splitlines()
  assert row == b'\xff\x1b.png,b,1,0.7500'
  item = json.loads((tmp_path / 'out.jsonl').read_text())
  assert item == {'file': name, 'label': 'b', 'class': 1, 'confidence': 0.75}
  printed = capsys.readouterr().out.splitlines()
  assert printed[1] == '\\udcff\\x1b.png,b,1,0.7500'
