"""The error of the data package."""

from depthlm.errors import UserError


class DataError(UserError):
    """Data that cannot be used.

    what: what was wrong. where: the file, folder or key. remedy: what to do about it, as a sentence.
    """

    def __init__(self, what: str, where: object, remedy: str) -> None:
        super().__init__(what, where, remedy)
        self.what, self.where, self.remedy = what, where, remedy

    def __str__(self) -> str:
        return f"{self.what}: {self.where}. {self.remedy}"
