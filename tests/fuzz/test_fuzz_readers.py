"""Damaged files for every reader of files: a short campaign, and one that hypothesis drives and shrinks.

FLASH_ATTN_TEST_SEED=n repeats a run, FLASH_ATTN_TEST_EXAMPLES=n makes it longer. The long campaign:
`python -m flash_attn_lab.fuzz.readers --cases 100000`; guided by coverage: tests/fuzz/atheris_readers.py.
"""

import os
import random

import pytest
from conftest import SEED

from flash_attn_lab.fuzz import readers
from flash_attn_minimal import BadArgument

hypothesis = pytest.importorskip("hypothesis")
from hypothesis import HealthCheck, given, seed, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

EXAMPLES = int(os.environ.get("FLASH_ATTN_TEST_EXAMPLES", "40"))


@pytest.fixture(scope="module")
def workshop():
    with readers.workshop() as made:
        yield {reader.name: reader for reader in made}


def test_valid_files_are_read(workshop):
    for reader in workshop.values():
        outcome, error = reader.outcome(reader.valid)
        wanted = "BadArgument" if reader.name == "file names" else "read"  # there is no such file
        assert outcome == wanted, f"{reader.name}: {error}"


def test_a_short_campaign():
    lines = []
    result = readers.run(50 * EXAMPLES, SEED, lines.append)
    assert result["failures"] == [], "\n".join(lines)
    assert sum(n for found in result["counts"].values() for n in found.values()) == 50 * EXAMPLES
    refused = [name for name, found in result["counts"].items() if found.get("BadArgument")]
    assert len(refused) >= len(result["counts"]) - 1, "inputs that are all read test nothing"  # any text is a text


def test_hypothesis_finds_nothing(workshop):
    @seed(SEED)
    @settings(
        max_examples=5 * EXAMPLES,
        deadline=None,
        database=None,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.sampled_from(sorted(workshop)), st.randoms(use_true_random=False))
    def check(name, rng):
        outcome, error = workshop[name].outcome(workshop[name].mutated(rng))
        assert outcome in readers.EXPECTED, error

    check()


def test_a_case_is_repeated_by_its_number(workshop):
    cases = [workshop["config.json"].mutated(random.Random("3 9")) for _ in range(2)]
    assert cases[0] == cases[1] != workshop["config.json"].valid


def test_what_a_campaign_calls_a_failure(workshop, monkeypatch):
    """The campaign reports an error of another kind, and one without the file's name. It does not catch exceptions that
    end Python."""

    def outcome(error):
        def read(path):
            raise error

        reader = workshop["config.json"]
        return readers.Reader("x", reader.file, reader.edit, read, reader.where, b"").outcome(b"")[0]

    class PanicException(BaseException):
        pass

    assert outcome(KeyError("dtype")) == "KeyError"
    assert outcome(PanicException("unwrap")) == "PanicException"
    assert outcome(MemoryError()) == "MemoryError"
    assert outcome(BadArgument("no good")) == "BadArgument without the file's name"
    assert outcome(PermissionError()) == "OSError"
    for end in (KeyboardInterrupt, SystemExit):
        with pytest.raises(end):
            outcome(end())
    failing = [readers.Reader("x", workshop["prompt"].file, lambda rng, data: data, lambda path: {}["x"], "", b"ab")]
    monkeypatch.setattr(readers, "make_readers", lambda root: failing)
    lines = []
    result = readers.run(2, 5, lines.append, first=3)
    assert result["counts"] == {"x": {"KeyError": 2}} and "case 3 of seed 5, x: KeyError" in lines[0]
    assert [failure["case"] for failure in result["failures"]] == [3, 4] and result["failures"][0]["input"] == "6162"
