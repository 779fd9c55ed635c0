import shlex
from pathlib import Path, PurePosixPath

import pytest

from clawhpc.tasks import dockerfile
from clawhpc.tasks.dockerfile import OWN_INTERPRETER, Environment, read_dockerfile, read_workdir
from clawhpc.tasks.faults import Fault
from clawhpc.tasks.lines import instructions
from tests.fakes.task_sets import write_files


def read(folder: Path, text: str, *, assume_image: bool = False, **files: str) -> Environment:
    names = {name.replace("__", "/"): content for name, content in files.items()}
    write_files(folder, {"Dockerfile": text, **names})
    return read_dockerfile(folder / "Dockerfile", assume_image=assume_image)


def copied(folder: Path, lines: str) -> dict[str, str]:
    """What `lines` put where; WORKDIR is /app, and the context has a, b and d/c, d/e/f."""
    write_files(folder, {"a": "", "b": "", "d/c": "", "d/e/f": ""})
    made = read(folder, f"FROM x\nWORKDIR /app\n{lines}\n")
    return {str(target): str(path.relative_to(folder)) for target, path in made.files.items()}


def test_comments_continued_lines_and_heredocs_are_read_as_docker_reads_them() -> None:
    text = (
        "# syntax=x\nFROM a\n\nrun one \\\n  # a comment within\n  two\nRUN <<EOF cat\nWORKDIR /no\nEOF\nWORKDIR /yes\n"
    )
    found = [(one.line, one.name, " ".join(one.value.split())) for one in instructions(text, Path("Dockerfile"))]
    assert found == [(2, "FROM", "a"), (4, "RUN", "one two"), (7, "RUN", "<<EOF cat"), (10, "WORKDIR", "/yes")]


def test_another_sign_that_continues_lines_is_a_fault() -> None:
    assert len(list(instructions("# syntax=a\n# escape=\\\nFROM a\n# escape=`\n", Path("Dockerfile")))) == 1
    assert len(list(instructions("# escape=`\nFROM a\n", Path("Dockerfile")))) == 1, "it makes no difference"
    for line in ("RUN a `\n b", "ENV A=C:\\a"):
        with pytest.raises(Fault, match="Dockerfile:2: # Escape = `: only a backslash continues a line"):
            list(instructions(f"#syntax=a\n# Escape = `\nFROM a\n{line}\n", Path("Dockerfile")))


def test_a_line_that_is_continued_and_has_nothing_is_none() -> None:
    assert [one.name for one in instructions("FROM a\n \\\n", Path("Dockerfile"))] == ["FROM"]


def test_a_working_folder_may_be_relative_to_the_one_before(tmp_path: Path) -> None:
    assert read(tmp_path, "FROM x\nWORKDIR /app\nWORKDIR src\n").workdir == PurePosixPath("/app/src")
    assert read(tmp_path, "FROM x\n").workdir is None


@pytest.mark.parametrize(
    ("line", "env"),
    [
        ("ENV A=1", {"A": "1"}),
        ("ENV A=\"1 2\" B='3'", {"A": "1 2", "B": "3"}),
        ("ENV A 1 2", {"A": "1 2"}),
        ("ENV A=", {"A": ""}),
    ],
)
def test_variables_have_two_forms(tmp_path: Path, line: str, env: dict[str, str]) -> None:
    assert read(tmp_path, f"FROM x\n{line}\n").env == env


