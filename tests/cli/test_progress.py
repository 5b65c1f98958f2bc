"""Progress where there is no terminal: a line now and then, with the time that is left."""

import pytest

from atlas_lm.cli import progress as shown


def test_lines_tell_share_and_time_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter([0.0, 1.0, 31.0, 40.0, 61.0])
    monkeypatch.setattr(shown.time, "monotonic", lambda: next(clock))
    with shown.progress(1000) as tell:
        tell("first", 100)
        tell("first", 100)  # the second call is late enough for a line
        tell("second", 100)
        tell("second", 200)
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "first: 20 %, 0:00:31, left 0:02:04",  # 200 in 31 s: 800 more take 124
        "second: 50 %, 0:01:01, left 0:00:50",  # 300 in 30 s: 500 more take 50
    ]
