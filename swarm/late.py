"""Owns a package's `__init__` that runs late: when somebody asks the package itself for something.

Python runs the `__init__` of hivemind before any part of it. It imports what training needs (scipy and pydantic among
it, half a second), and nothing that our parts need.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec, module_from_spec
from typing import Any

ASKED = ("__all__", "__version__")  # of names with two underscores: importing looks for others


def hold_back(package: str) -> None:
    """From now on `import package.part` runs no more than the part. Whoever asks the package for a name gets what its
    `__init__` defines. Changes nothing where it has run already, or is not installed."""
    if package in sys.modules or (spec := find_spec(package)) is None or spec.loader is None:
        return
    module, loader = module_from_spec(spec), spec.loader

    def run_init(name: str) -> Any:
        if name.startswith("__") and name not in ASKED:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if (part := sys.modules.get(f"{package}.{name}")) is not None:
            return part  # that is being imported
        vars(module).pop("__getattr__", None)
        loader.exec_module(module)
        return getattr(module, name)

    vars(module)["__getattr__"] = run_init  # PEP 562
    sys.modules[package] = module
