"""What the commands share: wrong input ends in one line, not a traceback."""

import argparse
import contextlib
import errno
import os
import pathlib
import re
import sys
import warnings

from absl import flags
import ml_collections

from flatmatch_jax.system import buckets, messages
from flatmatch_jax.types import UserError, did_you_mean

# What absl says of a wrong type, and what the user should read.
_TYPES = {
  'literal for int': 'is not a whole number',
  'string to float': 'is not a number',
  'Non-boolean': 'is neither true nor false',
  'as a ConfigDict': 'replaces a group of fields, which are set one by one',
}

_REFUSALS = {
  errno.EACCES: 'change its permissions, or name another place',
  errno.EPERM: 'change its permissions, or name another place',
  errno.EROFS: 'name a place that can be written',
  errno.ENOSPC: 'free some space, or name another place',
  errno.EDQUOT: 'free some space, or name another place',
  errno.EIO: 'disk I/O error: check the disk, or name another place',
  errno.ENOTDIR: 'name a folder, not a file',
  errno.EISDIR: 'name a file, not a folder',
  errno.EEXIST: 'name another place',
  errno.ENAMETOOLONG: 'choose a shorter name',
}


class Parser(argparse.ArgumentParser):
  """Of the arguments of a command; wrong ones are a UserError."""

  def error(self, message):
    raise UserError(f'{message}; --help shows what can be given.')


@contextlib.contextmanager
def errors_as_lines():
  """Prints a UserError as one line and exits with 2; others stay tracebacks.

  So do refusals of the operating system that are not the program's fault.
  """
  # Of files that are skipped, or read all the same.
  warnings.filterwarnings('ignore', module=r'PIL\.')
  messages.quiet_orbax()
  try:
    yield
  except BrokenPipeError:  # Such as by `| head`; nobody reads on.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(1)
  except (Exception, KeyboardInterrupt) as error:
    if not (found := describe(error)):
      raise
    code, line = found
    print(line, file=sys.stderr)
    sys.exit(code)


def describe(error: BaseException) -> tuple[int, str] | None:
  """Exit code and line of an error that is not the program's fault."""
  if isinstance(error, KeyboardInterrupt):
    return 130, 'Stopped by Ctrl-C.'
  if isinstance(error, UserError):
    return 2, f'error: {messages.printable(str(error))}'
  if isinstance(error, OSError) and error.errno in _REFUSALS:
    line = messages.printable(f'{error}; {_REFUSALS[error.errno]}.')
    return 2, f'error: {line}'
  if reason := buckets.why(error):
    path = re.search(r'gs://\S+', str(error))
    line = messages.printable(f'{path[0] if path else "The bucket"}: {reason}')
    return 2, f'error: {line}.'
  return None


def set_default_config(path: pathlib.Path) -> None:
  """Names a config on the command line if there is none.

  As the flag's default it would be read beside the one that is named, and
  overrides that only the latter has would be refused.
  """
  given = (arg.lstrip('-').partition('=')[0] for arg in sys.argv[1:])
  flags.FLAGS['config'].default_as_str = f"'{path}'"  # For --help.
  if 'config' not in given:
    sys.argv.insert(1, f'--config={path}')


def parse_flags(argv: list[str]) -> list[str]:
  """absl's parser for `app.run`, with readable errors about `--config`."""
  try:
    _check_file(argv)
    rest = flags.FLAGS(argv)
  except flags.UnrecognizedFlagError as error:
    raise UserError(_meant(error)) from None
  except flags.Error as error:
    # ml_collections wraps an error inside a config file in its traceback.
    text = str(error).rsplit('UserError: ')[-1].strip()
    raise UserError(_in_words(text)) from None
  except UserError:
    raise
  except (AttributeError, KeyError, ValueError):  # No such field to override.
    # Once more without overrides, to see what could have been written.
    overrides = [re.match(r'--?config\.([^=]*)', arg) for arg in argv]
    pairs = list(zip(argv, overrides, strict=True))
    sys.argv = [arg for arg, override in pairs if not override]
    flags.FLAGS(sys.argv)
    known = list(fields(flags.FLAGS['config'].value))
    given = [override[1] for override in overrides if override]
    field = next(name for name in given if name not in known)
    raise UserError(
      f'The config has no field {field!r}; set one by --config.FIELD=VALUE. '
      f'Known fields: {", ".join(known)}.{did_you_mean(field, known)}'
    ) from None
  if len(rest) > 1:
    raise UserError(
      f'Cannot read {rest[1]!r}: arguments are --config FILE.py:key=value,…, '
      '--config.FIELD=VALUE and --workdir DIR.'
    )
  return rest


def _meant(error) -> str:
  """What a flag that does not exist should have been, as fields of a config."""
  name, config = error.flagname, flags.FLAGS['config'].value
  if config is None:
    return f'{error}.'
  known = list(fields(config))
  for field in known:
    if name == field or name == field.split('.')[-1]:
      value = str(error.flagvalue).partition('=')[2] or 'VALUE'
      chosen = field in config.variant
      flag = '--config FILE.py:' if chosen else '--config.'
      return f'There is no flag --{name}; write {flag}{field}={value}.'
  flat = [f'config.{field}' for field in known]
  near = '' if 'Did you' in str(error) else did_you_mean(f'config.{name}', flat)
  return f'{error}.{near}'


def _in_words(text):
  """What absl says of a value that is not of the type of its field."""
  match = re.match(r'flag --([\w.]+)=(.*?): (.*)', text, re.DOTALL)
  if 'before a value for --config' in text:
    return f'{text.rstrip(".")}; put --config FILE.py before it.'
  if not match:
    return text
  name, value, reason = match.groups()
  rule = next((rule for key, rule in _TYPES.items() if key in reason), reason)
  remedy = f'set --{name}'
  if name == 'config.labels':
    remedy = f'choose it with the file: --config FILE.py:labels={value}'
  return f'--{name}={value} {rule}; {remedy}.'


def _check_file(argv):
  """ml_collections would tell only when the config is used."""
  for arg, following in zip(argv, [*argv[1:], ''], strict=True):
    name, equals, value = arg.lstrip('-').partition('=')
    if name != 'config':
      continue
    value = value if equals else following
    path = pathlib.Path(re.split(r'(?<=\.py):', value)[0])
    if not path.is_file():
      beside = sorted(p.name for p in path.parent.glob('*.py'))
      raise UserError(
        f'There is no config file {path}. '
        f'In {path.parent} are: {", ".join(beside) or "none"}.'
      )


def fields(config, prefix=''):
  """All fields of a config, those of its parts as part.field."""
  for key, value in config.items():
    if isinstance(value, ml_collections.ConfigDict):
      yield from fields(value, f'{prefix}{key}.')
    else:
      yield f'{prefix}{key}'
