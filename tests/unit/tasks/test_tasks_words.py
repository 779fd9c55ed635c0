import subprocess

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
        ("a$ $$", ["a$", "$$"]),
        ("${EMPTY:-${EMPTY:+no}${A:+/x/$A}}:${A:+'}'}", ["/x/1 2:}"]),
        ('"${EMPTY:-"a b"}" \'${A%x}\'', ["a b", "${A%x}"]),
        ("${EMPTY-else}${A+then}${A-else}s", ["then1 2s"]),
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
        ("/o${PATH:+:${PATH}}", ("/o", Reference("${PATH:+:${PATH-}}")), '/o"${PATH:+:${PATH-}}"'),
        ("${B-$A}", (Reference("${B-1 2}"),), '"${B-1 2}"'),
        ("${EMPTY:-a$B}", ("a", Reference("${B-}")), 'a"${B-}"'),
    ],
)
def test_what_the_image_alone_knows_is_left_to_its_shell(text: str, word: Word, shell: str) -> None:
    found = whole_word(text, VARIABLES)
    assert (found, in_shell(found)) == (word, shell)
    assert literal(found) is None or not word


@pytest.mark.parametrize("shell", ["sh", "bash --posix"])
@pytest.mark.parametrize("set_by_base", ["", "b c"])
def test_what_is_left_to_a_shell_comes_to_what_docker_puts_in(shell: str, set_by_base: str) -> None:
    text = "/o${B:+:${B}} ${B:-'$x`' \\\\ \\\" \\} it${B:-\"'\"}s}"
    word = in_shell(whole_word(text, VARIABLES))
    done = subprocess.run(
        [*shell.split(), "-c", f"printf %s {word}"], env={"B": set_by_base}, capture_output=True, text=True
    )
    assert done.stdout == ("/o:b c b c" if set_by_base else "/o $x` \\ \" } it's")


def test_one_word_has_its_blanks() -> None:
    assert whole_word("a  $A b", VARIABLES) == ("a  1 2 b",)


def test_an_open_quote_is_an_error() -> None:
    with pytest.raises(ValueError, match="No closing quotation"):
        split_words("a 'b", VARIABLES)


@pytest.mark.parametrize(
    "text",
    ["${A%.*}", "${A#1}", "${A:?no}", "${A/1/2}", "${}", "${A", "${A:-b", "${A x}", "${EMPTY:-${A%%x}}", "${A:-" * 999],
)
def test_what_docker_would_put_in_and_we_do_not_is_an_error_and_not_put_in_as_it_stands(text: str) -> None:
    with pytest.raises(ValueError, match=r"\$\{|No closing"):
        whole_word(text, VARIABLES)
