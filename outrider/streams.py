"""Where random numbers come from: streams that are known by what they are for, so that no two uses share one.

A stream is found by hashing its whole name (seed, prompt, repeat, purpose). So what is drawn depends on nothing that
ran before, beside or elsewhere, and two decisions whose independence a proof needs are never made by the same coins.
"""

import hashlib
import json
import random
from dataclasses import dataclass, replace

import numpy as np


@dataclass(frozen=True)
class Streams:
    """The streams of one generation, or of a whole run (prompt "", repeat 0).

    prompt: the prompt's id. repeat: the how-manieth time it is continued. path: what all of them are for, such as the
    name of an arm (see `within`).
    """

    seed: int
    prompt: str = ""
    repeat: int = 0
    path: tuple[str | int, ...] = ()

    def within(self, *names: str | int) -> "Streams":
        """The streams whose purposes begin with `names`."""
        return replace(self, path=(*self.path, *names))

    def of(self, *purpose: str | int) -> random.Random:
        """The stream for `purpose` from its beginning: the cheapest one to draw single numbers from."""
        return random.Random(self.number(*purpose))

    def arrays(self, *purpose: str | int) -> np.random.Generator:
        """As `of`, to draw many numbers at a time. These are other numbers, but take one of the two for a purpose."""
        return np.random.default_rng(self.number(*purpose))

    def number(self, *purpose: str | int, bits: int = 256) -> int:
        """`bits` of the stream's digest, to seed a generator of another kind with.

        torch's look at 64 of them on CUDA and at 32 on a CPU: too few to keep many streams apart for certain.
        """
        name = json.dumps([self.seed, self.prompt, self.repeat, *self.path, *purpose])
        return int.from_bytes(hashlib.sha256(name.encode()).digest()[: bits // 8], "big")
