"""Errors that a user can cause or meet; each message names the place and what would work instead."""


def first_line(e: BaseException) -> str:
    """What an exception says, without its stack and advice."""
    return next((line.strip() for line in str(e).splitlines() if line.strip()), type(e).__name__)


class AttnBoundsError(Exception):
    """Base of all errors that this package raises on purpose."""


class InputError(AttnBoundsError, ValueError):
    """Bad input: a file, an option, a property or a tensor that cannot be used."""


class UnsupportedModelError(InputError):
    """A model with operators that cannot be loaded or bounded."""
