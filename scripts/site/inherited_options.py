"""For the reference: the keys that a TypedDict inherits, which griffe leaves out."""

from __future__ import annotations

from typing import Any

from griffe import Attribute, Class, Extension, Function


class InheritedOptions(Extension):
    """Gives the TypedDict behind ``**options: Unpack[...]`` the keys of its bases.

    It is listed before griffe's own extension, which moves keys from classes to signatures.
    """

    def __init__(self) -> None:
        self._keys: dict[str, dict[str, Attribute]] = {}  # of each class, by its path

    def on_class(self, *, cls: Class, **_: Any) -> None:
        """Keep the keys of a class."""
        self._keys[cls.path] = dict(cls.attributes)

    def on_function(self, *, func: Function, **_: Any) -> None:
        """Add the keys of the bases."""
        for parameter in func.parameters:
            annotation: Any = parameter.annotation
            if str(annotation).startswith("Unpack["):
                options = func.modules_collection[annotation.slice.canonical_path]
                for base in options.mro():
                    for name, key in self._keys.get(base.path, base.attributes).items():
                        options.members.setdefault(name, key)
