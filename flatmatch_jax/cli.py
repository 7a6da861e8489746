"""What the commands share: wrong input ends in one line, not a traceback."""

import contextlib
import os
import pathlib
import re
import sys

from absl import flags
import ml_collections

from flatmatch_jax.types import UserError


@contextlib.contextmanager
def errors_as_lines():
  """Prints a UserError as one line and exits with 2; others stay tracebacks."""
  try:
    yield
  except UserError as error:
    print(f'error: {error}', file=sys.stderr)
    sys.exit(2)
  except BrokenPipeError:  # Such as by `| head`; nobody reads on.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(1)
  except KeyboardInterrupt:
    print('Stopped by Ctrl-C.', file=sys.stderr)
    sys.exit(130)


def set_default_config(path: pathlib.Path) -> None:
  """Names a config on the command line if there is none.

  As the flag's default it would be read beside the one that is named, and
  overrides that only the latter has would be refused.
  """
  given = (arg.lstrip('-').partition('=')[0] for arg in sys.argv[1:])
  if 'config' not in given:
    sys.argv.insert(1, f'--config={path}')


def parse_flags(argv: list[str]) -> list[str]:
  """absl's parser for `app.run`, with readable errors about `--config`."""
  try:
    _check_file(argv)
    rest = flags.FLAGS(argv)
  except flags.Error as error:
    # ml_collections wraps an error inside a config file in its traceback.
    raise UserError(str(error).rsplit('UserError: ')[-1].strip()) from None
  except (AttributeError, KeyError) as error:  # No such field to override.
    text = str(error)
    match = re.search(r'lookup: ([\w.]+)', text) or re.search(r'(\w+)', text)
    field = match[1] if match else text
    # Once more without overrides, to see what could have been written.
    sys.argv = [arg for arg in sys.argv if not arg.startswith('--config.')]
    flags.FLAGS(sys.argv)
    known = ', '.join(_fields(flags.FLAGS['config'].value))
    raise UserError(
      f'The config has no field {field!r}. Known fields: {known}.'
    ) from None
  if len(rest) > 1:
    raise UserError(
      f'Cannot read {rest[1]!r}: arguments are --config FILE.py:key=value,…, '
      '--config.FIELD=VALUE and --workdir DIR.'
    )
  return rest


def _check_file(argv):
  """ml_collections would tell only when the config is used."""
  for arg, following in zip(argv, [*argv[1:], ''], strict=True):
    name, _, value = arg.lstrip('-').partition('=')
    if name != 'config':
      continue
    path = pathlib.Path(re.split(r'(?<=\.py):', value or following)[0])
    if not path.is_file():
      beside = sorted(p.name for p in path.parent.glob('*.py'))
      raise UserError(
        f'There is no config file {path}. '
        f'In {path.parent} are: {", ".join(beside) or "none"}.'
      )


def _fields(config, prefix=''):
  """All fields of a config, those of its parts as part.field."""
  for key, value in config.items():
    if isinstance(value, ml_collections.ConfigDict):
      yield from _fields(value, f'{prefix}{key}.')
    else:
      yield f'{prefix}{key}'
