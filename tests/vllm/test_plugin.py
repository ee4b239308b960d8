"""The connector is found by its name alone, and by its module as before."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from lakecache import plugin
from vllm_engine import engine, prompt


def test_the_name_is_enough(places: dict[str, str]) -> None:
    # What the build installs; without it the engine would say that it does not know the name.
    (found,) = entry_points(group="vllm.general_plugins", name="lakecache")
    assert found.load() is plugin.register
    with engine(places, module_path=None) as named:
        assert named.generate([prompt(300, 9)])[0][2] == 0
        named.forget_gpu()
        assert named.generate([prompt(300, 9)])[0][2] == 256


def test_registering_imports_no_connector_and_may_be_repeated() -> None:
    code = """
import sys
from lakecache import plugin
assert not {"torch", "vllm", "msgspec"} & set(sys.modules)
plugin.register()
plugin.register()
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory as Factory
assert not {"lakecache.connector", "lakecache._core"} & set(sys.modules)
for name in ("LakeCacheConnector", "MiniCacheConnector", "HybridCheckpointConnector"):
    assert Factory.get_connector_class_by_name(name).__name__ == name
# Without the plugin, for a connector that is found by its module.
Factory._registry.clear()
del sys.modules["lakecache.connector"]
import lakecache.connector
assert Factory.get_connector_class_by_name("LakeCacheConnector").__module__ in sys.modules
"""
    python = str(Path(plugin.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": python}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


def test_another_vllm_goes_on_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm.distributed.kv_transfer.kv_connector.factory", None)
    plugin.register()
