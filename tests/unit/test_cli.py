"""The command line: what it says, what it removes, and how it ends."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lakecache._core")

from lakecache.cli import main
from lakecache.store import TieredStore

COUNT = 5
SIZE = 100_000
FILE_BYTES = 4096 + 102_400


@pytest.fixture
def place(tmp_path: Path, ram_folder: Path) -> list[str]:
    """The options that name an empty store."""
    (tmp_path / "cache").mkdir()
    return ["--cache-dir", str(tmp_path / "cache"), "--ram-dir", str(ram_folder)]


def opened(place: list[str], **settings: Any) -> TieredStore:
    settings = {"cpu_bytes": 32 << 20, "disk_capacity_bytes": 64 << 20, **settings}
    return TieredStore(cache_dir=place[1], ram_dir=place[3], **settings)


def fill(place: list[str]) -> None:
    with opened(place) as store:
        for number in range(COUNT):
            assert store.put(b"%d" % number, bytes([number]) * SIZE, timeout=30)
        assert store.flush()


def found(store: TieredStore) -> int:
    with store.lease_many([b"%d" % number for number in range(COUNT)]) as lease:
        return sum(lease.found)


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Run a command that ends well; what it wrote as JSON."""

    def run(*arguments: str, status: int = 0) -> Any:
        capsys.readouterr()
        assert main([*arguments, "--json"]) == status
        return json.loads(capsys.readouterr().out)

    return run


def objects(place: list[str]) -> list[Path]:
    return list(Path(place[1]).rglob("*.kv"))


def test_stats_counts_both_tiers_beside_an_open_store(place, said):
    fill(place)
    with opened(place) as store:
        seen = said("stats", *place)
        assert seen["in_use"]
        memory, disk = seen["memory"], seen["disk"]
        assert memory["members"] == [{"pid": os.getpid(), "alive": True}]
        assert memory["objects"] == COUNT
        assert memory["used_bytes"] == store.stats()["memory_bytes_used"]
        assert (disk["objects"], disk["bytes"]) == (COUNT, COUNT * FILE_BYTES)
        assert disk["limit_bytes"] == 64 << 20
        (namespace,) = disk["namespaces"].values()
        assert namespace["stored"] == {"chunks": {"objects": COUNT, "bytes": COUNT * FILE_BYTES}}
        assert found(store) == COUNT


def test_stats_changes_nothing(place, said):
    fill(place)
    before = sorted((path, path.stat().st_mtime_ns) for path in Path(place[1]).rglob("*"))
    assert said("stats", *place)["memory"]["members"] == []
    assert before == sorted((path, path.stat().st_mtime_ns) for path in Path(place[1]).rglob("*"))


def test_stats_names_what_is_damaged_or_foreign(place, said):
    fill(place)
    # Headers are read only where the saved list is missing.
    (Path(place[1]) / "objects.snapshot").unlink()
    objects(place)[0].write_bytes(b"x" * FILE_BYTES)
    (Path(place[1]) / "notes.txt").write_text("mine")
    disk = said("stats", *place)["disk"]
    (namespace,) = disk["namespaces"].values()
    assert namespace["stored"]["chunks"]["objects"] == COUNT - 1
    assert namespace["stored"]["damaged"]["objects"] == 1
    assert disk["foreign"] == [str(Path(place[1]) / "notes.txt")]


@pytest.mark.timeout(60)
def test_a_manifest_that_is_none_names_nothing(place, said):
    fill(place)
    (manifest,) = Path(place[1]).rglob("manifest.json")
    for broken in (b"", b"[" * 100_000, b"{}", b"[]", b"\xff", None):
        if broken is None:
            manifest.unlink()
            os.mkfifo(manifest)
        else:
            manifest.write_bytes(broken)
        (namespace,) = said("stats", *place)["disk"]["namespaces"].values()
        assert namespace["about"] is None


def test_memory_only(ram_folder, said):
    ram = ["--ram-dir", str(ram_folder)]
    assert said("stats", *ram)["memory"] is None
    with TieredStore(ram_dir=str(ram_folder), cpu_bytes=32 << 20) as store:
        assert store.put(b"0", b"x" * SIZE, timeout=30)
    seen = said("stats", *ram)
    assert seen["memory"]["objects"] == 1
    assert seen["disk"] is None
    assert said("clear", *ram, "--yes")["memory_bytes"] > 0
    assert said("stats", *ram)["memory"] is None


