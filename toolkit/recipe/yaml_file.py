"""Read YAML written by people: safe loader, no duplicate keys, one clear message per problem."""

from __future__ import annotations

import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from toolkit.errors import BadInput

MAX_BYTES = 1_000_000
MAX_ALIASES = 100
MAX_VALUES = 200_000
MAX_DEPTH = 100


class _StrictLoader(yaml.SafeLoader):
    """`SafeLoader` that also rejects duplicate keys and alias bombs, which PyYAML accepts."""

    aliases = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.events.AliasEvent):
            self.aliases += 1
            if self.aliases > MAX_ALIASES:
                raise yaml.YAMLError(f"more than {MAX_ALIASES} aliases")
        return super().compose_node(parent, index)

    def fetch_flow_collection_start(self, token_class: Any) -> Any:
        # PyYAML (6.0.3) looks at every open bracket for each token: 5,000 of them take 7 seconds.
        if self.flow_level >= MAX_DEPTH:
            raise yaml.YAMLError(f"more than {MAX_DEPTH} nested brackets")
        return super().fetch_flow_collection_start(token_class)

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        seen: set[str] = set()
        for key_node, _ in getattr(node, "value", []) if isinstance(node, yaml.MappingNode) else []:
            key = str(key_node.value)
            if key in seen and key != "<<":
                raise yaml.constructor.ConstructorError(None, None, f"duplicate key {key!r}", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


def parse_yaml(text: str, source: str) -> Any:
    """The value of a YAML text; raises `BadInput` that names `source` if it is not plain YAML."""
    try:
        loader = _StrictLoader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _check_size(node)
        return loader.construct_document(node)
    except (yaml.YAMLError, RecursionError, ValueError, TypeError) as error:
        raise BadInput(source, f"not usable as YAML: {_brief(error)}") from None


def _check_size(root: yaml.Node) -> None:
    """Raise `ValueError` for aliases of aliases (a few lines can stand for more values than memory holds) and cycles.

    Values are counted before they are constructed, because PyYAML copies what merge keys (`<<`) refer to.
    """
    sizes: dict[int, int] = {}
    open_nodes: set[int] = set()
    waiting = [root]
    while waiting:
        node = waiting[-1]
        inside = list(_children(node))
        if id(node) not in sizes and id(node) not in open_nodes:
            open_nodes.add(id(node))
            if any(id(child) in open_nodes for child in inside):
                raise ValueError("a value contains itself through an alias")
            waiting += [child for child in inside if id(child) not in sizes]
            continue
        waiting.pop()
        open_nodes.discard(id(node))
        sizes[id(node)] = 1 + sum(sizes[id(child)] for child in inside)
        if sizes[id(node)] > MAX_VALUES:
            raise ValueError(f"more than {MAX_VALUES:,} values, aliases included")


def _children(node: yaml.Node) -> Iterable[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return (part for pair in node.value for part in pair)
    return node.value if isinstance(node, yaml.SequenceNode) else ()


def read_yaml(path: Path) -> Any:
    """The value of a YAML file."""
    return parse_yaml(read_text(path), str(path))


def read_text(path: Path) -> str:
    """Contents of a small text file; raises `BadInput` if it is missing or can't be read."""
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode) and not stat.S_ISDIR(found.st_mode):
            raise BadInput(str(path), "is a device or a pipe; a file is required")
        if found.st_size > MAX_BYTES:
            raise BadInput(str(path), f"larger than {MAX_BYTES:,} bytes; a recipe or cluster file is small")
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise BadInput(str(path), "no such file") from None
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise BadInput(str(path), f"can't be read: {error}") from None


def _brief(error: Exception) -> str:
    mark = getattr(error, "problem_mark", None)
    what = getattr(error, "problem", None) or str(error) or type(error).__name__
    return f"line {mark.line + 1}, column {mark.column + 1}: {what}" if mark else what
