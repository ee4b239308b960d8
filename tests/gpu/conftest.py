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
        self.terminal = config.pluginmanager.get_plugin("terminalreporter")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if self.terminal is None or not report.nodeid.startswith("tests/gpu/"):
            return
        if report.when == "call" or not report.passed:
            self.terminal.ensure_newline()
            self.terminal.write_line(
                f"{report.nodeid}: {report.when} {report.outcome} after {report.duration:.1f} s"
            )
            if report.failed:
                self.terminal.write_line(report.longreprtext)
            self.terminal.flush()


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Teller(config))
