"""Errors of other code, on one line."""

from __future__ import annotations

from onelaunch.errors import MAX_LINE, first_line, type_and_message


def test_the_first_line_with_words():
    assert first_line(ValueError("\n first \n second")) == "first"
    assert first_line(ValueError("\n ")) == "ValueError"
    assert first_line("") == ""
    long = first_line("x" * 1000)
    assert (len(long), long[-2:]) == (MAX_LINE, "x…")
    assert first_line("x" * 200, limit=300) == "x" * 200


def test_the_type_of_an_error_is_said_once():
    assert type_and_message(KeyError("name")) == "KeyError: 'name'"
    assert type_and_message(RuntimeError()) == "RuntimeError"
