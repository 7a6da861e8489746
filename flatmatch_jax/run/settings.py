"""Which runs are of one setting: those that differ in seeds only."""

from flatmatch_jax.run.workdir import ALIKE, flatten


def fields(config: dict) -> dict:
  """What a config sets, by dotted names, but for seeds and the like."""
  return {
    key: value
    for key, value in flatten(config).items()
    # A variant's choices are fields of their own too.
    if key not in ALIKE and not key.startswith('variant.')
  }


def differences(configs: list[dict]) -> list[str]:
  """In what each config differs from others of its method, as text.

  Runs whose texts are equal, '' if there is nothing, are of one setting.
  """
  settings = [fields(config) for config in configs]
  names = [
    name
    for name in dict.fromkeys(name for one in settings for name in one)
    if len({repr(one.get(name)) for one in settings}) > 1
  ]
  return [
    ', '.join(f'{name}={one.get(name, "absent")}' for name in names)
    for one in settings
  ]
