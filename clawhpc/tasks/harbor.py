"""Read tasks in the format of Harbor, the successor of Terminal-Bench.

    <folder>/<any name>/task.toml          schema_version 1.x: limits, variables, MCP servers, metadata
    <folder>/<any name>/instruction.md     what the harness is told
    <folder>/<any name>/environment/       Dockerfile and its context: see dockerfile.py
    <folder>/<any name>/tests/test.sh      and its helpers, seen by the verifier as /tests
    <folder>/<any name>/solution/          not read

The workspace stands where the Dockerfile's last WORKDIR is, and is all that the verifier sees of what the harness did.
The verifier starts in it, and writes reward.txt or reward.json to /logs/verifier (verify/reward.py). A key that asks
for what cannot be had here is a fault; what is merely done otherwise is a note. docs/tasks.md lists both.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath

from clawhpc.records import (
    MCP_MOUNT,
    RUN_MCP_MOUNT,
    SANDBOX_HOME,
    McpServer,
    ScriptCheck,
    TaskSpec,
    Verifier,
)
from clawhpc.tasks.dockerfile import PLAIN, Environment, read_dockerfile, read_workdir
from clawhpc.tasks.faults import (
    Fault,
    Gathering,
    LoadedTasks,
    check_env,
    check_path,
    check_text,
    read_text,
    real,
    task_folders,
)
from clawhpc.tasks.harbor_config import NO_NETWORK, HarborConfig, read_config
from clawhpc.tasks.images import BuiltImage, TaskImages
from clawhpc.tasks.layout import Layout
from clawhpc.tasks.mcp import check_servers
from clawhpc.tasks.recipe import make_recipe

CONFIG, INSTRUCTION, DOCKERFILE = "task.toml", "instruction.md", "environment/Dockerfile"
TESTS, SCRIPT = "tests", "test.sh"
TESTS_MOUNT, REWARD_FOLDER = "/tests", "/logs/verifier"
"""Both in the verifier's sandbox alone."""
TAKEN = (TESTS_MOUNT, "/logs", "/solution", MCP_MOUNT, RUN_MCP_MOUNT)
"""Where a workspace cannot stand: these have a meaning of their own."""
OF_THE_SYSTEM = frozenset(
    {"bin", "boot", "dev", "etc", "lib", "lib32", "lib64", "libx32", "opt", "proc", "run", "sbin", "sys", "usr", "var"}
)
"""Top-level folders that come from the image, read-only, so that nothing can be mounted in them."""
IGNORED = ".dockerignore"
"""Of a build alone."""
UNFOLLOWED = {
    "docker-compose.yaml": "services beside the harness are not supported",
    "docker-compose.yml": "services beside the harness are not supported",
    IGNORED: "is not followed; remove it, and what it names",
}
"""Files in environment/ that change what a Dockerfile means."""
CANARY = re.compile(r"\s*(<!--.*canary.*-->|#.*canary.*)\s*", re.IGNORECASE)
"""Marks benchmark files so that they can be kept out of training data; Harbor shows it to nobody."""
INSTALLS = re.compile(
    r"(?:^|[;&|(]|\bthen\b|\bdo\b|\bsudo\b)\s*(?:\w+=\S*\s+)*(apt-get|apt|apk|conda|curl|git\s+clone|npm|npx|pip3?|python3?\s+-m\s+pip|"
    r"uv|uvx|wget|yum)\s"
)
"""A line of a script that fetches something."""
LOOPBACK = re.compile(r"localhost|127\.0\.0\.1")
OUR_IMAGE = "programs come from the run's image, or from the host: FROM and environment.docker_image are not followed"
OUR_LIMITS = "sandbox.limits hold for all tasks alike: environment.cpus, memory_mb, storage_mb are not followed"
NOT_KEPT = "artifacts are not collected"
OWN_IMAGE = "programs, variables and the workspace come from an image of the task's own (tasks.images)"
NO_HOME = "what the image has in /root is not there: HOME is the rollout's own"
LEADS_IN = (
    "PYTHONPATH names the workspace: the verifier's Pythons take modules from there before their own, and a policy "
    "could plant some"
)
NOT_BUILT = "its image is not built"
ASSUMED = (
    "the run's image is taken to have what the task would install (tasks.assume_image); what RUN would put into the "
    "workspace is not there"
)


