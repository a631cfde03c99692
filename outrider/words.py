"""Numbers as people say them."""


def in_words(seconds: float) -> str:
    """A time: "3 min 20 s", or "20 s" below a minute."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
