import pytest

from clawhpc.tasks.words import Reference, Word, in_shell, literal, split_words, whole_word

VARIABLES = {"A": "1 2", "EMPTY": ""}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", []),
        ("a  b\tc ", ["a", "b", "c"]),
        ("A=$A x", ["A=1 2", "x"]),
        ("\"$A\" '$A' \\$A a\\ b", ["1 2", "$A", "$A", "a b"]),
        ('"a \\" \\n" \'\' ""', ['a " \\n', "", ""]),
        ("${A}s ${EMPTY:-else} ${A:+then} ${EMPTY:+then}", ["1 2s", "else", "then", ""]),
        ("a$ $$ ${A", ["a$", "$$", "${A"]),
    ],
)
def test_words_are_those_that_docker_reads(text: str, words: list[str]) -> None:
    assert [literal(word) for word in split_words(text, VARIABLES)] == words


@pytest.mark.parametrize(
    ("text", "word", "shell"),
    [
        ("/x:$PATH", ("/x:", Reference("${PATH-}")), '/x:"${PATH-}"'),
        ("'a b'${B:-c}", ("a b", Reference("${B:-c}")), "'a b'\"${B:-c}\""),
        ("", (), "''"),
    ],
)
def test_what_the_image_alone_knows_is_left_to_its_shell(text: str, word: Word, shell: str) -> None:
    found = whole_word(text, VARIABLES)
    assert (found, in_shell(found)) == (word, shell)
    assert literal(found) is None or not word


def test_one_word_has_its_blanks() -> None:
    assert whole_word("a  $A b", VARIABLES) == ("a  1 2 b",)


def test_an_open_quote_is_an_error() -> None:
    with pytest.raises(ValueError, match="No closing quotation"):
        split_words("a 'b", VARIABLES)