def load_tasks(
    folder: Path, layout: Layout, *, assume_image: bool = False, images: TaskImages | None = None
) -> LoadedTasks:
    """Every sound task in `folder`, and a fault for every other folder in it.

    `assume_image`: the image has what test scripts would install, and that of the run what RUN lines would. `images`: a
    task that wants more than files has an image of its own there, without which it is faulty.
    """
    found = Gathering("Harbor")
    for root in task_folders(folder):
        with found.one():
            notes: list[str] = []
            task = _load_task(root, layout, assume_image, images, notes.append)
            found.add(task, root.name, f"{root}/{CONFIG}: task.name")
            for note in dict.fromkeys(notes):
                found.note(note)
    return found.loaded()


def _load_task(
    root: Path, layout: Layout, assume_image: bool, images: TaskImages | None, note: Callable[[str], None]
) -> TaskSpec:
    check_path(root)
    path = root / CONFIG
    config = read_config(path)
    _note_differences(config, note)
    made = _environment(root, config, assume_image, images is not None, note)
    workdir = _workdir(root, config, made)
    servers = [McpServer(name=one.name, argv=(one.command or "", *one.args)) for one in config.environment.mcp_servers]
    task = TaskSpec(
        task_id=config.task.name or root.name,
        instruction=_read_instruction(root / INSTRUCTION),
        input_dir=None,
        verifier=Verifier(script=_script(root, config, str(workdir), assume_image, note)),
        workspace_mount=str(workdir),
        mcp_servers=check_servers(f"{path}: environment.mcp_servers", servers),
        env=made.env | config.environment.env,
        run_s=config.agent.timeout_sec,
        metadata=config.metadata,
    )
    if images is None or not _wants_image(config, made, workdir):
        note(OUR_IMAGE)
        task = replace(task, input_dir=_inputs(root, made.files, workdir, layout))
    else:
        built, files = _built(root, config, made, workdir, images)
        note(OWN_IMAGE)
        if built.has_home:
            note(NO_HOME)
        task = replace(
            task, image=built.image, env=built.env | task.env, input_dir=_inputs(root, files, workdir, layout)
        )
    if _leads_in((task.env | config.verifier.env).get("PYTHONPATH", ""), workdir):
        note(LEADS_IN)
    return task


def _leads_in(path: str, workdir: PurePosixPath) -> bool:
    """Whether a folder of `path`, in the manner of PATH, lies in the workspace."""
    places = (os.path.normpath(os.path.join(workdir, folder)) for folder in path.split(":") if folder)
    return any(PurePosixPath(place).is_relative_to(workdir) for place in places)


def _note_differences(config: HarborConfig, note: Callable[[str], None]) -> None:
    environment = config.environment
    if environment.network_mode != "no-network" and environment.allow_internet is not False:
        note(NO_NETWORK)
    if any((environment.cpus, environment.memory_mb, environment.storage_mb, environment.memory, environment.storage)):
        note(OUR_LIMITS)
    if config.artifacts:
        note(NOT_KEPT)


def _read_instruction(path: Path) -> str:
    lines = read_text(path).split("\n")
    while lines and CANARY.fullmatch(lines[0]):
        del lines[0]
    text = "\n".join(lines).lstrip("\n")
    check_text(f"{path}: the instruction", text)
    return text


def _environment(
    root: Path, config: HarborConfig, assume_image: bool, builds: bool, note: Callable[[str], None]
) -> Environment:
    path, named = root / DOCKERFILE, config.environment.docker_image
    is_prebuilt = builds and named is not None
    for name, why in UNFOLLOWED.items():
        if (root / "environment" / name).exists() and not (is_prebuilt and name == IGNORED):
            raise Fault(f"{root}/environment/{name}: {why}")
    if builds and named is not None:  # all else that its Dockerfile says is in it
        is_asked = config.environment.workdir is None and path.exists()
        return Environment(base=named, workdir=read_workdir(path) if is_asked else None)
    if path.exists():
        made = read_dockerfile(path, assume_image=assume_image, builds=builds)
    elif named is not None and assume_image:
        made = Environment(left=["docker_image"])
    else:
        raise Fault(f"{path}: missing; what is in an image that is only named cannot be had without tasks.images")
    if made.left:
        note(ASSUMED)
    check_env(f"{path}: ENV", made.env | dict.fromkeys(made.unread, ""), may_set="PATH" if builds else "")
    return made


