"""One set of engines for all tests of this folder."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import site_engines


@pytest.fixture(scope="session")
def site() -> Iterator[site_engines.Site]:
    made = site_engines.Site()
    try:
        yield made
    finally:
        made.close()


class Teller:
    """Says at once how each test of this folder went: a machine's time may end before pytest's."""

    def __init__(self, config: pytest.Config) -> None:
        self.plugins = config.pluginmanager

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        terminal = self.plugins.get_plugin("terminalreporter")
        if terminal is None or not report.nodeid.startswith("tests/gpu/"):
            return
        if report.when == "call" or not report.passed:
            terminal.ensure_newline()
            terminal.write_line(
                f"{report.nodeid}: {report.when} {report.outcome} after {report.duration:.1f} s"
            )
            if report.failed:
                terminal.write_line(report.longreprtext)
            terminal.flush()


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Teller(config))
