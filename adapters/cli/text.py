"""Text from elsewhere, made fit for a terminal."""

# A document may hold escape sequences, a model may repeat them, and names of files may be anything.
_STEERING = {*range(32), *range(127, 160)} - {ord("\n"), ord("\t")}
_UNPRINTABLE = range(0xD800, 0xE000)
_VISIBLE = dict.fromkeys({*_STEERING, *_UNPRINTABLE}, "\N{REPLACEMENT CHARACTER}")


def visible(text: str) -> str:
    """`text` without characters that would steer a terminal, or that no encoding has."""
    return text.translate(_VISIBLE)
