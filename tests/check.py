"""check.py - check.h for tests in Python: one line a case, totals at the end, exit status 1 if anything failed.

    with case("addition"):
        assert 1 + 1 == 2
    skip("needs a card", "no GPU")
    finish()
"""
import contextlib
import sys
import traceback

counts = {"passed": 0, "failed": 0, "skipped": 0}


class Skip(Exception):
    """Raised inside a case: the case cannot run here, and why."""


@contextlib.contextmanager
def case(name):
    try:
        yield
    except Skip as reason:
        skip(name, str(reason))
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        what = f"{type(error).__name__}: {str(error) or where.line}"
        print(f"FAIL {name}: {where.filename}:{where.lineno}: {what}")
        counts["failed"] += 1
    else:
        print(f"ok   {name}")
        counts["passed"] += 1
    sys.stdout.flush()


def skip(name, reason):
    print(f"skip {name}: {reason}")
    counts["skipped"] += 1


def finish():
    print("{passed} passed, {failed} failed, {skipped} skipped".format(**counts))
    sys.exit(1 if counts["failed"] else 0)
