"""Errors that the user has to fix."""


class UserError(Exception):
    """An error that only the user can fix. Commands print it without a traceback and exit with code 2."""
