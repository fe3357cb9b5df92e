"""Text on stdout while it is written, and a progress bar on stderr before and after it."""

from contextlib import ExitStack
from types import TracebackType
from typing import Self

from rotationzoo.cli.output import Output, write_text
from rotationzoo.cli.progress_bar import show_progress
from rotationzoo.progress import Progress


class TextScreen:
    """Shows the progress of a job until the job writes text, and again when it is done with that.

    On a terminal a bar and the text would overwrite each other, so only one is shown at a time.
    """

    def __init__(self, out: Output):
        self._out = out
        self._bar = ExitStack()
        self._update: Progress | None = None
        self._line_is_open = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close_bar()
        if not isinstance(error, OSError):  # the reader of the text may be gone
            self._end_line()

    def progress(self, stage: str, done: int, total: int) -> None:
        """Show the progress of the job."""
        if self._update is None:
            self._end_line()
            self._update = self._bar.enter_context(show_progress(self._out))
        self._update(stage, done, total)

    def write(self, text: str) -> None:
        """Show a piece of text."""
        self._close_bar()
        write_text(text)
        self._line_is_open = not text.endswith("\n")

    def note(self, text: str) -> None:
        """Show a remark on stderr."""
        self._close_bar()
        self._end_line()
        self._out.notes([text])

    def _close_bar(self) -> None:
        self._bar.close()
        self._update = None

    def _end_line(self) -> None:
        if self._line_is_open:
            write_text("\n")
            self._line_is_open = False
