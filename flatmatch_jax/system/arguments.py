"""The arguments of a factory: their defaults, and which numbers they take.

A method or recipe states the bounds of an argument in its signature:

  def fixmatch(threshold: Share = 0.95, weight: NonNegative = 1.0) -> Method:

Configs list the arguments that have a default, and are checked against the
bounds before any work.
"""

from collections.abc import Callable
import inspect
from typing import Annotated, Any, NamedTuple, get_type_hints

_MOST = 2**31 - 1  # Steps and indices are int32 on the devices.


class Number(NamedTuple):
  """An interval; `above` and `below` leave out its ends."""

  low: float
  high: float
  whole: bool = False
  above: bool = False
  below: bool = False
  hint: str = ''

  def holds(self, value: Any) -> bool:
    kinds = int if self.whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds):
      return False
    return (
      self.low <= value <= self.high  # Not so for NaN.
      and not (self.above and value == self.low)
      and not (self.below and value == self.high)
    )

  def __str__(self) -> str:
    kind = 'a whole number' if self.whole else 'a number'
    low = 'above' if self.above else 'at least'
    high = 'below' if self.below else 'at most'
    return f'{kind}, {low} {self.low} and {high} {self.high}{self.hint}'


def whole(low: int, high: int = _MOST, hint: str = '') -> Number:
  return Number(low, high, whole=True, hint=hint)


DECAY = Number(0, 1, below=True)
# Far beyond any use, and still far from float32's infinity.
POSITIVE = Number(0, 1e6, above=True)

Share = Annotated[float, Number(0, 1)]
Decay = Annotated[float, DECAY]
Positive = Annotated[float, POSITIVE]
NonNegative = Annotated[float, Number(0, 1e6)]
PositiveCount = Annotated[int, whole(1)]
Count = Annotated[int, whole(0)]


def defaults(factory: Callable) -> dict[str, Any]:
  """The arguments that have a default, and their defaults."""
  return {
    name: parameter.default
    for name, parameter in inspect.signature(factory).parameters.items()
    if parameter.default is not inspect.Parameter.empty
  }


def bounds(factory: Callable) -> dict[str, Number]:
  """The arguments whose types have bounds, and their bounds."""
  return {
    name: found
    for name, hint in get_type_hints(factory, include_extras=True).items()
    for found in getattr(hint, '__metadata__', ())
    if isinstance(found, Number)
  }
