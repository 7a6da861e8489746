"""Executes notebooks and keeps their outputs.

  python notebooks/run.py [notebooks/quick_start.ipynb …]

All of them if none is named. Each runs in an empty folder with a link to this
checkout, as where it was cloned, and without TensorFlow, as on Colab's TPUs. A
notebook remembers the checksum of the code whose outputs it holds; the tests
look at it.
"""

import argparse
import base64
import hashlib
import io
import os
import pathlib
import tempfile

import nbclient
import nbformat
from PIL import Image

FOLDER = pathlib.Path(__file__).parent


def checksum(notebook) -> str:
  """Of the code that was executed."""
  cells = [c.source for c in notebook.cells if c.cell_type == 'code']
  return hashlib.sha256('\n\0'.join(cells).encode()).hexdigest()[:16]


def fewer_bytes(png: str) -> str:
  """The picture with a palette of 256 colours, or itself if that is less."""
  picture = Image.open(io.BytesIO(base64.b64decode(png)))
  file = io.BytesIO()
  picture.convert('RGB').quantize(256).save(file, 'png', optimize=True)
  return min(base64.b64encode(file.getvalue()).decode(), png, key=len)


def execute(path: pathlib.Path, folder: pathlib.Path, **parameters):
  """The notebook at `path` as executed in `folder`, with its outputs.

  `parameters` are set after the cell with the tag of this name.
  """
  notebook = nbformat.read(path, as_version=4)
  if parameters:
    (at,) = [
      number
      for number, cell in enumerate(notebook.cells)
      if 'parameters' in cell.metadata.get('tags', [])
    ]
    lines = [f'{name} = {value!r}' for name, value in parameters.items()]
    cell = nbformat.v4.new_code_cell('\n'.join(lines))
    notebook.cells.insert(at + 1, cell)
  (folder / 'flatmatch_jax').symlink_to(FOLDER.parent.absolute())
  absent = folder / 'absent' / 'tensorflow.py'
  absent.parent.mkdir()
  absent.write_text("raise ImportError('no tensorflow')\n")
  client = nbclient.NotebookClient(
    notebook,
    timeout=None,
    kernel_name='python3',
    resources={'metadata': {'path': str(folder)}},
  )
  client.execute(env=os.environ | {'PYTHONPATH': str(absent.parent)})
  for cell in notebook.cells:
    for output in cell.get('outputs', []):
      if 'text' in output:  # Where it ran is nobody's business.
        output.text = output.text.replace(str(folder), '.')
  return notebook


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('paths', nargs='*', type=pathlib.Path)
  args = parser.parse_args()
  for path in args.paths or sorted(FOLDER.glob('*.ipynb')):
    with tempfile.TemporaryDirectory() as folder:
      notebook = execute(path, pathlib.Path(folder))
    for cell in notebook.cells:  # Times of execution would change every line.
      cell.metadata.pop('execution', None)
      for output in cell.get('outputs', []):
        if png := output.get('data', {}).get('image/png'):
          output.data['image/png'] = fewer_bytes(png)
    notebook.metadata = {
      'kernelspec': {
        'name': 'python3',
        'display_name': 'Python 3',
        'language': 'python',
      },
      'language_info': {'name': 'python'},
      'executed': checksum(notebook),
    }
    nbformat.write(notebook, path)
    print(path, f'{path.stat().st_size / 1e3:.0f} kB')


if __name__ == '__main__':
  main()
