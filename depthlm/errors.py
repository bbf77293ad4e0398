"""Errors that the user has to fix."""


class UserError(Exception):
    """An error that only the user can fix. Commands print it without a traceback and exit with code 2."""


class DataError(UserError):
    """Data that cannot be used.

    what: what was wrong. where: the file, folder or key. remedy: what to do about it, as a sentence.
    """

    def __init__(self, what: str, where: object, remedy: str) -> None:
        super().__init__(what, where, remedy)
        self.what, self.where, self.remedy = what, where, remedy

    def __str__(self) -> str:
        return f"{self.what}: {self.where}. {self.remedy}"
