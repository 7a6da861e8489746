"""What the commands share."""

import contextlib
import sys

from flatmatch_jax.types import UserError


@contextlib.contextmanager
def errors_as_lines():
  """Prints a UserError as one line and exits with 2; others stay tracebacks."""
  try:
    yield
  except UserError as error:
    print(f'error: {error}', file=sys.stderr)
    sys.exit(2)