def test_text_says_the_same(place, capsys):
    fill(place)
    assert main(["stats", *place]) == 0
    out = capsys.readouterr().out
    assert f"{COUNT} chunks (520 KiB)" in out
    assert "used by nobody" in out
    assert main(["clear", *place, "--yes"]) == 0
    assert f"removed {COUNT} objects, 520 KiB on disk" in capsys.readouterr().out
    assert main(["doctor", *place, "--cpu-bytes", "32MiB"]) in (0, 1)
    assert "io_uring: " in capsys.readouterr().out


def test_clear_leaves_what_is_not_ours(place, said, tmp_path):
    fill(place)
    folder = objects(place)[0].parent
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("kept")
    foreign = [folder / "note.kv", folder / "x.txt", Path(place[1]) / "link"]
    foreign[0].write_text("no key")
    foreign[1].write_text("mine")
    foreign[2].symlink_to(outside)
    # A namespace's name does not make a link ours.
    foreign.append(Path(place[1]) / ("ab" * 32))
    foreign[3].symlink_to(outside)
    (Path(place[1]) / ".left.tmp").write_text("unfinished")
    gone = said("clear", *place, "--yes")
    assert gone["objects"] == COUNT
    assert gone["disk_bytes"] == COUNT * FILE_BYTES
    assert sorted(gone["foreign"]) == sorted(str(path) for path in foreign)
    assert (outside / "precious").read_text() == "kept"
    left = {path for path in Path(place[1]).rglob("*") if not path.is_dir() or path.is_symlink()}
    names = ("lock", "objects.lock", "pool-id", "pool-incarnation")
    assert left == {*foreign, *(Path(place[1]) / name for name in names)}
    with opened(place) as store:
        assert found(store) == 0
        assert store.put(b"0", b"x" * SIZE, timeout=30)


def test_clear_one_tier_only(place, said):
    fill(place)
    gone = said("clear", *place, "--yes", "--memory-only")
    assert gone["memory_bytes"] > 0
    assert (gone["objects"], len(objects(place))) == (0, COUNT)
    assert said("stats", *place)["memory"] is None
    with opened(place) as store:
        assert found(store) == COUNT
    fill(place)
    gone = said("clear", *place, "--yes", "--disk-only")
    assert gone["memory_bytes"] is None
    assert (gone["objects"], objects(place)) == (COUNT, [])
    assert said("stats", *place)["memory"] is not None


def test_clear_asks_at_a_terminal(place, monkeypatch, capsys):
    fill(place)
    assert main(["clear", *place]) == 2
    assert "--yes" in capsys.readouterr().err
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)

    def interrupted(_: str) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("builtins.input", interrupted)
    assert main(["clear", *place]) == 1
    for answer, status, left in (("", 1, COUNT), ("yes", 0, 0)):
        monkeypatch.setattr("builtins.input", lambda _, answer=answer: answer)
        assert main(["clear", *place]) == status
        assert len(objects(place)) == left


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["stats", "--cache-dir", "/nowhere/at/all"], "/nowhere/at/all is not a directory"),
        (["stats", "--ram-dir", "/nowhere/at/all"], "/nowhere/at/all is not a directory"),
        (["stats", "--cache-dir", "/proc"], "was never used by LakeCache"),
        (["clear", "--cache-dir", "/proc", "--yes"], "was never used by LakeCache"),
        (["clear", "--disk-only", "--yes"], "needs --cache-dir"),
        (["doctor", "--cpu-bytes", "9"], "cpu_bytes is '9'"),
        (["doctor", "--disk-capacity-bytes", "1GiB"], "cache_dir is not set"),
    ],
)
def test_what_is_wrong_takes_one_sentence(arguments, text, capsys):
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert text in error
    assert error.count("\n") == 1


def test_what_belongs_to_another_user(place, monkeypatch, capsys):
    def refused(*_: Any, **__: Any) -> bool:
        raise PermissionError(13, "Permission denied", "lock")

    monkeypatch.setattr(Path, "exists", refused)
    assert main(["stats", *place]) == 1
    assert "run it as the user that runs the engine" in capsys.readouterr().err