@pytest.mark.parametrize(
    ("lines", "files"),
    [
        ("COPY a .", {"/app/a": "a"}),
        ("COPY a /app", {"/app/a": "a"}),
        ("COPY a /app/", {"/app/a": "a"}),
        ("COPY a new", {"/app/new": "a"}),
        ("COPY a new/", {"/app/new/a": "a"}),
        ("COPY a b sub/", {"/app/sub/a": "a", "/app/sub/b": "b"}),
        ("COPY d sub", {"/app/sub/c": "d/c", "/app/sub/e/f": "d/e/f"}),
        ("COPY d/ .", {"/app/c": "d/c", "/app/e/f": "d/e/f"}),
        ("COPY d/* sub/", {"/app/sub/c": "d/c", "/app/sub/f": "d/e/f"}),
        ("COPY d sub\nCOPY a sub", {"/app/sub/c": "d/c", "/app/sub/e/f": "d/e/f", "/app/sub/a": "a"}),
        ("COPY --chown=root:root --link a .", {"/app/a": "a"}),
        ("COPY\ta\t.", {"/app/a": "a"}),
        ('COPY ["a", "two words"]', {"/app/two words": "a"}),
        ("ADD a .", {"/app/a": "a"}),
        ("COPY a x\nCOPY b x", {"/app/x": "b"}),
    ],
)
def test_files_are_copied_to_where_docker_copies_them(tmp_path: Path, lines: str, files: dict[str, str]) -> None:
    assert copied(tmp_path, lines) == files


def test_a_link_that_is_named_is_followed_and_one_in_a_folder_stays_a_link(tmp_path: Path) -> None:
    context = write_files(tmp_path, {"a": "", "d/c": ""})
    (context / "l").symlink_to("a")
    (context / "d/l").symlink_to("c")
    copied = read(context, "FROM x\nCOPY l /app/\nCOPY d /app/d\n").files
    expected = {"/app/l": "a", "/app/d/c": "d/c", "/app/d/l": "d/l"}
    assert {str(target): path for target, path in copied.items()} == {
        target: context / name for target, name in expected.items()
    }


def test_the_whole_context_is_copied_with_its_dockerfile(tmp_path: Path) -> None:
    assert copied(tmp_path, "COPY . .").keys() == {"/app/a", "/app/b", "/app/d/c", "/app/d/e/f", "/app/Dockerfile"}


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("FROM y", "FROM: several stages"),
        ("RUN make", "RUN is not carried out here"),
        ("ENTRYPOINT ./x", "ENTRYPOINT is not carried out here"),
        ("USER bob", "USER bob: there is one user"),
        ("COPY $A .", "COPY $A .: variables are not put in"),
        ("COPY ../a .", "COPY ../a: leads out of"),
        ("COPY a ../b", "COPY to ../b: leads upwards"),
        ("COPY a /app/../../b", "COPY to /app/../../b: leads upwards"),
        ("COPY out .", "COPY out: leads out of"),
        ("COPY ou* .", "COPY ou*: leads out of"),
        ("COPY gone .", "COPY gone: there is no such file"),
        ("COPY *.gone .", "COPY *.gone: there is no such file"),
        ("COPY a**b .", "COPY a**b: Invalid pattern"),
        ("COPY a", "COPY a: needs a source and a target"),
        (f"COPY {'[' * 100_000}", "recursion"),
        ("COPY [1, 2]", "needs a source and a target"),
        ("COPY --from=build a .", "COPY --from: not supported"),
        ("COPY <<EOF /x\nEOF", "text in the Dockerfile itself"),
        ("ADD https://a.b/c .", "ADD https://a.b/c: nothing is fetched"),
        ("ADD x.tar.gz .", "archives are not unpacked"),
        ('ENV A="', "No closing quotation"),
        ("ENV A=1 B", "not of the form NAME=VALUE"),
        ("WORKDIR /a <<EOF\nb", "no line EOF ends its text"),
        ("CROSS_BUILD x", "CROSS_BUILD: not supported"),
    ],
)
def test_all_else_is_a_fault_that_names_file_and_line(tmp_path: Path, line: str, fault: str) -> None:
    context = write_files(tmp_path / "context", {"a": "", "x.tar.gz": ""})
    (context / "out").symlink_to(tmp_path)
    with pytest.raises(Fault) as caught:
        read(context, f"FROM x\n{line}\n")
    assert str(caught.value).startswith(f"{context}/Dockerfile:2: ")
    assert fault in str(caught.value)


