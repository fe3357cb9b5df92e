"""What rotationzoo raises when it knows what went wrong."""


class RotationZooError(Exception):
    """A known failure: one sentence saying what was wrong and, as `hint`, what to do next.

    `exit_code` is what the command line exits with.
    """

    exit_code = 1

    def __init__(self, message: str, hint: str | None = None):
        super().__init__(message)
        self.hint = hint


class UsageError(RotationZooError):
    """Options that contradict each other or are out of range, found before anything is read."""

    exit_code = 2


class UnsupportedModel(RotationZooError):
    """A model whose cache a per-head rotation does not fit, or that hides its attention from us."""


class ModelUnavailable(RotationZooError):
    """A model that could not be found, reached or read."""


class Interrupted(RotationZooError):
    """Stopped by the user; the hint is the command that goes on from where it stopped."""

    exit_code = 130