def test_a_forgotten_cache_dir_is_no_empty_store(ram_folder, capsys):
    for arguments in (["stats"], ["clear", "--yes"]):
        assert main([*arguments, "--ram-dir", str(ram_folder)]) == 0
        assert "--cache-dir names the store" in capsys.readouterr().out


def test_a_forgotten_ram_dir_is_no_empty_pool(place, tmp_path, capsys):
    fill(place)
    other = tmp_path / "other"
    other.mkdir()
    elsewhere = [*place[:2], "--ram-dir", str(other)]
    # The first of them waits until the closed store has let go.
    for arguments in (["clear", "--yes"], ["stats"]):
        assert main([*arguments, *elsewhere]) == 0
        assert f"no pool in {other}; where engines" in capsys.readouterr().out
    with opened(place):
        assert main(["stats", *elsewhere]) == 0
        assert f"cannot be seen in {other}; where engines" in capsys.readouterr().out


def test_a_reader_that_leaves_early_is_no_error():
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "lakecache", "doctor"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "python")}
    ended = subprocess.run(
        command, env=environment, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60
    )
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (1, "")


def test_version(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert re.fullmatch(r"lakecache \d+\.\d+\.\d+\n", capsys.readouterr().out)


def test_arguments_that_are_unknown(capsys):
    for arguments in ([], ["empty"], ["clear", "--memory-only", "--disk-only"]):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 2
        assert "error" in capsys.readouterr().err


def checks(seen: Any) -> dict[str, tuple[str, str]]:
    return {check["name"]: (check["status"], check["found"]) for check in seen["checks"]}


def test_doctor_leaves_an_unused_directory_as_it_was(place, said):
    (Path(place[1])).chmod(0o700)
    seen = checks(said("doctor", *place, "--cpu-bytes", "32MiB"))
    assert seen["cache_dir"][0] == "ok"
    assert {"memory", "disk space", "io_uring", "O_DIRECT", "O_TMPFILE"} <= seen.keys()
    assert list(Path(place[1]).iterdir()) == []


def test_doctor_finds_what_can_never_work(place, said):
    (Path(place[1])).chmod(0o777)
    seen = said("doctor", *place, "--cpu-bytes", "512TiB", status=1)
    assert not seen["ok"]
    memory, directory = checks(seen)["memory"], checks(seen)["cache_dir"]
    assert memory[0] == directory[0] == "error"
    assert "can never fit" in memory[1]
    assert "no other user may write to" in directory[1]


def test_doctor_warns_of_limits(place, said, monkeypatch):
    from lakecache.cli import _doctor

    monkeypatch.setattr(resource, "getrlimit", lambda _: (1 << 16, 1024))
    monkeypatch.setattr(_doctor, "_may_lock", lambda: False)
    monkeypatch.setattr(_doctor, "HUGE_PAGES_SINCE", (99, 0))
    seen = checks(said("doctor", *place, "--disk-capacity-bytes", "1000TiB"))
    for name in ("locked memory", "open files", "huge pages", "disk space"):
        assert seen[name][0] == "warning", name


def test_doctor_warns_of_a_ram_dir_on_disk(place, said, monkeypatch):
    from lakecache.cli import _doctor

    assert _doctor._file_system(Path("/proc")) == "proc"
    assert "ram_dir" not in checks(said("doctor", *place, "--cpu-bytes", "32MiB"))
    monkeypatch.setattr(_doctor, "_file_system", lambda _: "ext4")
    status, text = checks(said("doctor", *place, "--cpu-bytes", "32MiB"))["ram_dir"]
    assert (status, "is on ext4, not on a tmpfs" in text) == ("warning", True)


@pytest.mark.parametrize(
    ("version", "status"),
    [("0.32.0+cpu", "ok"), ("0.32", "ok"), ("0.33.1", "error"), ("0.320", "error")],
)
def test_doctor_knows_vllms_version(version, status, said, monkeypatch):
    from lakecache.cli import _doctor

    monkeypatch.setattr(_doctor.metadata, "version", lambda _: version)
    monkeypatch.setenv("VLLM_PLUGINS", "others")
    seen = checks(said("doctor", "--cpu-bytes", "32MiB", status=int(status == "error")))
    assert seen["vLLM"] == (status, version)
    assert ("plugin" in seen) == (status == "ok")
