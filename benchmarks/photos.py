"""The picture of the README: the study's curves, and photos with predictions.

  python benchmarks/photos.py --workdir RUN --data_dir DIR

RUN is one of CIFAR-10 by FlatMatch from 250 labels. The photos are the first
of the test set, not chosen.
"""

import json
import pathlib
import sys

from matplotlib.figure import Figure

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from flatmatch_jax.run.workdir import Workdir
from flatmatch_jax.system import cli, files
from flatmatch_jax.training import load

RUNS = {
  'supervised-250-0': 'labels alone',
  'fixmatch-250-0': 'FixMatch',
  'freematch-250-0': 'FreeMatch',
  'flatmatch-250-0': 'FlatMatch',
  'flatmatch-250-0-steps=36000-learning_rate=0.01': 'FlatMatch, longer',
}
ROWS, COLUMNS = 3, 7
GAP = 3  # Between the curves' names, in % of error.


def curves(axis) -> None:
  """Test error by minutes of a core, of the runs that are recorded."""
  ends = []
  for name, label in RUNS.items():
    path = ROOT / 'docs' / 'results' / f'{name}.jsonl'
    if not path.exists():
      continue
    about, *rows = map(json.loads, path.read_text().splitlines())
    minutes = 60 * about['core_hours'] / rows[-1]['step']
    x = [minutes * row['step'] for row in rows]
    y = [row['error'] for row in rows]
    line = axis.plot(x, y, linewidth=1.8)[0]
    ends.append((y[-1], x[-1], label, line.get_color()))
  lowest = -GAP
  for error, minutes, label, color in sorted(ends):
    lowest = max(error, lowest + GAP)  # Or labels would overlap.
    axis.text(
      minutes + 2,
      lowest,
      f'{label} {error:.0f}%',
      color=color,
      va='center',
      fontsize=9,
    )
  axis.set(
    xlabel='minutes of one CPU core',
    ylabel='test error, %',
    ylim=(0, None),
    title='CIFAR-10 from 250 labels',
  )
  axis.set_xlim(0, 1.55 * axis.get_xlim()[1])
  axis.grid(alpha=0.3)
  axis.spines[['top', 'right']].set_visible(False)


def photos(figure, run, images, labels) -> None:
  """Each with its class by the model, and in red where that is wrong."""
  names = run.dataset['class_names']
  images, labels = images[: ROWS * COLUMNS], labels[: ROWS * COLUMNS]
  weights = (run.state.ema_params,)
  (found,) = run.classify(weights, run.state.batch_stats, images)
  for axis, image, label, probabilities in zip(
    figure.subplots(ROWS, COLUMNS).flat, images, labels, found, strict=True
  ):
    guess = probabilities.argmax()
    axis.imshow(image, interpolation='bicubic')
    axis.set_xticks([])
    axis.set_yticks([])
    axis.set_title(
      f'{names[guess]} {100 * probabilities[guess]:.0f}%',
      color='black' if guess == label else 'crimson',
      fontsize=8,
    )
  figure.suptitle('The first test images, with predictions (red: wrong)')


def main():
  parser = cli.Parser(description=__doc__.splitlines()[0])
  parser.add_argument('--workdir', required=True)
  parser.add_argument('--data_dir', default='')
  parser.add_argument('--out', default=ROOT / 'docs' / 'images' / 'photos.png')
  args = parser.parse_args()
  run = load.load_run(Workdir(args.workdir))
  data = load.load_data(run, args.data_dir)
  figure = Figure(figsize=(12, 3.8), layout='constrained')
  left, right = figure.subfigures(1, 2, width_ratios=(2, 3))
  curves(left.subplots())
  photos(right, run, data.test_images, data.test_labels)
  with files.replacing(pathlib.Path(args.out)) as file:
    figure.savefig(file, format='png', dpi=110)


if __name__ == '__main__':
  with cli.errors_as_lines():
    main()
