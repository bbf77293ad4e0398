"""What is the user's to mend."""


class UserError(Exception):
    """A mistake that only the user can mend: commands print it without a traceback and exit with 2."""
