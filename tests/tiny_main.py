"""main.py with a network that is quick to compile; for tests of processes.

It is given as --config.model=wrn_10_1, which config checks know.
"""

import pathlib
import runpy
import sys

import conftest

from flatmatch_jax import models

models.create = lambda name, num_classes, momentum=0, heads=(), *rest, **kw: (
  conftest.TinyNet(num_classes, heads)
)
sys.argv[0] = str(pathlib.Path(__file__).parent.parent / 'main.py')
runpy.run_path(sys.argv[0], run_name='__main__')
