"""A package whose `__init__` runs when it is asked for a name; hivemind is one."""

from __future__ import annotations

import subprocess
import sys

import pytest

from swarm.late import hold_back


@pytest.fixture
def package(tmp_path, monkeypatch):
    folder = tmp_path / "some_package"
    folder.mkdir()
    (folder / "__init__.py").write_text("from some_package.heavy import value\n__version__ = '1'\n")
    (folder / "heavy.py").write_text("value = 5")
    (folder / "part.py").write_text("import some_package.other as other")
    (folder / "other.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    yield "some_package"
    for name in [name for name in sys.modules if name.split(".")[0] == "some_package"]:
        del sys.modules[name]


def test_a_part_is_imported_without_the_rest(package):
    hold_back(package)
    import some_package.part  # type: ignore[import-not-found]  # noqa: F401

    assert {"some_package.part", "some_package.other"} <= sys.modules.keys()
    assert "some_package.heavy" not in sys.modules


def test_init_has_run_once_a_name_is_asked_for(package):
    hold_back(package)
    import some_package.part  # type: ignore[import-not-found]

    assert not hasattr(some_package, "__wrapped__") and "some_package.heavy" not in sys.modules
    from some_package import value

    assert value == 5 and some_package.__version__ == "1"
    with pytest.raises(AttributeError):
        some_package.nothing  # noqa: B018


def test_a_package_that_was_imported_before_is_left_alone(package):
    import some_package

    hold_back(package)
    assert sys.modules[package] is some_package and "__getattr__" not in vars(some_package)


def test_a_package_that_is_not_there_is_missing_as_ever():
    hold_back("no_such_package")
    with pytest.raises(ModuleNotFoundError):
        import no_such_package  # type: ignore[import-not-found]  # noqa: F401


def test_all_of_hivemind_is_there_for_who_asks():
    program = (
        "import sys, swarm.p2pd; assert 'scipy' not in sys.modules\n"
        "import hivemind; from hivemind import *; from hivemind.optim import Optimizer as part\n"
        "assert hivemind.Optimizer is Optimizer is part and hivemind.__version__ and DHT is hivemind.dht.DHT\n"
        "assert hivemind.p2p.P2P is swarm.p2pd.P2P and 'scipy' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
