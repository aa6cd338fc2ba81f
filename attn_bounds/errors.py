"""Errors that a user can cause or meet; each message names the place and what would work instead."""


class AttnBoundsError(Exception):
    """Base of all errors that this package raises on purpose."""


class InputError(AttnBoundsError, ValueError):
    """Bad input: a file, an option, a property or a tensor that cannot be used."""


class UnsupportedModelError(InputError):
    """A model with operators that cannot be loaded or bounded."""
