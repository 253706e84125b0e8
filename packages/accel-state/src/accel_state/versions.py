"""Comparing releases."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

_OPERATIONS: dict[str, Callable[[Any, Any], bool]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "<=": operator.le,
    "<": operator.lt,
}


def compare_versions(library_or_version: Any, operation: str, requirement_version: str) -> bool:
    """Whether a release stands in a relation to another one.

    Args:
        library_or_version: the name of an installed distribution, or a release (a text that begins with a digit, or a
            version object).
        operation: `>`, `>=`, `==`, `!=`, `<=` or `<`.
        requirement_version: what to compare with.

    Raises:
        ValueError: another operation, or a distribution whose release is none (as `git-abc` of some builds).
        importlib.metadata.PackageNotFoundError: no such distribution.
    """
    compare = _OPERATIONS.get(operation)
    if compare is None:
        raise ValueError(f"operation={operation!r} is not known; allowed are {', '.join(_OPERATIONS)}")
    from torch.torch_version import TorchVersion  # compares by PEP 440, which saves a dependency

    text = str(library_or_version)
    if not text[:1].isdigit():
        from importlib.metadata import version

        text = version(text)
        if not text[:1].isdigit():
            raise ValueError(f"the installed {library_or_version} calls its release {text!r}, which cannot be compared")
    return bool(compare(TorchVersion(text), str(requirement_version)))


def is_torch_version(operation: str, version: str) -> bool:
    """Whether the release of torch that runs stands in a relation to `version`; its local part (`+cpu`) is ignored."""
    from torch.torch_version import __version__

    return compare_versions(str(__version__).partition("+")[0], operation, version)