def _wants_image(config: HarborConfig, made: Environment, workdir: PurePosixPath) -> bool:
    """Whether the task needs more than files and variables."""
    copied = (path for step in made.steps for path in (step.files or step.targets))
    outside = not all(path.is_relative_to(workdir) for path in copied)
    has_path = "PATH" in made.env or bool(made.unread)
    named = config.environment.docker_image is not None
    return named or outside or has_path or any(step.runs for step in made.steps) or not PLAIN.fullmatch(made.base)


def _built(
    root: Path, config: HarborConfig, made: Environment, workdir: PurePosixPath, images: TaskImages
) -> tuple[BuiltImage, Mapping[PurePosixPath, Path]]:
    """The image of a task that wants one, and the files that are not in it. A fault where it is not built."""
    named = config.environment.docker_image is not None
    origin = f"{root}/{CONFIG}" if named else f"{root}/{DOCKERFILE}"
    recipe, files = make_recipe(origin, made, workdir, images.bases)
    built = images.find(recipe)
    if built is None:
        raise Fault(
            f"{origin}: {NOT_BUILT}: `python -m clawhpc.images tasks.folder={root.parent} "
            f"tasks.images={images.folder}`, with the same tasks.bases, builds what is missing"
        )
    for parent in {parent for path in files for parent in path.parents if workdir in parent.parents}:
        if Path(built.image.folder, str(parent).lstrip("/")).is_symlink():
            raise Fault(f"{origin}: COPY to {parent}: is a link in the image, onto which no folder can be copied")
    return built, files


def _workdir(root: Path, config: HarborConfig, made: Environment) -> PurePosixPath:
    """Where the workspace stands."""
    asked, is_named = config.environment.workdir, config.environment.docker_image is not None
    workdir = PurePosixPath(asked) if asked is not None else made.workdir
    by_config = asked is not None or (workdir is None and is_named)
    key = f"{root}/{CONFIG}: environment.workdir" if by_config else f"{root}/{DOCKERFILE}: WORKDIR"
    if workdir is None:
        raise Fault(f"{key} is missing: the workspace needs a place")
    place = str(workdir)
    if not place.startswith("/") or ".." in workdir.parts or any(char in place for char in "\0\n,"):
        raise Fault(f"{key} {place!r}: must be an absolute path")
    if len(workdir.parts) < 2 or workdir.parts[1] in OF_THE_SYSTEM or place == SANDBOX_HOME or place == "/tmp":
        raise Fault(f"{key} {place}: a workspace cannot stand there; choose a folder of its own, such as /app")
    if any(workdir.is_relative_to(taken) for taken in TAKEN):
        raise Fault(f"{key} {place}: is taken; choose a folder of its own, such as /app")
    return workdir


def _inputs(root: Path, given: Mapping[PurePosixPath, Path], workdir: PurePosixPath, layout: Layout) -> str | None:
    outside = [target for target in given if not target.is_relative_to(workdir)]
    if outside:
        raise Fault(
            f"{root}/{DOCKERFILE}: COPY to {outside[0]}: only what lies in the workspace, {workdir}, can be given "
            "without tasks.images"
        )
    files: dict[str, str | Path] = {str(target.relative_to(workdir)): path for target, path in given.items()}
    return layout.lay_out(f"{root}/{DOCKERFILE}: COPY", files) if files else None


def _script(
    root: Path, config: HarborConfig, workdir: str, assume_image: bool, note: Callable[[str], None]
) -> ScriptCheck:
    path = root / TESTS / SCRIPT
    text = read_text(path)
    first = text.partition("\n")[0]
    if first.startswith("#!") and not re.search(r"\b(ba|da)?sh\b", first):
        raise Fault(f"{path}: {first}: is run with bash")
    for number, line in enumerate(text.splitlines(), start=1):
        found = INSTALLS.search(line)
        if found and not LOOPBACK.search(line) and not line.lstrip().startswith("#"):
            if not assume_image:
                raise Fault(
                    f"{path}:{number}: {found[1]} needs a network, which the verifier has not: have it in the image "
                    "that sandbox.image names, and set tasks.assume_image=true, where the script gets on without"
                )
            note(ASSUMED)
    return ScriptCheck(
        folder=str(real(path.parent)),
        script=SCRIPT,
        mount=TESTS_MOUNT,
        reward_folder=REWARD_FOLDER,
        cwd=workdir,
        env=config.verifier.env,
        timeout_s=config.verifier.timeout_sec or 600.0,
    )
