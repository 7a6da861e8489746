"""The paper's tables: their numbers, commands, cost, dry run and page."""

import re
import shlex
import sys

from absl import flags
import jax
import jax.numpy as jnp
from ml_collections import config_flags
import pytest

from flatmatch_jax import experiments, models
from flatmatch_jax.data import resident
from flatmatch_jax.paper import cells, cost, tables
from flatmatch_jax.system import cli
from flatmatch_jax.training import config as config_lib
from flatmatch_jax.training import load, program
from flatmatch_jax.types import DatasetInfo

ROOT = load.ROOT
STREAMED = ('imagenet30', 'imagenet')


def run(monkeypatch, *args):
  monkeypatch.setattr(sys, 'argv', ['experiments', *args])
  with cli.errors_as_lines():
    experiments.main()


def cell(dataset, method, labels):
  return cells.Cell(dataset, method, labels, '1.0')


@pytest.mark.parametrize(
  ('table', 'rows', 'columns', 'empty'),
  # Table 1 has 12 columns, and one number a dataset for full supervision.
  [
    ('table1', 16, 12, 3),
    ('combination', 10, 3, 0),
    ('ablation', 6, 3, 0),
    ('imagenet30', 6, 2, 0),
    ('imagenet', 5, 2, 0),
    ('usb', 4, 6, 0),
  ],
)
def test_tables_have_the_papers_cells(table, rows, columns, empty):
  found = cells.cells(table)
  full = [x for x in found if x.labels == 'all']
  assert len(found) - len(full) == rows * columns
  assert len(full) == (4 if table == 'table1' else 0)
  assert len({x[:3] for x in found}) == len(found)
  assert len(found) - len(cells.runs(table)) == empty
  number = r'\d+\.\d\d' if table == 'imagenet' else r'\d+\.\d\d±\d+\.\d\d?'
  assert all(re.fullmatch(number, x.error) for x in cells.runs(table))


def test_what_two_tables_share_is_the_same():
  errors = {}
  for table in tables.TABLES:
    for *place, error in cells.cells(table):
      assert errors.setdefault(tuple(place), error) == error


def test_a_workdir_belongs_to_one_command():
  every = [x for table in tables.TABLES for x in cells.runs(table)]
  commands = {x.command(seed) for x in every for seed in (0, 1)}
  workdirs = {command.split('--workdir ')[1] for command in commands}
  # Six rows of the combination and two of the ablation stand in Table 1 too.
  distinct = 193 + (10 - 6) * 3 + (6 - 2) * 3 + 12 + 10 + 24
  assert len(commands) == len(workdirs) == 2 * distinct


def check_commands(table, monkeypatch, capsys):
  """Each printed line is read by main.py's flags and passes the checks."""
  monkeypatch.chdir(ROOT)
  run(monkeypatch, table, '--seeds', '0', '2')
  lines = capsys.readouterr().out.splitlines()
  commands = [line for line in lines if line and not line.startswith('#')]
  expected = [(x, seed) for x in cells.runs(table) for seed in (0, 2)]
  for command, (x, seed) in zip(commands, expected, strict=True):
    python, script, *args = shlex.split(command)
    assert (python, script) == ('python', 'main.py')
    values = flags.FlagValues()
    config_flags.DEFINE_config_file('config', None, '', flag_values=values)
    flags.DEFINE_string('workdir', None, '', flag_values=values)
    # ml_collections looks for overrides there.
    monkeypatch.setattr(sys, 'argv', ['main.py', *args])
    assert values(['main.py', *args]) == ['main.py']
    config = values.config
    assert ('vit' in config.model) == bool(config.pretrained)
    config.pretrained = ''  # The file is not here.
    config_lib.check(config)
    assert (config.dataset, config.method) == (x.dataset, x.method)
    assert str(config.labels) == x.labels.split(',')[0]
    assert (config.seed, config.split_seed) == (seed, seed)
    assert (
      config.model == x.labels.partition('model=')[2] or ',' not in x.labels
    )


@pytest.mark.parametrize('table', tables.TABLES)
def test_commands_are_accepted(table, monkeypatch, capsys):
  check_commands(table, monkeypatch, capsys)


