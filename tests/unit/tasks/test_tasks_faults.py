"""Faults that several tasks have alike."""

from __future__ import annotations

from clawhpc.tasks.faults import by_kind


def test_faults_are_alike_that_differ_in_file_line_quoted_value_and_number_alone() -> None:
    alike = ["/s/a b/task.toml: x[0].name 'a': must be 1 of 2", "/s/c/other.toml:12: x[3].name '': must be 4 of 2"]
    other = "/s/a b/task.toml: y[0].name 'a': must be 1 of 2"
    assert by_kind([alike[0], other, alike[1]]) == [alike, [other]]


def test_no_faults_are_of_no_kind() -> None:
    assert by_kind([]) == []
