"""Safe YAML that refuses a key given twice, of which the last would win in silence."""

from __future__ import annotations

from typing import Any

import yaml


class Loader(yaml.SafeLoader):
    """`yaml.SafeLoader` without doubled keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """The mapping of a node; a doubled key is an error with its line and column."""
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, str) and key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key!r} stands here twice", key_node.start_mark)
            seen.add(key if isinstance(key, str) else id(key_node))
        return super().construct_mapping(node, deep=deep)
