"""Semi-supervised image classification in JAX, with FlatMatch at its heart."""

import contextlib
import importlib.util
import os
import pathlib
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
  from flatmatch_jax.training.classifier import load as load
  from flatmatch_jax.training.fit import fit as fit

IMPORT_BEGAN = time.perf_counter()  # The log says how long starting took.

# What users call, imported when it is first used: that takes seconds.
_PUBLIC = {
  'fit': 'flatmatch_jax.training.fit',
  'load': 'flatmatch_jax.training.classifier',
}


def __getattr__(name: str):
  if name not in _PUBLIC:
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
  return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__():
  return sorted([*globals(), *_PUBLIC])


_LARGE_PAGES = pathlib.Path('/sys/kernel/mm/transparent_hugepage/enabled')
_TUNABLES, _STARTED = 'GLIBC_TUNABLES', '_FLATMATCH_JAX_STARTED'
_NEEDED = ('absl', 'jax', 'flax', 'optax', 'orbax', 'clu', 'ml_collections')


def begin_command() -> None:
  """For a process of our own, before it imports anything else.

  Ends it in one line where packages are missing. XLA's C++ logs a block of
  lines as an error whenever compiling takes minutes, and has no other option
  against that; its real errors are exceptions, too.
  """
  for name in _NEEDED:
    if importlib.util.find_spec(name) is None:
      sys.exit(
        f'error: {sys.executable} has no package {name!r}. Activate the '
        'environment first (. .venv/bin/activate), or install the packages: '
        'pip install -r requirements.txt -c constraints.txt'
      )
  os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')
  _use_large_pages()


def _use_large_pages() -> None:
  """Starts the process anew with large pages for what glibc allocates.

  XLA allocates the arrays of every step anew. With small pages that takes a
  seventh of a step on a CPU: docs/speed.md. Linux gives large pages only to
  those who ask, unless set otherwise, and glibc reads its settings only when a
  process starts.
  """
  match sys.orig_argv[1:]:
    case ['-m', module, *_]:
      ours = module.partition('.')[0] == 'flatmatch_jax'
    case words:  # Not a notebook's %run, a debugger or standard input.
      ours = words == sys.argv and words[0].endswith('.py')
  # Ours is looked at, too: glibc may remove its own.
  if not ours or sys.gettrace() or {_TUNABLES, _STARTED} & os.environ.keys():
    return
  with contextlib.suppress(OSError):
    if '[madvise]' in _LARGE_PAGES.read_text():
      os.environ |= {_TUNABLES: 'glibc.malloc.hugetlb=1', _STARTED: '1'}
      os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


# So Python names itself while it looks for the module of `python -m`.
if getattr(sys, 'argv', [''])[:1] == ['-m']:
  begin_command()
