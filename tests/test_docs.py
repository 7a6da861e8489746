"""The documentation: settings are the code's, and links lead somewhere."""

import importlib
import pathlib
import re

import pytest

from flatmatch_jax import methods
from flatmatch_jax.step import recipes
from flatmatch_jax.system import startup
from flatmatch_jax.training import common

ROOT = pathlib.Path(__file__).parents[1]
PAGES = [ROOT / 'README.md', ROOT / 'SECURITY.md', *ROOT.glob('docs/*.md')]
CONFIGS = [
  path.stem
  for path in sorted(ROOT.glob('configs/*.py'))
  if path.stem != '__init__'
]
# Those that every file sets by itself, and those with a table of their own.
OTHERS = {'dataset', 'paper_labels', 'variant', 'method_args', 'recipe_args'}


def settings() -> str:
  return (ROOT / 'docs' / 'settings.md').read_text()


def test_settings_have_every_field_with_its_default():
  config = common.base('', 'cifar10', paper_labels=()).to_dict()
  config['mesh.fsdp'] = config.pop('mesh')['fsdp']
  defaults = {k: repr(v) for k, v in config.items() if k not in OTHERS}
  rows = re.findall(r'^\| `(\S+)` \| `(\S+)` \|[^|]+\|$', settings(), re.M)
  assert dict(rows) == defaults


def test_settings_have_the_arguments_of_methods_and_recipes():
  known = {name: methods.defaults(name) for name in methods.METHODS}
  known |= {name: recipes.defaults(name) for name in recipes.RECIPES}
  written = {name: _joined(arguments) for name, arguments in known.items()}
  shown = dict(re.findall(r'^\| `(\w+)` \| `(\w+=[^`]*)` \|', settings(), re.M))
  assert shown == {name: written[name] for name in shown}
  missing = {written[name] for name in written.keys() - shown.keys()}
  assert missing == {'', shown['flatmatch']}


def test_methods_and_recipes_have_a_row_each():
  page = (ROOT / 'docs' / 'methods.md').read_text()
  rows = re.findall(r'^\| (recipe )?`(\w+)` \|', page, re.M)
  assert {name for recipe, name in rows if not recipe} == set(methods.METHODS)
  assert {name for recipe, name in rows if recipe} <= set(recipes.RECIPES)


def _joined(arguments):
  return ', '.join(f'{name}={value!r}' for name, value in arguments.items())


@pytest.mark.parametrize('name', CONFIGS)
def test_settings_have_what_each_config_changes(name, monkeypatch):
  monkeypatch.setattr(startup, 'has_accelerator', lambda: False)
  page = settings()
  config = importlib.import_module(f'configs.{name}').get_config()
  (row,) = re.findall(rf'^\| (?:.*, )?`{name}\.py`[^|]*(\|.*)$', page, re.M)
  batches = f'{config.batch_size} + {config.unlabeled_batch_size}'
  assert row == (
    f'| `{config.model}` | {config.steps} | {batches} | {config.labels} |'
  )
  unnamed = [field for field in config if f'`{field}' not in page]
  assert set(unnamed) <= {'mesh', 'method_args', 'recipe_args'}


@pytest.mark.parametrize('page', PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
  links = re.findall(r'\]\(([^)\s]+)\)', page.read_text())
  for link in links:
    if link.startswith('https://'):
      continue
    path, _, anchor = link.partition('#')
    target = page.parent / path if path else page
    assert target.exists(), link
    assert not anchor or anchor in _anchors(target), link


def _anchors(page):
  """GitHub's names of the headings."""
  headings = re.findall(r'^#+ (.*)$', page.read_text(), re.M)
  kept = (re.sub(r'[^\w\- ]', '', heading.lower()) for heading in headings)
  return {heading.replace(' ', '-') for heading in kept}
