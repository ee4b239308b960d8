"""The store: what goes in comes out, misses are not exceptions, wrong use says what to do."""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

pytest.importorskip("lakecache._core")

from lakecache._buffers import DeviceAccess
from lakecache.errors import (
    CapacityError,
    ClosedError,
    ConfigError,
    LeaseLostError,
    StorageError,
)
from lakecache.store import DiskBackend, TieredStore

MIB = 1 << 20


def payload(seed: int, size: int) -> bytes:
    return bytes((seed * 37 + at * 11 + at // 256) % 256 for at in range(size))


@pytest.fixture
def places(tmp_path, ram_folder):
    return {"cache_dir": str(tmp_path / "cache"), "ram_dir": str(ram_folder)}


@pytest.fixture
def store(places):
    with TieredStore(**places, cpu_bytes=64 * MIB) as made:
        yield made


def test_bytes_come_back(store):
    data = payload(1, 100_001)
    assert store.put(b"one", data)
    assert store.lookup([b"one"]) == (1, 1)
    with store.lease_many([b"one"]) as lease:
        assert lease.found == [True]
        assert lease.tier(0) == "memory"
        assert lease.read(0) == data
        assert all(view.readonly for view in lease.view(0))


def test_memory_emptied_then_read_from_disk_then_from_memory(store):
    data = payload(2, 300_000)
    assert store.put(b"key", data)
    assert store.flush()
    assert store.clear_memory() > 0
    sources = []
    for _ in range(2):
        with store.lease_many([b"key"]) as lease:
            sources.append(lease.tier(0))
            assert lease.read(0) == data
    assert sources == ["disk", "memory"]


def test_lease_many_skips_what_is_missing(store):
    for name in (b"a", b"c", b"d", b"f"):
        assert store.put(name, name * 5000)
    keys = [b"a", b"b", b"c", b"d", b"e", b"f", b"g"]
    with store.lease_many(keys) as lease:
        assert lease.found == [True, False, True, True, False, True, False]
        assert lease.load() == 4
        for index, name in enumerate(keys):
            if lease.found[index]:
                assert lease.read(index) == name * 5000
            else:
                assert lease.tier(index) is None
                with pytest.raises(KeyError):
                    lease.view(index)


def test_reserve_prefix_stops_at_the_first_gap(store):
    parent = None
    for name in (b"0", b"1", b"3"):
        assert store.put(name, name * 10_000, parent=parent)
        parent = name
    with store.reserve_prefix([b"0", b"1", b"2", b"3"]) as lease:
        assert len(lease) == 2
        assert [lease.read(at) for at in range(2)] == [b"0" * 10_000, b"1" * 10_000]
    with store.reserve_prefix([b"nothing"]) as lease:
        assert len(lease) == 0


def test_first_writer_wins(store):
    assert store.put(b"key", b"first" * 1000)
    assert store.put(b"key", b"other" * 1000)
    with store.lease_many([b"key"]) as lease:
        assert lease.read(0) == b"first" * 1000


def test_namespaces_do_not_meet(places):
    with (
        TieredStore(**places, cpu_bytes=64 * MIB, namespace="one") as one,
        TieredStore(**places, cpu_bytes=64 * MIB, namespace=b"n" * 32) as two,
    ):
        assert one.pool_id == two.pool_id
        assert one.put(b"key", b"x" * 5000)
        assert two.lookup([b"key"]) == (0, 0)
        assert one.key(b"key") != two.key(b"key")


def test_a_second_store_sees_what_the_first_put(places):
    with (
        TieredStore(**places, cpu_bytes=64 * MIB) as one,
        TieredStore(**places, cpu_bytes=64 * MIB) as two,
    ):
        assert one.put(b"key", b"shared" * 999)
        with two.lease_many([b"key"]) as lease:
            assert (lease.tier(0), lease.read(0)) == ("memory", b"shared" * 999)


@pytest.mark.parametrize("shared", [True, False])
def test_reopening(places, shared):
    with TieredStore(**places, cpu_bytes=64 * MIB, shared=shared) as store:
        assert store.put(b"key", b"kept" * 4096)
        assert store.flush()
    store = TieredStore(**places, cpu_bytes=64 * MIB, shared=shared)
    with store, store.lease_many([b"key"]) as lease:
        assert lease.found == [True]
        assert lease.tier(0) == ("memory" if shared else "disk")
        assert lease.read(0) == b"kept" * 4096


def test_a_directory_that_was_moved(places, tmp_path):
    data = payload(8, 70_000)
    with TieredStore(**places, cpu_bytes=64 * MIB, shared=True) as store:
        assert store.put(b"one", data)
        store.flush()
    # The pool that is left has this directory's name, and thinks that it is gone.
    moved = Path(places["cache_dir"]).rename(tmp_path / "moved")
    places["cache_dir"] = str(moved)
    with (
        TieredStore(**places, cpu_bytes=64 * MIB, shared=True) as store,
        store.lease_many([b"one"]) as lease,
    ):
        assert lease.read(0) == data


def test_memory_only(ram_folder):
    with TieredStore(ram_dir=str(ram_folder), cpu_bytes=64 * MIB, shared=False) as store:
        assert store.put(b"key", b"m" * 9999)
        assert store.clear_memory() > 0
        assert store.lookup([b"key"]) == (0, 0)


def test_disk_backend(places):
    with DiskBackend(**places) as disk:
        assert disk.put(b"key", payload(3, 70_000))
        assert disk.put(b"key", payload(4, 70_000))
    with DiskBackend(**places) as disk, disk.lease_keys([b"key", b"none"]) as lease:
        assert lease.found == [True, False]
        assert lease.read(0) == payload(3, 70_000)
    with pytest.raises(ConfigError, match="TieredStore"):
        DiskBackend(**places, cpu_bytes="1GiB")


def test_buffers_of_any_kind(store):
    array = (ctypes.c_uint32 * 2048)(*range(2048))
    assert store.put(b"array", array)
    back = bytearray(ctypes.sizeof(array))
    with store.lease_many([b"array"]) as lease:
        lease.copy_into(0, back)
        assert back == bytes(array)
        with pytest.raises(ConfigError, match="8192"):
            lease.copy_into(0, bytearray(5))
        with pytest.raises(TypeError, match="read-only"):
            lease.copy_into(0, bytes(8192))


def test_tensors(store):
    torch = pytest.importorskip("torch")
    tensor = torch.randn(2, 16, 2, 64).to(torch.bfloat16)
    assert store.put(b"tensor", tensor)
    back = torch.empty_like(tensor)
    with store.lease_many([b"tensor"]) as lease:
        lease.copy_into(0, back)
    assert torch.equal(tensor.view(torch.int16), back.view(torch.int16))
    with pytest.raises(TypeError, match=r"\.contiguous\(\)"):
        store.put(b"strided", tensor.transpose(0, 1))
    turned = torch.tensor([1 + 2j]).conj()
    for value in (turned, turned.imag):
        for put in (store.put, store.put_device):
            with pytest.raises(TypeError, match=r"\.resolve_conj\(\)"):
                put(b"turned", value)
    with store.lease_many([b"tensor"]) as lease, pytest.raises(TypeError, match="resolve_neg"):
        lease.copy_into(0, back.view(torch.complex64).conj())


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_tensors_where_they_lie(store, device):
    torch = pytest.importorskip("torch")
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    # Larger than what is registered at a time, and of an odd size.
    tensor = torch.arange(10 * MIB + 3, device=device, dtype=torch.int32)[1:].clone()
    assert store.put_device(b"one", tensor)
    with pytest.raises(CapacityError, match="1 GiB can never fit"):
        store.put_device(b"two", torch.zeros(1 << 30, dtype=torch.uint8, device=device))
    with store.lease_many([b"one"]) as lease:
        back = torch.zeros_like(tensor)
        lease.copy_into(0, back)
        assert torch.equal(back, tensor)
        assert lease.read(0) == tensor.cpu().numpy().tobytes()
        with pytest.raises(ConfigError, match="bytes"):
            lease.copy_into(0, back[1:])
    with pytest.raises(TypeError, match="contiguous"):
        store.put_device(b"three", torch.zeros((4, 4), device=device).t())
    with pytest.raises(ConfigError, match="empty"):
        store.put_device(b"three", torch.zeros(0, device=device))


def test_a_close_meanwhile_leaves_memory_to_the_copy(places, monkeypatch):
    torch = pytest.importorskip("torch")
    closed, other = (TieredStore(**places, cpu_bytes=16 * MIB) for _ in range(2))
    begin = DeviceAccess._pairs

    def begin_then_close(self, *arguments):
        pairs = begin(self, *arguments)
        closed.close()
        for number in range(40):
            other.put(b"%d" % number, bytes([number]) * MIB)
        return pairs

    monkeypatch.setattr(DeviceAccess, "_pairs", begin_then_close)
    with pytest.raises(ClosedError):
        closed.put_device(b"late", torch.full((MIB,), 255, dtype=torch.uint8))
    with other.lease_many([b"%d" % number for number in range(40)]) as lease:
        found = [number for number in range(40) if lease.tier(number) == "memory"]
        assert found
        assert all(lease.read(number) == bytes([number]) * MIB for number in found)
    other.close()


def test_a_view_outlives_lease_and_store(places):
    store = TieredStore(**places, cpu_bytes=64 * MIB)
    data = payload(7, 50_000)
    assert store.put(b"key", data)
    with store.lease_many([b"key"]) as lease:
        views = lease.view(0)
    store.clear_memory()
    assert b"".join(views) == data
    store.close()
    assert b"".join(views) == data


def test_a_released_object_cannot_be_read(store):
    assert store.put(b"key", b"z" * 5000)
    lease = store.lease_many([b"key"])
    lease.release(0)
    lease.release(0)
    with pytest.raises(KeyError):
        lease.view(0)
    lease.close()
    lease.close()


def test_a_flipped_bit_is_a_miss(places):
    with TieredStore(**places, cpu_bytes=64 * MIB) as store:
        assert store.put(b"key", payload(5, 200_000))
        assert store.flush()
        (file,) = Path(places["cache_dir"]).rglob("*.kv")
        store.clear_memory()
        with file.open("r+b") as handle:
            handle.seek(4096 + 100_000)
            old = handle.read(1)
            handle.seek(-1, 1)
            handle.write(bytes([old[0] ^ 1]))
        with store.lease_many([b"key"]) as lease:
            if lease.found == [True]:
                with pytest.raises(LeaseLostError):
                    lease.read(0)
        assert store.lookup([b"key"]) == (0, 0)
        assert store.put(b"key", payload(5, 200_000))
        with store.lease_many([b"key"]) as lease:
            assert lease.read(0) == payload(5, 200_000)


def test_wrong_use_says_what_to_do(store, places):
    with pytest.raises(TypeError, match="torch tensor is needed"):
        store.put_device(b"key", object())
    with pytest.raises(ConfigError, match="empty"):
        store.put(b"key", b"")
    with pytest.raises(TypeError, match="not list"):
        store.put(b"key", [1, 2])
    with pytest.raises(TypeError, match="not contiguous"):
        store.put(b"key", memoryview(b"0123")[::2])
    with pytest.raises(TypeError, match="sequence"):
        store.lookup(b"key")
    with pytest.raises(TypeError, match="must be bytes"):
        store.lookup(["key"])
    with pytest.raises(ConfigError, match="namespace"):
        TieredStore(**places, namespace=b"short")
    with pytest.raises(ConfigError, match="Did you mean 'cpu_bytes'"):
        TieredStore(**places, cpu_byte=1)
    with pytest.raises(ConfigError, match='such as "8GiB"'):
        TieredStore(**places, cpu_bytes="8 gigs")


def test_a_directory_that_cannot_be_used_is_named_with_its_key(tmp_path, places):
    file = tmp_path / "file"
    file.write_text("")
    for key in ("cache_dir", "ram_dir"):
        with pytest.raises(StorageError, match=f"Set {key} to a directory") as refused:
            TieredStore(**{**places, key: str(file / "below")})
        assert refused.value.errno in {errno.ENOENT, errno.ENOTDIR}
        assert f"{key} {file}/below cannot be used" in str(refused.value)


def test_a_closed_lease_keeps_nothing_of_its_store(places):
    with TieredStore(**places, cpu_bytes=64 * MIB) as store:
        assert store.put(b"key", b"k" * 5000)
        lease = store.lease_many([b"key"])
        lease.close()
    with TieredStore(**places, cpu_bytes=64 * MIB, shared=False) as alone:
        assert alone.lookup([b"key"])[0] == 1
    with pytest.raises(KeyError):
        lease.read(0)


def test_after_close(places):
    store = TieredStore(**places, cpu_bytes=64 * MIB)
    store.close()
    store.close()
    with pytest.raises(ClosedError):
        store.put(b"key", b"x")
    with pytest.raises(ClosedError):
        store.stats()


def test_an_object_larger_than_memory_is_refused(store):
    with pytest.raises(CapacityError, match=r"80 MiB can never fit: .* has 5\d(\.\d+)? MiB\. Set"):
        store.put(b"large", bytes(80 * MIB), timeout=60.0)
    assert store.put(b"small", b"s" * 5000)


def test_a_put_without_room_ends_in_time(store):
    size = 20 * MIB
    for key in (b"one", b"two"):
        assert store.put(key, bytes(size))
    with store.lease_many([b"one", b"two"]):
        for timeout in (0.2, float("nan")):
            assert not store.put(b"three", bytes(size), timeout=timeout)
    assert store.put(b"three", bytes(size))


class StoreMachine(RuleBasedStateMachine):
    """Against a dict: any object may be missing, none may be wrong."""

    def __init__(self):
        super().__init__()
        import tempfile

        self.folder = tempfile.TemporaryDirectory()
        self.ram = tempfile.TemporaryDirectory(dir="/dev/shm")
        self.model: dict[bytes, bytes] = {}
        self.leases: list[tuple] = []
        self.store = None

    @initialize(limit=st.sampled_from([None, 2 * MIB]), memory=st.sampled_from([0, 8, 32]))
    def begin(self, limit, memory):
        self.settings = {
            "cache_dir": self.folder.name,
            "ram_dir": self.ram.name,
            "cpu_bytes": memory * MIB,
            "disk_capacity_bytes": limit,
        }
        self.limit = limit
        self.store = TieredStore(**self.settings)

    @rule(name=st.integers(0, 12), size=st.integers(1, 900_000))
    def put(self, name, size):
        key = b"key %d" % name
        data = self.model.get(key) or payload(name, size)
        if self.store.put(key, data, timeout=0.5):
            self.model[key] = data

    @rule(names=st.lists(st.integers(0, 12), min_size=1, max_size=6, unique=True))
    def read(self, names):
        keys = [b"key %d" % name for name in names]
        with self.store.lease_many(keys) as lease:
            for index, key in enumerate(keys):
                if lease.found[index]:
                    assert lease.read(index) == self.model[key]

    @precondition(lambda self: len(self.leases) < 3)
    @rule(names=st.lists(st.integers(0, 12), min_size=1, max_size=3, unique=True))
    def hold(self, names):
        keys = [b"key %d" % name for name in names]
        self.leases.append((keys, self.store.lease_many(keys)))

    @precondition(lambda self: self.leases)
    @rule()
    def read_held(self):
        keys, lease = self.leases.pop(0)
        with lease:
            for index, key in enumerate(keys):
                if lease.found[index]:
                    assert lease.read(index, timeout=20) == self.model[key]

    @rule()
    def clear(self):
        self.store.flush()
        self.store.clear_memory()

    @rule()
    def reopen(self):
        for _, lease in self.leases:
            lease.close()
        self.leases.clear()
        self.store.close()
        self.store = TieredStore(**self.settings)

    @invariant()
    def limit_holds(self):
        if self.store is not None and self.limit is not None:
            files = list(Path(self.folder.name).rglob("*.kv"))
            assert sum(file.stat().st_size for file in files) <= self.limit

    def teardown(self):
        for _, lease in self.leases:
            lease.close()
        if self.store is not None:
            self.store.close()
        self.folder.cleanup()
        self.ram.cleanup()


StoreMachine.TestCase.settings = settings(
    max_examples=12,
    stateful_step_count=15,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
test_store_machine = pytest.mark.slow(StoreMachine.TestCase)


@pytest.mark.parametrize("kind", ["empty", "cut", "longer", "pipe", "directory"])
@pytest.mark.timeout(60)
def test_something_else_in_a_files_place(store, tmp_path, kind):
    data = payload(9, 300_000)
    assert store.put(b"key", data)
    assert store.flush()
    (file,) = (tmp_path / "cache").rglob("*.kv")
    if kind == "empty":
        file.write_bytes(b"")
    elif kind == "cut":
        os.truncate(file, 5000)
    elif kind == "longer":
        os.truncate(file, file.stat().st_size + 4096)
    else:
        file.rename(tmp_path / "away")
        os.mkfifo(file) if kind == "pipe" else file.mkdir()
    store.clear_memory()
    # A pipe that nobody writes to must not be waited for.
    with store.lease_many([b"key"], timeout=5) as lease:
        assert lease.found == [False]
    # It is taken out of use, so that the object can be stored again.
    assert store.lookup([b"key"]) == (0, 0)
    assert store.put(b"key", data)
    with store.lease_many([b"key"]) as lease:
        assert lease.read(0) == data
