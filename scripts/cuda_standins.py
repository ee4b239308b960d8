"""Let a CUDA build of torch be imported on a machine without NVIDIA's libraries.

PyPI has no CPU build of torch for Linux; its CUDA build is linked against a dozen libraries of
about 1.8 GB that a CPU never calls. For each one that is absent this writes a shared object with
the right name, symbol versions and symbols into the folder on torch's run path. Every function
returns 100 ("no device"). Never use such an environment on a GPU machine.

Run with the environment's Python; needs gcc and readelf.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

LIBRARY = re.compile(r"lib(cu(?!da\.)|nccl|nv)")
SYMBOL = re.compile(r"(__)?(cu|pnccl|nccl|nvrtc|nvJit|nvshmem|nv_)\w*\Z")
NO_DEVICE = 100


@dataclass
class Linkage:
    """What a set of shared objects needs and gives."""

    needed: set[str] = field(default_factory=set)
    versions: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    undefined: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    defined: set[str] = field(default_factory=set)


def readelf(*arguments: str) -> str:
    command = ["readelf", "-W", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout


def read_symbols(listing: str, linkage: Linkage) -> None:
    """Take over the table of `readelf --dyn-syms`: undefined ones by their version."""
    for line in listing.splitlines():
        columns = line.split()
        if len(columns) < 8 or not columns[0].rstrip(":").isdigit():
            continue
        name, _, version = columns[7].partition("@")
        if columns[6] == "UND":
            linkage.undefined[version].add(name)
        else:
            linkage.defined.add(name)


def read_versions(listing: str, linkage: Linkage) -> None:
    """Take over the version needs of `readelf --version-info`: library -> its version names."""
    library = ""
    for line in listing.splitlines():
        if found := re.search(r"File: (\S+)", line):
            library = found[1]
        elif library and (found := re.search(r"0x[0-9a-f]+:\s+Name: (\S+)\s+Flags", line)):
            linkage.versions[library].add(found[1])
        elif not line.strip():
            library = ""


def inspect(libraries: list[Path]) -> Linkage:
    linkage = Linkage()
    for path in libraries:
        dynamic = readelf("--dynamic", str(path))
        linkage.needed.update(re.findall(r"\(NEEDED\).*\[(.+?)\]", dynamic))
        read_versions(readelf("--version-info", str(path)), linkage)
        read_symbols(readelf("--dyn-syms", str(path)), linkage)
    return linkage


def sources(library: str, linkage: Linkage, present: set[str]) -> tuple[str, str]:
    """C source and linker version script of one stand-in.

    A symbol without a version may belong to any library: each stand-in gets all of them, so that
    it is found whatever is loaded together.
    """
    plain = {s for s in linkage.undefined[""] if SYMBOL.match(s)} - linkage.defined - present
    nodes = {v: linkage.undefined[v] for v in sorted(linkage.versions.get(library, ()))}
    names = sorted(plain.union(*nodes.values()))
    code = "".join(f"int {name}(void) {{ return {NO_DEVICE}; }}\n" for name in names)
    script = ""
    for number, (version, symbols) in enumerate(nodes.items()):
        members = " ".join(f"{name};" for name in sorted(symbols)) or f"no_symbol_{number};"
        script += f"{version} {{ global: {members} }};\n"
    return code, script


def build(library: str, folder: Path, code: str, script: str) -> None:
    with tempfile.TemporaryDirectory() as work:
        source, versions, made = Path(work, "s.c"), Path(work, "s.map"), Path(work, library)
        source.write_text(code)
        command = ["gcc", "-w", "-shared", "-fPIC", "-O1", "-s", "-fno-builtin"]
        command += ["-o", str(made), str(source), f"-Wl,-soname,{library}"]
        if script:
            versions.write_text(script)
            command.append(f"-Wl,--version-script={versions}")
        subprocess.run(command, check=True, timeout=120)
        partial = folder / f".{library}.partial"
        partial.write_bytes(made.read_bytes())
        partial.chmod(0o755)
        partial.replace(folder / library)


def main() -> int:
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        print("torch is not installed in this environment", file=sys.stderr)
        return 1
    torch = Path(spec.submodule_search_locations[0])
    folder = torch.parent / "nvidia" / "cu13" / "lib"
    folder.mkdir(parents=True, exist_ok=True)
    marker = folder / ".standins"
    ours = set(marker.read_text().split()) if marker.exists() else set()
    own = sorted((torch / "lib").glob("*.so*"))
    real = [p for p in sorted((torch.parent / "nvidia").rglob("*.so*")) if p.name not in ours]
    linkage = inspect(own)
    present = inspect(real).defined
    there = {path.name for path in (*own, *real)}
    missing = sorted(n for n in linkage.needed if LIBRARY.match(n) and n not in there)
    marker.write_text("\n".join(missing) + "\n")
    for library in missing:
        code, script = sources(library, linkage, present)
        build(library, folder, code, script)
        print(f"{library}: {code.count(chr(10))} symbols")
    return 0


if __name__ == "__main__":
    sys.exit(main())
