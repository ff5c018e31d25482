"""The entry points of installed packages."""

from quire.ipc.plugins import installed_plugins
from quire.tests.installed_plugins import install_plugin


def test_they_are_found_without_being_imported(tmp_path, monkeypatch):
    assert installed_plugins() == []
    install_plugin(tmp_path, "raise ValueError")
    monkeypatch.syspath_prepend(str(tmp_path))
    [plugin] = installed_plugins()
    assert (plugin.name, plugin.value) == ("mine", "my_kernels")
