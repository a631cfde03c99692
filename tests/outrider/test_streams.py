"""Streams of randomness: known by their names, all of them apart."""

import itertools

import pytest

from outrider.base.streams import Streams


def names() -> list[tuple[Streams, tuple[str | int, ...]]]:
    """Streams that differ in one part of their names, or whose parts look alike when put together."""
    made = [Streams(*parts) for parts in itertools.product((0, 1, -1), ("", "a", "1", "a,1"), (0, 1))]
    scoped = [*made, *(s.within("m") for s in made), *(s.within("m", 1) for s in made), Streams(0, '", 0, "')]
    purposes: list[tuple[str | int, ...]] = [("verify",), ("stop",), ("v", "erify"), ("1",), (1,), ("m/verify",)]
    return list(itertools.product(scoped, purposes))


def test_no_two_names_share_a_stream() -> None:
    made = names()
    assert len({streams.number(*purpose) for streams, purpose in made}) == len(made)
    assert len({streams.number(*purpose, bits=64) for streams, purpose in made}) == len(made)
    assert len({streams.of(*purpose).random() for streams, purpose in made}) == len(made)
    assert len({streams.arrays(*purpose).random() for streams, purpose in made}) == len(made)


def test_a_name_is_a_stream_for_ever() -> None:
    """From its beginning, whoever asks."""
    for streams, purpose in names()[::7]:
        again = Streams(streams.seed, streams.prompt, streams.repeat, streams.path)
        assert streams.of(*purpose).random() == again.of(*purpose).random()
        assert streams.arrays(*purpose).random(5).tolist() == again.arrays(*purpose).random(5).tolist()
    assert Streams(0).within("m").number("x") == Streams(0).number("m", "x")


@pytest.mark.parametrize("bits", [64, 128, 256])
def test_numbers_use_all_their_bits(bits: int) -> None:
    union = 0
    for prompt in range(40):
        number = Streams(0, str(prompt)).number("x", bits=bits)
        assert 0 <= number < 2**bits
        union |= number
    assert union == 2**bits - 1
