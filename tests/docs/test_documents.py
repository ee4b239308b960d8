"""The documents name what exists."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from lakecache.config import CacheConfig

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def test_the_configuration_table_has_every_key_with_its_default():
    section = (ROOT / "README.md").read_text().split("## Configuration")[1].split("## ")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \|.*\| (.+?) \|$", section, re.MULTILINE))
    assert list(rows) == list(CacheConfig.__struct_fields__)
    default = CacheConfig()
    for key, shown in rows.items():
        value = getattr(default, key)
        if value is None:
            assert shown.startswith("unset"), key
        elif key == "cpu_bytes":
            assert CacheConfig.from_extra_config({key: json.loads(shown.strip("`"))}) == default
        else:
            assert shown.strip("`").lower() == str(value).lower(), key


def test_the_command_in_the_readme_is_a_valid_configuration():
    text = (ROOT / "README.md").read_text()
    found = re.search(r"--kv-transfer-config '(.+?)'", text)
    assert found
    config = json.loads(found[1])
    assert CacheConfig.from_extra_config(config["kv_connector_extra_config"]).cpu_bytes == 8 << 30


def test_every_counter_is_explained():
    sources = (path.read_text() for path in (ROOT / "python" / "lakecache").glob("*.py"))
    places = re.findall(r"counts\[([^\]]+)\]", "".join(sources))
    counters = {name for place in places for name in re.findall(r'"(\w+)"', place)}
    assert "stores" in counters
    metrics = (ROOT / "python" / "lakecache" / "_metrics.py").read_text()
    published = set(re.findall(r'^    "(\w+)",$', metrics, re.MULTILINE))
    assert counters - published == set()
    text = (ROOT / "docs" / "operations.md").read_text()
    table = text.split("| counter | counts |")[1].split("\n\n")[0]
    rows = re.findall(r"^\| (`.+?) \|", table, re.MULTILINE)
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == published


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document):
    for target, section in re.findall(r"\]\(([^)#:]*)(?:#([^)]+))?\)", document.read_text()):
        page = document.parent / target if target else document
        assert page.exists(), target
        if section:
            heads = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
            slugs = {re.sub(r"[^\w -]", "", head).lower().replace(" ", "-") for head in heads}
            assert section in slugs, section


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_lines_outside_tables_and_code_fit(document):
    text = re.sub(r"```.*?```", "", document.read_text(), flags=re.DOTALL)
    long = [line for line in text.splitlines() if len(line) > 100 and not line.startswith("|")]
    assert not long
