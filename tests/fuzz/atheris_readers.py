"""Damaged files, guided by coverage:

    python tests/fuzz/atheris_readers.py READER [-atheris_runs=N] [libFuzzer's options]

Needs `pip install atheris`. READER is a name of fuzz.readers, such as "model.safetensors". Half of what it makes is
taken as the file; the other half seeds one of the edits that know the format.
"""

import sys

import atheris

with atheris.instrument_imports(include=["flash_attn_minimal", "json"]):
    from flash_attn_lab.fuzz import readers


def main() -> None:
    with readers.workshop() as made:
        reader = next(r for r in made if r.name == sys.argv[1])

        def check(data: bytes) -> None:
            edited = reader.edit(readers.Random(data), reader.valid) if data[:1] >= b"\x80" else data[1:]
            outcome, error = reader.outcome(edited)
            if outcome not in readers.EXPECTED:
                raise AssertionError(f"{reader.name}: {outcome}: {error}\ninput: {edited.hex()}")

        atheris.Setup([sys.argv[0], *sys.argv[2:]], check)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
