"""Registration of the pool with a stand-in for the CUDA driver."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from lakecache import _cuda

MIB = 1 << 20
BASE = 1 << 40


class Pool:
    """Pieces that come one after the other."""

    def __init__(self, *sizes: int) -> None:
        self.sizes, self.reserved = sizes, 0
        self.declared = False

    def declare_gpu_copies(self) -> None:
        self.declared = True

    def pieces(self) -> list[tuple[int, int, bool]]:
        found, address = [], BASE
        for index, size in enumerate(self.sizes):
            found.append((address, size, index < self.reserved))
            address += size
        return found


class Driver:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.registered: dict[int, int] = {}
        self.refuse_at: int | None = None
        monkeypatch.setattr(_cuda, "_call", self.call)
        monkeypatch.setattr(_cuda, "_libc", lambda: self)
        monkeypatch.setattr(_cuda, "LOOK_AGAIN_SECONDS", 0.001)
        monkeypatch.setattr(_cuda, "LONGEST_WAIT_SECONDS", 0.002)

    def madvise(self, *_: int) -> int:
        return 0

    def call(self, name: str, *arguments: Any) -> None:
        if name == "cuMemHostRegister_v2":
            if self.refuse_at == arguments[0]:
                raise _cuda.CudaError(f"{name} failed: no")
            self.registered[arguments[0]] = arguments[1]
        elif name == "cuMemHostUnregister":
            del self.registered[arguments[0]]


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    return Driver(monkeypatch)


def until(what: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 20
    while not what() and time.monotonic() < deadline:
        time.sleep(0.001)
    return what()


def test_only_what_is_reserved_is_registered_and_all_of_it_in_the_end(driver: Driver) -> None:
    pool = Pool(48 * MIB, 48 * MIB, 20 * MIB)
    registration = _cuda.HostRegistration(pool)
    assert not registration.covers([(BASE, 1)])
    pool.reserved = 1
    # The second slice reaches into the second piece, which is not there yet.
    assert until(lambda: registration.covers([(BASE, 32 * MIB)]))
    assert not registration.covers([(BASE + 31 * MIB, 2 * MIB)])
    pool.reserved = 3
    assert until(lambda: registration.covers([(BASE, 116 * MIB)]))
    assert until(lambda: registration.registered_bytes == 116 * MIB)
    assert sorted(driver.registered.items()) == [
        (BASE + number * 32 * MIB, min(32, 116 - number * 32) * MIB) for number in range(4)
    ]
    registration.close()
    assert driver.registered == {}


def test_copies_are_cut_where_registrations_meet(driver: Driver) -> None:
    registration = _cuda.HostRegistration(Pool(128 * MIB))
    spans = [(BASE + 30 * MIB, 40 * MIB), (BASE + 96 * MIB, 32 * MIB), (BASE + 5, 7)]
    assert registration.cut(spans) == [
        (BASE + 30 * MIB, 2 * MIB),
        (BASE + 32 * MIB, 32 * MIB),
        (BASE + 64 * MIB, 6 * MIB),
        (BASE + 96 * MIB, 32 * MIB),
        (BASE + 5, 7),
    ]
    registration.close()


def test_the_pool_is_told_before_the_driver_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool(32 * MIB)

    def refuse(name: str, *_: Any) -> None:
        assert pool.declared, name
        raise _cuda.CudaError(f"{name} failed: no")

    monkeypatch.setattr(_cuda, "_call", refuse)
    with pytest.raises(_cuda.CudaError):
        _cuda.HostRegistration(pool)
    assert pool.declared


def test_a_refusal_is_one_warning_and_nothing_waits(
    driver: Driver, warnings: pytest.LogCaptureFixture
) -> None:
    driver.refuse_at = BASE + 32 * MIB
    pool = Pool(96 * MIB)
    pool.reserved = 1
    registration = _cuda.HostRegistration(pool)
    assert until(lambda: registration.covers([(BASE, 96 * MIB)]))
    # The warning comes behind the refusal, on the thread that ends here.
    registration.close()
    assert [line.levelname for line in warnings.records] == ["WARNING"]
    assert driver.registered == {}