def test_what_has_no_effect_here_is_no_fault(tmp_path: Path) -> None:
    read(tmp_path, 'FROM x\nARG A=1\nLABEL a=b\nEXPOSE 80\nCMD ["bash"]\nSHELL ["/bin/sh"]\n')


@pytest.mark.parametrize(
    "lines",
    [
        "FROM ${BASE:-ubuntu:24.04}\n",
        "FROM $GONE\n",
        "FROM\n",
        "FROM --x a\n",
        'ARG A="\nFROM x\n',
        "FROM x\nARG J=$JAVA_HOME/lib\n",
        "FROM x\nARG V=${A%.*}\n",
        "FROM x\nSHELL bash\n",
        "FROM x\nENV discovery.type=single-node\n",
        "FROM x\nENV discovery.type single-node\n",
    ],
)
def test_without_an_image_of_its_own_what_only_a_build_is_changed_by_is_no_fault(tmp_path: Path, lines: str) -> None:
    made = read(tmp_path, f"{lines}RUN x\nWORKDIR /app\nCOPY a .\n", assume_image=True, a="")
    assert (made.workdir, list(made.files)) == (PurePosixPath("/app"), [PurePosixPath("/app/a")])
    assert made.env in ({}, {"discovery.type": "single-node"})
    with pytest.raises(Fault, match="several stages are not supported"):
        read(tmp_path, f"{lines}FROM y\n", assume_image=True)


def test_what_only_looks_like_the_beginning_of_a_text_swallows_no_line(tmp_path: Path) -> None:
    lines = "RUN echo $((1<<2)) 1 << 2\nRUN cat <<<word\nRUN cat <<-'END' >a\nCOPY a b\n  END\nWORKDIR /app\n"
    made = read(tmp_path, f"FROM x\n{lines}", assume_image=True)
    assert (made.workdir, made.files) == (PurePosixPath("/app"), {})


def test_what_the_image_is_believed_to_have_is_named(tmp_path: Path) -> None:
    assert read(tmp_path, "FROM x\nRUN a\nVOLUME /v\n", assume_image=True).left == ["RUN", "VOLUME"]


# ---- for an image of its own ----------------------------------------------------------------------------------------


def built(folder: Path, lines: str) -> Environment:
    write_files(folder, {"Dockerfile": f"FROM x\n{lines}\n"})
    return read_dockerfile(folder / "Dockerfile", builds=True)


def script(folder: Path, lines: str) -> str:
    """Of the last step."""
    return built(folder, lines).steps[-1].script


@pytest.mark.parametrize(
    ("lines", "argv"),
    [
        ("RUN make all", ["/bin/sh", "-c", "make all"]),
        ('RUN ["make", "all $A"]', ["make", "all $A"]),
        ("RUN [ -f x ] && make", ["/bin/sh", "-c", "[ -f x ] && make"]),
        ('SHELL ["/bin/bash", "-o", "pipefail", "-c"]\nRUN make', ["/bin/bash", "-o", "pipefail", "-c", "make"]),
        ("RUN a \\\n  # no\n\n  && b\\\nc", ["/bin/sh", "-c", "a   && bc"]),
        ("RUN <<EOF\na\n  b\nEOF", ["/bin/sh", "-c", "a\n  b\n"]),
        ("RUN <<-'EOF'\n\ta\n\tEOF", ["/bin/sh", "-c", "a\n"]),
        ("RUN cat <<EOF > x\n{{ a }}\nEOF", ["/bin/sh", "-c", "cat <<EOF > x\n{{ a }}\nEOF\n"]),
        ("RUN <<EOF\n#!/usr/bin/python3\nx\nEOF", ["/bin/sh", "-c", OWN_INTERPRETER, "#!/usr/bin/python3\nx\n"]),
        ("RUN --mount=type=cache,target=/root/.cache --network=default a", ["/bin/sh", "-c", "a"]),
        ("ARG A=1\nARG B\nENV C=3\nARG C=4\nRUN a", ["A=1", "/bin/sh", "-c", "a"]),
    ],
)
def test_run_is_what_docker_runs(tmp_path: Path, lines: str, argv: list[str]) -> None:
    assert shlex.split(script(tmp_path, lines)) == ["env", *argv]