def test_printed_beside_a_command(monkeypatch, capsys):
  run(monkeypatch, 'ablation', '--seeds', '7')
  assert (
    '# sharp. on D^l, cifar100, labels=400: error 42.63±0.34% in the paper; '
    '1,048,576 steps, 15.3 exaFLOPs each\n'
    'python main.py --config configs/cifar100.py:method=sharp_labeled,'
    'labels=400,seed=7,split_seed=7 --workdir '
    'runs/cifar100-sharp_labeled-400-7\n'
  ) in capsys.readouterr().out


# Images forward and backward in a step of 64 labeled images.
PASSES = {
  'supervised': (64, 64),
  'pi_model': (192, 128),
  'pseudo_label': (128, 128),
  'vat': (256, 256),
  'mean_teacher': (192, 128),
  'mixmatch': (320, 192),
  'remixmatch': (448, 384),
  'fixmatch': (960, 512),
  'mpl': (1536, 960),
  'flatmatch': (960, 512),
  'flatmatch_e': (960, 512),
  'sharp_labeled': (1024, 576),
  'sharp_unlabeled': (1408, 960),
  'sharp_all': (1472, 1024),
  'dash+flatmatch': (960, 512),
  'adamatch': (1024, 1024),
  'comatch': (1408, 960),
  'crmatch': (1216, 768),
  'daso+flatmatch': (1024, 512),
}


@pytest.mark.parametrize('method', PASSES)
def test_flops_of_methods(method):
  forward, backward = PASSES[method]
  config = cell('cifar10', method, '4000').config()
  config.steps = 1000
  expected = 2 * 0.2144e9 * (forward + 2 * backward) * 1000
  assert cost.flops(config) == pytest.approx(expected)


def test_flops_of_fixed_labels():
  flops = lambda *place: cost.flops(cell(*place).config())
  plain = flops('cifar10', 'flatmatch', '40')
  # A perturbation batch of 64, forward and backward, after 16 of 1,024 epochs.
  extra = 2 * 0.2144e9 * 3 * 64 * (2**20 - 2**14)
  fixed = flops('cifar10', 'flatmatch_fix', '40')
  assert fixed == pytest.approx(plain + extra)
  assert flops('cifar10', 'flatmatch_fix', '4000') == plain


def macs(model):
  """Multiplications of a forward pass, from its jaxpr."""
  size = {'wrn_28_2': 32, 'wrn_28_8': 32, 'wrn_37_2': 96}.get(model, 224)
  network = models.create(model, 1000 if size == 224 else 10)
  images = jax.ShapeDtypeStruct((1, size, size, 3), jnp.float32)
  key = jax.eval_shape(jax.random.key, 0)
  variables = jax.eval_shape(lambda *x: network.init(*x, False), key, images)
  jaxpr = jax.make_jaxpr(lambda *x: network.apply(*x, False))(variables, images)
  return sum(map(multiplications, equations(jaxpr.jaxpr)))


def equations(jaxpr):
  for equation in jaxpr.eqns:
    yield equation
    for value in equation.params.values():
      if hasattr(value, 'jaxpr'):
        yield from equations(value.jaxpr)


def multiplications(equation):
  size = equation.outvars[0].aval.size
  if equation.primitive.name == 'conv_general_dilated':
    *window, channels, _ = equation.invars[1].aval.shape
    for width in (*window, channels):
      size *= width
    return size
  if equation.primitive.name == 'dot_general':
    (contracted, _), _ = equation.params['dimension_numbers']
    for axis in contracted:
      size *= equation.invars[0].aval.shape[axis]
    return size
  return 0


@pytest.mark.parametrize('model', cost.MACS)
def test_macs_are_those_of_the_network(model):
  assert cost.MACS[model] == pytest.approx(macs(model), rel=0.01)


def test_dry_run(monkeypatch, capsys):
  run(monkeypatch, 'ablation', '--dry_run', '--seeds', '0', '1')
  lines = capsys.readouterr().out.splitlines()
  assert lines == [
    f'starts: {x.command(seed)}'
    for x in cells.runs('ablation')
    for seed in (0, 1)
  ]


