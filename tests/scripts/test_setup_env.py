from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

import setup_env

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def steps(monkeypatch, tmp_path):
    """An environment of three harmless steps; `log` says which ran."""
    inputs = tmp_path / "lock.txt"
    inputs.write_text("a==1\n")
    log: list[str] = []
    broken: set[str] = set()

    def step(name: str) -> setup_env.Step:
        def action() -> None:
            log.append(name)
            if name in broken:
                raise setup_env.SetupError(name)

        return setup_env.Step(name, (inputs,), action)

    made = [step("one"), step("two"), step("three")]
    monkeypatch.setattr(setup_env.Environment, "steps", lambda _: made)
    environment = setup_env.Environment(tmp_path / "venv", sys.executable)
    environment.state.mkdir(parents=True)
    monkeypatch.setattr(environment, "_create", lambda: None)
    environment.python = Path(sys.executable)
    return environment, log, broken, inputs


def test_a_complete_environment_is_left_alone(steps):
    environment, log, _, _ = steps
    environment.make()
    environment.make()
    assert log == ["one", "two", "three"]


def test_an_interrupted_setup_goes_on_where_it_stopped(steps):
    environment, log, broken, _ = steps
    broken.add("two")
    with pytest.raises(setup_env.SetupError):
        environment.make()
    assert not environment.is_complete()
    broken.clear()
    log.clear()
    environment.make()
    assert log == ["two", "three"]


def test_a_changed_lock_file_makes_it_incomplete(steps):
    environment, log, _, inputs = steps
    environment.make()
    log.clear()
    inputs.write_text("a==2\n")
    assert not environment.is_complete()
    environment.make()
    assert log == ["one", "two", "three"]


def test_benches_add_a_step_and_leave_the_rest_complete(tmp_path):
    plain, bench = (
        setup_env.Environment(tmp_path, sys.executable, bench=bench) for bench in (False, True)
    )
    names = [[step.name for step in one.steps()] for one in (plain, bench)]
    assert names[1] == [*names[0], "bench"]
    assert plain.complete_mark() != bench.complete_mark()


def test_a_machine_without_fio_is_told_and_goes_on(monkeypatch, capsys):
    monkeypatch.setattr(setup_env, "has_library", lambda _: True)
    monkeypatch.setattr(setup_env.shutil, "which", lambda _: None)
    setup_env.install_system_packages(bench=True)
    assert "fio is not installed" in capsys.readouterr().out
    setup_env.install_system_packages(bench=False)
    assert not capsys.readouterr().out


def test_a_command_is_bounded_and_its_output_shown(capfd):
    started = time.monotonic()
    with pytest.raises(setup_env.SetupError, match="sleep"):
        setup_env.run(["sh", "-c", "echo here; exec sleep 60"], limit_s=0.5)
    assert time.monotonic() - started < 30
    assert "here" in capfd.readouterr().err


def test_a_command_is_tried_again(tmp_path, monkeypatch):
    monkeypatch.setattr(setup_env.time, "sleep", lambda _: None)
    script = f"echo x >> {tmp_path}/tries; [ $(wc -l < {tmp_path}/tries) -ge 3 ]"
    setup_env.run(["sh", "-c", script], limit_s=20, attempts=3)
    assert (tmp_path / "tries").read_text() == "x\n" * 3


@pytest.mark.parametrize(
    "lock", sorted((ROOT / "requirements").glob("*.txt")), ids=lambda p: p.stem
)
def test_lock_files_pin_every_package(lock):
    lines = [line for line in lock.read_text().splitlines() if line and not line.startswith("#")]
    assert lines
    for line in lines:
        assert re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.+]+", line), line


def test_triton_is_kept_out_of_the_packages(tmp_path, monkeypatch):
    commands: list[list[str]] = []
    monkeypatch.setattr(
        setup_env, "run", lambda command, **_: commands.append([str(part) for part in command])
    )
    environment = setup_env.Environment(tmp_path / "venv", sys.executable)
    monkeypatch.setattr(environment, "uv_environment", dict)
    stale = tmp_path / "venv" / "triton" / "stale"
    stale.mkdir(parents=True)
    next(step for step in environment.steps() if step.name == "triton").action()
    (command,) = commands
    assert command[-2:] == ["--target", str(tmp_path / "venv" / "triton")]
    assert not stale.exists()
    locks = set((ROOT / "requirements").glob("*.txt")) - {ROOT / "requirements" / "triton.txt"}
    assert not [lock for lock in locks if re.search("^triton==", lock.read_text(), re.M)]


def test_two_setups_do_not_run_at_once(tmp_path):
    lock = tmp_path / "cache" / "setup.lock"
    with setup_env.only_one(lock, limit_s=1), pytest.raises(setup_env.SetupError):
        setup_env.only_one(lock, limit_s=0).__enter__()
    with setup_env.only_one(lock, limit_s=0):
        pass


def prerequisites(**env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [ROOT / "scripts" / "prerequisites.sh"],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_prerequisites_name_a_usable_python():
    done = prerequisites(PYTHON=sys.executable)
    assert done.returncode == 0, done.stderr
    chosen = Path(done.stdout.strip())
    assert chosen.exists()
    assert Path(sys.prefix) not in chosen.parents, "an environment cannot be remade from itself"


def test_each_missing_prerequisite_is_one_sentence(tmp_path):
    for tool in ("sh", "uname", "sed", "cut", "sort", "head", "dirname"):
        found = next(p for p in ("/bin", "/usr/bin") if Path(p, tool).exists())
        (tmp_path / tool).symlink_to(Path(found, tool))
    done = prerequisites(PATH=str(tmp_path), HOME=str(tmp_path), PYTHON="no-such-python")
    assert done.returncode == 1
    assert done.stdout == ""
    for word in ("gcc", "make", "git", "cargo", "Python 3.11"):
        assert sum(word in line for line in done.stderr.splitlines()) >= 1, word
    assert all(line.startswith("prerequisite: ") for line in done.stderr.splitlines())
