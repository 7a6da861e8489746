"""A trained model as the bytes of a file, in each of three formats."""

import contextlib
import io
import json
import logging
from typing import Any
import warnings

from flax import traverse_util
import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from flatmatch_jax.data import augment
from flatmatch_jax.system import array_files
from flatmatch_jax.training import exported
from flatmatch_jax.training.load import Trained
from flatmatch_jax.types import UserError

_PLATFORMS = ('cpu', 'cuda', 'tpu')
_WRONG = 'remove_redundant_transpose_pairs_ir'
_OPSET = 21  # Of ONNX; runtimes from 2024 on read it.


def encode(suffix: str, trained: Trained, description: dict) -> bytes:
  """A file of this kind; `description` goes into it where there is room."""
  about = {'flatmatch_jax': json.dumps(description)}
  if suffix == '.safetensors':
    flat = traverse_util.flatten_dict(trained.variables, sep='/')
    return array_files.to_safetensors(flat, about)
  function = _function(trained)
  if suffix == '.stablehlo':
    return _stablehlo(function, trained.dataset['image_shape'])
  return _onnx(function, trained, about)


def _function(trained: Trained):
  """From uint8 images to probabilities, in full precision everywhere."""
  config = trained.config

  def function(images):
    with jax.default_matmul_precision('highest'):
      images = augment.normalize(images, config.mean, config.std)
      found: Any = trained.model.apply(trained.variables, images, train=False)
      return jax.nn.softmax(found.logits)

  return function


def _stablehlo(function, shape) -> bytes:
  (number,) = jax.export.symbolic_shape('n')
  images = jax.ShapeDtypeStruct((number, *shape), jnp.uint8)
  export = jax.export.export(jax.jit(function), platforms=_PLATFORMS)
  return bytes(export(images).serialize())


def _onnx(function, trained, about) -> bytes:
  for package in ('jax2onnx', 'onnx', 'onnxruntime'):
    exported.require(package)
  shape = tuple(trained.dataset['image_shape'])
  with _quiet(), _as_it_is(jnp, 'cumsum'):
    import jax2onnx
    from jax2onnx.converter import ir_optimizations

    images = jax.ShapeDtypeStruct(('N', *shape), np.uint8)
    try:
      # It mixes up the layouts of residual blocks; runtimes do it right.
      with _without(ir_optimizations, _WRONG):
        model = jax2onnx.to_onnx(
          function, inputs=[images], model_name='flatmatch_jax', opset=_OPSET
        )
    except Exception as error:  # Whatever an operation it lacks leads to.
      reason = ' '.join(str(error).split())[:200].rstrip('.')
      raise UserError(
        f'jax2onnx cannot convert {trained.config.model}: {reason}. Export '
        '.stablehlo or .safetensors instead.'
      ) from error
  _rename(model.graph)
  for key, value in about.items():
    model.metadata_props.add(key=key, value=value)
  return model.SerializeToString()


def _rename(graph):
  """Gives the input and the output names that can be relied on."""
  names = {
    graph.input[0].name: exported.INPUT,
    graph.output[0].name: exported.OUTPUT,
  }
  for value in (*graph.input, *graph.output):
    value.name = names[value.name]
  for node in graph.node:
    for places in (node.input, node.output):
      for number, name in enumerate(places):
        places[number] = names.get(name, name)


@contextlib.contextmanager
def _without(module, name):
  """With a function of a module that does nothing."""
  function = getattr(module, name)
  setattr(module, name, lambda *args: None)
  try:
    yield
  finally:
    setattr(module, name, function)


@contextlib.contextmanager
def _as_it_is(module, name):
  """Keeps a function of a module: jax2onnx leaves one of its own behind."""
  function = getattr(module, name)
  try:
    yield
  finally:
    setattr(module, name, function)


@contextlib.contextmanager
def _quiet():
  """Without what jax2onnx and its parts say of themselves."""
  disabled = logging.root.manager.disable
  logging.disable(logging.ERROR)
  try:
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
      warnings.simplefilter('ignore')
      yield
  finally:
    logging.disable(disabled)