def test_variables_are_put_in_where_docker_puts_them_in(tmp_path: Path) -> None:
    lines = "ARG V=one\nENV D=/data\nENV D=/new E=\"$V in $D\" F='$V'\nWORKDIR $D/sub\nCOPY $V ${V:+two}.txt\n"
    text = f"ARG TAG=3.12\nFROM --platform=linux/amd64 python:${{TAG}}-slim AS base\n{lines}"
    made = read(tmp_path, text, one="")
    assert (made.base, made.workdir) == ("python:3.12-slim", PurePosixPath("/new/sub"))
    assert made.env == {"D": "/new", "E": "one in /data", "F": "$V"}
    assert made.files == {PurePosixPath("/new/sub/two.txt"): tmp_path / "one"}
    with pytest.raises(Fault, match=r"COPY \$TAG \.: variables are not put in"):
        read(tmp_path, f"{text}COPY $TAG .\n")


def test_what_the_base_alone_knows_is_put_in_when_the_image_is_built(tmp_path: Path) -> None:
    made = built(tmp_path, "ENV A=1\nENV PATH=/x:$PATH A=$A$B")
    assert (made.env, made.unread) == ({}, {"PATH", "A"})
    assert made.steps[-1].script == 'export PATH=/x:"${PATH-}" A=1"${B-}"'
    with pytest.raises(Fault, match=r"Dockerfile:3: COPY \$A \.: variables are not put in"):
        built(tmp_path, "ENV A=$B\nCOPY $A .")


def test_a_variable_whose_name_no_shell_has_is_there_for_run_and_task(tmp_path: Path) -> None:
    made = built(tmp_path, "ENV discovery.type=a\nENV A=1 discovery.type='single node'\nRUN x")
    assert made.env == {"A": "1", "discovery.type": "single node"}
    assert [step.script for step in made.steps] == [
        "",
        "export A=1",
        "env 'discovery.type=single node' /bin/sh -c x",
    ]
    with pytest.raises(Fault, match=r"ENV a\.b=\$C: variables are not put in"):
        built(tmp_path, "ENV a.b=$C")


@pytest.mark.parametrize("line", ["VOLUME /a '/b c' $D", 'VOLUME ["/a", "/b c", "d"]'])
def test_a_volume_is_a_folder_of_the_image(tmp_path: Path, line: str) -> None:
    assert script(tmp_path, f"ENV D=/d\n{line}") == "mkdir -p / /a '/b c' /d"


def test_an_argument_that_the_base_has_a_part_in_is_known_when_the_image_is_built(tmp_path: Path) -> None:
    made = built(tmp_path, "ARG J=$JAVA_HOME/lib\nENV JAVA_HOME=/x K=$J\nRUN x")
    assert [step.script for step in made.steps] == [
        '[ -n "${J+x}" ] || J="${JAVA_HOME-}"/lib',
        'export JAVA_HOME=/x K="${J-}"',
        'env J="${J-}" /bin/sh -c x',
    ]
    again = built(tmp_path, "ARG J=$A\nARG J=$B\nENV K=/x\nARG K=$A\nRUN x")
    assert [step.script for step in again.steps] == [
        '[ -n "${J+x}" ] || J="${A-}"',
        'J="${B-}"',
        "export K=/x",
        "",
        'env J="${J-}" /bin/sh -c x',
    ], "the last ARG counts, and no ARG against ENV"
    with pytest.raises(Fault, match=r"Dockerfile:3: COPY \$J \.: variables are not put in"):
        built(tmp_path, "ARG J=$JAVA_HOME/lib\nCOPY $J .")


