"""Gives labels to images, on a page in the browser.

  python -m flatmatch_jax.label DIR [--workdir RUN] [--port N]

Shows the images of DIR/unlabeled, or of DIR if there is no such folder, and
moves each to DIR/labeled/CLASS/ when it gets its label. First come images that
differ, so that few labels cover all of them; with --workdir, those that the
trained model is unsure of, with its guess. Only this machine can open the page.
"""

import contextlib
import importlib.util
import secrets
import threading

from flatmatch_jax.data import choice
from flatmatch_jax.label.rank import Ranking
from flatmatch_jax.label.store import Store
from flatmatch_jax.system import cli, messages
from flatmatch_jax.training import classifier
from flatmatch_jax.types import UserError


def main():
  parser = cli.Parser(
    prog='python -m flatmatch_jax.label',
    description='Gives labels to images, on a page in the browser.',
  )
  parser.add_argument('folder', metavar='DIR', help='folder of the images')
  parser.add_argument('--workdir', help='run whose model chooses and guesses')
  parser.add_argument(
    '--port', type=int, default=0, help='any that is free if left out'
  )
  args = parser.parse_args()
  for package in ('starlette', 'uvicorn'):
    if importlib.util.find_spec(package) is None:
      raise UserError(
        f'The page needs the package {package}; install the extra "label": '
        "pip install -e '.[label]'"
      )
  from flatmatch_jax.label import server

  model = classifier.load(args.workdir) if args.workdir else None
  store = Store(args.folder, model.class_names if model else ())
  listener = server.listen(args.port)
  if store.links:
    messages.say(f'Passed over {store.links} links: only files are moved.')
  ranking = Ranking(store, model)
  if model:  # Otherwise the page would first show another order.
    number = min(len(store.pending), choice.MOST)
    count = messages.count(number, 'image')
    messages.say(f'Looking for those that the model is unsure of, in {count}.')
    ranking.run()
  else:
    threading.Thread(target=ranking.run, daemon=True).start()
  token, port = secrets.token_urlsafe(32), listener.getsockname()[1]
  print(
    f'{len(store.pending):,} images to label. Open this address; Ctrl-C ends:\n'
    f'  http://{server.HOST}:{port}/?token={token}',
    flush=True,
  )
  before = sum(store.counts.values())
  with contextlib.suppress(KeyboardInterrupt):
    server.serve(server.create(store, ranking, token, port), listener)
  given = sum(store.counts.values()) - before
  print(f'\n{given} labels were given; the same command goes on. To train:')
  print(f'  {training(store)}')


def training(store: Store) -> str:
  return (
    'python main.py --config configs/folder.py '
    f'--config.data_dir={messages.printable(str(store.root))} --workdir RUN'
  )


if __name__ == '__main__':
  with cli.errors_as_lines():
    main()
