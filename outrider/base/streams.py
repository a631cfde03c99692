"""Random streams named by purpose. No two purposes share random numbers.

A stream is seeded by a hash of its full name (seed, prompt, repeat, purpose). So its numbers do not depend on what ran
before or in parallel. `Streams(0, "p1").within("eesd").of("verify")` gives the same numbers in every process.
"""

import hashlib
import json
import random
from dataclasses import dataclass, replace

import numpy as np


@dataclass(frozen=True)
class Streams:
    """The streams of one generation, or of a whole run (prompt "", repeat 0)."""

    seed: int
    prompt: str = ""  # the prompt's id
    repeat: int = 0  # the number of the repeated measurement
    path: tuple[str | int, ...] = ()  # the common prefix of the purposes, such as the name of a method

    def within(self, *names: str | int) -> "Streams":
        """The streams whose purposes have the prefix `names`."""
        return replace(self, path=(*self.path, *names))

    def of(self, *purpose: str | int) -> random.Random:
        """The stream for `purpose`, from its start. It is the cheaper one for single numbers."""
        return random.Random(self.number(*purpose))

    def arrays(self, *purpose: str | int) -> np.random.Generator:
        """Like `of`, for arrays of numbers. Its numbers differ from those of `of`; use one of the two per purpose."""
        return np.random.default_rng(self.number(*purpose))

    def number(self, *purpose: str | int, bits: int = 256) -> int:
        """The first `bits` of the stream's digest, which seed another generator.

        torch's generators use 64 bits on CUDA and 32 on a CPU: too few to guarantee that many streams differ.
        """
        stream_name = json.dumps([self.seed, self.prompt, self.repeat, *self.path, *purpose])
        return int.from_bytes(hashlib.sha256(stream_name.encode()).digest()[: bits // 8], "big")