def test_the_platform_is_known_to_who_asks_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dockerfile, "PLATFORMS", {"TARGETARCH": "arm64", "BUILDOS": "linux"})
    assert script(tmp_path, "ARG TARGETARCH\nARG BUILDOS=x\nRUN a") == "env TARGETARCH=arm64 BUILDOS=x /bin/sh -c a"
    assert script(tmp_path, "RUN a") == "env /bin/sh -c a"
    assert built(tmp_path, "ARG TARGETARCH\nENV A=$TARGETARCH").env == {"A": "arm64"}
    write_files(tmp_path, {"Dockerfile": "FROM --platform=$BUILDPLATFORM x-$TARGETARCH\n"})
    assert read_dockerfile(tmp_path / "Dockerfile", builds=True).base == "x-arm64"


def test_an_argument_that_is_named_again_keeps_its_value(tmp_path: Path) -> None:
    assert script(tmp_path, "ARG A=1\nARG A\nRUN x") == "env A=1 /bin/sh -c x"


def test_of_what_is_not_set_from_has_nothing(tmp_path: Path) -> None:
    write_files(tmp_path, {"Dockerfile": "FROM ${BASE:-ubuntu:24.04}$GONE\n"})
    assert read_dockerfile(tmp_path / "Dockerfile", builds=True).base == "ubuntu:24.04"


def test_work_begins_where_the_base_says_and_of_some_it_is_known(tmp_path: Path) -> None:
    text = "FROM docker.io/library/ubuntu:24.04\nCOPY a .\nWORKDIR app\n"
    write_files(tmp_path, {"Dockerfile": text, "a": ""})
    made = read_dockerfile(tmp_path / "Dockerfile", builds=True)
    assert (made.workdir, list(made.files)) == (PurePosixPath("/app"), [PurePosixPath("/a")])
    assert read(tmp_path, "FROM x\nWORKDIR app\n").workdir == PurePosixPath("/app")


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("ENTRYPOINT x", "ENTRYPOINT is not carried out here: an image of its own does not do that either"),
        ("RUN --mount=type=secret,id=a x", "RUN --mount=type=secret,id=a: not supported"),
        ("RUN --security=insecure x", "RUN --security: not supported"),
        ("COPY --from=build a .", "COPY --from: not supported"),
        ("SHELL bash", "SHELL bash: "),
        ("WORKDIR app", "WORKDIR app: where work begins, the base alone knows"),
        ("COPY Dockerfile .", "COPY .: where work begins, the base alone knows"),
        ("ENV A=${B%.*}", "ENV A=${B%.*}: of ${…} only "),
        ("ENV A ${B%.*}", "ENV A ${B%.*}: of ${…} only "),
        ("ARG A=${B#3.}", "ARG A=${B#3.}: of ${…} only "),
        ("WORKDIR ${B/x/y}", "WORKDIR ${B/x/y}: of ${…} only "),
        ('COPY ["a\'b", "c"]', "COPY a'b: No closing quotation"),
    ],
)
def test_what_no_image_of_ours_has_is_a_fault_too(tmp_path: Path, line: str, fault: str) -> None:
    with pytest.raises(Fault) as caught:
        built(tmp_path, line)
    assert str(caught.value).startswith(f"{tmp_path}/Dockerfile:2: {fault}")


def test_the_folder_of_a_prebuilt_image_is_read_whatever_else_its_dockerfile_asks_for(tmp_path: Path) -> None:
    lines = "FROM a AS b\nRUN x\nFROM c\nENV D=/d\nENV Q=${V%.*}\nWORKDIR $D\nCOPY --from=b y .\nENTRYPOINT z\n"
    write_files(tmp_path, {"Dockerfile": lines})
    assert read_workdir(tmp_path / "Dockerfile") == PurePosixPath("/d")
