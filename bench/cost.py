"""What a long run cost, over all its sittings, on a machine that others use as well.

Minutes are those that the processor spent, by all threads together and divided by two: what two cores of our
own would have taken, had neither waited for the other.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

CORES = 2


@dataclass
class Cost:
    """Seconds that passed, and seconds that all threads together computed.

    >>> print(Cost(wall=600, processor=720))
    6.0 minutes of two cores (10.0 passed, shared with others)
    """

    wall: float = 0.0
    processor: float = 0.0

    @property
    def minutes(self) -> float:
        """Of two cores."""
        return self.processor / CORES / 60

    def __str__(self) -> str:
        return f"{self.minutes:.1f} minutes of two cores ({self.wall / 60:.1f} passed, shared with others)"


def since(before: Cost) -> Callable[[], Cost]:
    """A function that tells what was spent up to its call: before, and from now on."""
    wall, processor = time.perf_counter(), time.process_time()

    def cost() -> Cost:
        passed, spent = time.perf_counter() - wall, time.process_time() - processor
        return Cost(before.wall + passed, before.processor + spent)

    return cost
