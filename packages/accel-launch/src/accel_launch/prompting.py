"""The questions of `accel config` on a terminal: arrow keys and validated lines, by questionary."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import questionary


class TerminalPrompter:
    """Asks with arrow keys; Ctrl-C breaks off.

    Args:
        options: for questionary, such as another `input` and `output`.
    """

    def __init__(self, **options: Any) -> None:
        self._options = options

    def select(self, text: str, choices: list[tuple[str, Any]], default: Any) -> Any:
        """One of several, by arrow keys."""
        shown = [questionary.Choice(title, value=index) for index, (title, _) in enumerate(choices)]
        index = next((index for index, (_, value) in enumerate(choices) if value == default), 0)
        answer = questionary.select(text, shown, default=shown[index], **self._options).ask(kbi_msg="")
        return None if answer is None else choices[answer][1]

    def text(self, text: str, default: str, check: Callable[[str], bool | str]) -> str | None:
        """A line that `check` allows."""
        answer: str | None = questionary.text(text, default=default, validate=check, **self._options).ask(kbi_msg="")
        return answer

    def confirm(self, text: str, default: bool) -> bool | None:
        """Yes or no."""
        answer: bool | None = questionary.confirm(text, default=default, **self._options).ask(kbi_msg="")
        return answer
