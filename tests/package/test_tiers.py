"""The quick tests and all tests: docs/testing.md says of every folder where it belongs, and a run that names tests runs
them."""

import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import conftest
import pytest
from conftest import QUICK, ROOT

TESTS = ROOT / "tests"
SOURCES = SimpleNamespace(TESTPATHS="testpaths", ARGS="args")


def configured(source="testpaths", worker=False, **options):
    """Returns the configuration of a run after pytest_configure."""
    options = {"all": False, "keyword": "", "markexpr": "", "lf": False, **options}
    config = SimpleNamespace(
        option=SimpleNamespace(**options),
        getoption=lambda name, default=None: options.get(name, default),
        args_source=source,
        ArgsSource=SOURCES,
    )
    if worker:
        config.workerinput = {}
    conftest.pytest_configure(config)
    return config


def runs(config, name):
    return conftest.pytest_ignore_collect(TESTS / name, config) is None


def test_a_run_without_names_is_quick():
    quick = configured()
    assert runs(quick, "attention/test_attention.py") and runs(quick, "package/test_library.py")
    assert not runs(quick, "fuzz/test_campaign.py") and not runs(quick, "package/test_packaging.py")
    assert not runs(quick, "attention_of_another_kind/test_x.py")
    assert runs(quick, "fuzz")  # a folder: its files are asked for one by one


@pytest.mark.parametrize(
    "run", [{"all": True}, {"source": "args"}, {"keyword": "merge"}, {"markexpr": "slow"}, {"lf": True}], ids=str
)
def test_a_run_that_names_tests_has_them_all(run):
    assert runs(configured(**run), "fuzz/test_campaign.py")


def test_a_worker_does_as_the_first_process_says():
    """xdist gives it names that nobody typed, and the options."""
    assert not runs(configured(source="args", worker=True), "fuzz/test_campaign.py")
    assert runs(configured(source="args", worker=True, all=True), "fuzz/test_campaign.py")


def test_the_build_script_explains_both():
    if not shutil.which("bash"):
        pytest.skip("no bash here")
    script = [shutil.which("bash"), ROOT / "build_and_run.sh", "--help"]
    assert re.search(
        r"^ +test .*\s--all\s", subprocess.run(script, capture_output=True, text=True).stdout, re.MULTILINE
    )


@pytest.mark.skipif(not (ROOT / "docs/testing.md").is_file(), reason="the documents are not beside the tests")
def test_the_page_has_every_folder():
    rows = re.findall(r"^\| ([^|]*) \| (yes|`--all`) \|", (ROOT / "docs/testing.md").read_text(), re.MULTILINE)
    said = {name: quick == "yes" for names, quick in rows for name in re.findall(r"`([^`]+)`", names)}
    folders = {str(file.relative_to(TESTS).parent) for file in Path(TESTS).rglob("test_*.py")} - {"."}
    whole = {name for name in QUICK if not name.endswith(".py")}
    assert all((TESTS / name).exists() for name in QUICK)
    assert {name for name, quick in said.items() if quick} == set(QUICK)
    assert {name for name, quick in said.items() if not quick} == folders - whole