@pytest.mark.parametrize(
  ('dataset', 'method', 'fixed'),
  [
    ('cifar10', 'supervised', False),
    ('svhn', 'flatmatch_fix', True),
    ('stl10', 'remixmatch', False),
  ],
)
def test_traced_batch_is_what_the_sampler_gives(dataset, method, fixed):
  config = cell(dataset, method, '40').config()
  size, shape = cost.IMAGES[dataset]
  made = program.create(config, DatasetInfo(10, size, size, (1,) * 10), shape)
  numbers = lambda n: jax.ShapeDtypeStruct((n,), jnp.int32)
  data = resident.Data(
    jax.ShapeDtypeStruct((size, *shape), jnp.uint8),
    numbers(size),
    numbers(40),
    numbers(size),
    *([numbers(540)] * 2 if fixed else [None] * 2),
  )
  state = jax.eval_shape(made.init, jax.eval_shape(jax.random.key, 0))
  sample = program.make_sample(config, made.views, None)
  expected = jax.eval_shape(sample, data, state)
  batch = experiments.abstract_batch(config, made.views, fixed)
  kind = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)
  assert kind(batch) == kind(expected)


def test_dry_run_of_fixed_labels_compiles_nothing(monkeypatch, caplog):
  traced = []
  monkeypatch.setattr(
    experiments,
    'abstract_batch',
    lambda *args, make=experiments.abstract_batch: (
      traced.append(make(*args)) or traced[-1]
    ),
  )
  chosen = [
    cell('cifar100', 'flatmatch_fix', '400'),
    cell('cifar100', 'flatmatch_fix', '1000'),  # As with 400.
    cell('cifar100', 'flatmatch_fix', '2500'),  # Enough: none are fixed.
  ]
  with jax.log_compiles():
    assert experiments.dry_run(chosen, [0])
  assert [batch.fixed is not None for batch in traced] == [True, False]
  assert not [x for x in caplog.messages if 'Compiling' in x]


def test_dry_run_tells_what_fails(monkeypatch, capsys):
  tables = {
    'one': 'cifar10 40 41\nfixmatch 1.0 1.0\n\ncifar11 40\nfixmatch 1.0'
  }
  monkeypatch.setattr(cells, 'TABLES', tables)
  monkeypatch.setattr(experiments, 'TABLES', tables)

  def create(*args):
    raise ValueError('no such\nnetwork')

  monkeypatch.setattr(program, 'create', create)
  with pytest.raises(SystemExit) as stop:
    run(monkeypatch, 'one', '--dry_run', '--seeds', '0')
  assert stop.value.code == 1
  traced, labels, file = capsys.readouterr().out.splitlines()
  assert traced.startswith('fails (ValueError: no such): python main.py')
  assert labels.startswith('fails (labels=41 must be a positive multiple')
  assert file.startswith('fails (There is no config file')
  assert file.endswith('runs/cifar11-fixmatch-40-0')


def test_a_step_that_changes_the_state_fails(monkeypatch, capsys):
  make = program.create

  def create(*args):
    made = make(*args)
    step = lambda state, batch: (
      state.replace(step=state.step.astype(jnp.float32)),
      {},
    )
    return made._replace(step=step)

  monkeypatch.setattr(program, 'create', create)
  assert not experiments.dry_run([cell('cifar10', 'fixmatch', '40')], [0])
  assert 'fails (TypeError: a step changes' in capsys.readouterr().out


def test_without_a_table_lists_them(monkeypatch, capsys):
  run(monkeypatch)
  lines = capsys.readouterr().out.splitlines()
  *lines, hint = lines
  assert [line.split()[0] for line in lines] == list(tables.TABLES)
  assert '--dry_run' in hint
  assert lines[0].endswith('193 cells')


@pytest.mark.parametrize('table', STREAMED)
def test_dry_run_of_streamed_datasets(table):
  chosen = [x for x in cells.runs(table) if x.method == 'flatmatch']
  assert len(chosen) == 2
  assert experiments.dry_run(chosen, [0])
