"""The command lines that the two backends write, and what goes into them. Pure: nothing is started."""

from __future__ import annotations

import ast
import json
import os
import sys
from pathlib import Path

import pytest

from clawhpc.ledger import reap
from clawhpc.records import SANDBOX_HOME
from clawhpc.sandbox import init, watch
from clawhpc.sandbox.apptainer import Apptainer
from clawhpc.sandbox.base import PROXY_PORT, PROXY_URL, Mount, SandboxCommand
from clawhpc.sandbox.bubblewrap import Bubblewrap
from clawhpc.sandbox.container import INIT_TARGET, SOCKET_TARGET, WATCH_TARGET, _command_text, _mounts
from clawhpc.sandbox.root import Root, host_root, image_root
from clawhpc.sandbox.settings import SandboxLimits

INNER = ("/usr/bin/python3", "init.py")
MOUNTS = (
    Mount(source=Path("/host/home"), target="/root", writable=True),
    Mount(source=Path("/host/a,b"), target="/opt/tools"),
)


def command(**fields: object) -> SandboxCommand:
    return SandboxCommand(
        **{"sandbox_id": "r1", "argv": ("claude", "-p"), "env": {"A": "1"}, "cwd": "/w", **fields}  # type: ignore[arg-type]
    )


@pytest.fixture
def root(tmp_path: Path) -> Root:
    for name in ("usr", "etc", "empty", "opt"):
        (tmp_path / name).mkdir()
    (tmp_path / "etc/passwd").touch()
    (tmp_path / "usr/bin").mkdir()
    (tmp_path / "bin").symlink_to("usr/bin")
    return Root(base=tmp_path, mounts=(), python="/usr/bin/python3")


def kernel_settings_here() -> list[str]:
    paths = ("/proc/sys", "/proc/irq", "/proc/bus", "/proc/sysrq-trigger")
    return [path for path in paths if os.path.exists(path)]


def test_bubblewrap_command_line(root: Root) -> None:
    line = " ".join(Bubblewrap(program="bwrap").argv(root, MOUNTS, INNER))
    assert line == (
        "bwrap --unshare-user --unshare-pid --unshare-net --unshare-ipc --unshare-uts --unshare-cgroup-try"
        " --cap-drop ALL --hostname sandbox --die-with-parent --as-pid-1"
        f" --symlink usr/bin /bin --ro-bind {root.base}/etc /etc --ro-bind {root.base}/usr /usr"
        f" --dev /dev --proc /proc {' '.join(f'--ro-bind {path} {path}' for path in kernel_settings_here())}"
        " --bind /host/home /root --ro-bind /host/a,b /opt/tools"
        " --remount-ro / --chdir / -- /usr/bin/python3 init.py"
    )


def shown_by_bubblewrap(base: Path, *targets: str) -> list[str]:
    """Places of the root that are bound or linked below mounts with these targets."""
    mounts = [Mount(source=Path("/host"), target=target) for target in targets]
    argv = Bubblewrap(program="bwrap").argv(Root(base=base, mounts=(), python="python3"), mounts, INNER)
    places = [place for option, _, place in zip(argv, argv[1:], argv[2:], strict=False) if option == "--ro-bind"]
    links = [place for option, _, place in zip(argv, argv[1:], argv[2:], strict=False) if option == "--symlink"]
    return sorted({*places, *links} - {*targets, *kernel_settings_here()})


def test_bubblewrap_shows_all_of_an_image_but_what_is_made_fresh(tmp_path: Path) -> None:
    for name in ("usr", "venv", "nix", ".hidden", "dev", "proc", "run", "sys", "tmp", "root"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    (tmp_path / "conda").symlink_to("/opt/conda")
    (tmp_path / "entrypoint.sh").touch()
    os.mkfifo(tmp_path / "pipe")
    assert shown_by_bubblewrap(tmp_path) == ["/.hidden", "/conda", "/entrypoint.sh", "/nix", "/usr", "/venv"]


@pytest.mark.parametrize(
    ("targets", "places"),
    [
        (("/data",), ["/home", "/link"]),
        (("/data/models",), ["/data", "/home", "/link"]),
        (("/data/job", "/data/job/reward"), ["/data/models", "/data/more", "/home", "/link"]),
        (("/data/models/new/work",), ["/data/models/one", "/data/more", "/home", "/link"]),
        (("/link/work",), ["/data", "/home"]),
        (("/data/more/work",), ["/data/models", "/home", "/link"]),
    ],
)
def test_where_a_mount_needs_a_place_in_an_image_the_rest_of_its_folder_is_shown(
    tmp_path: Path, targets: tuple[str, ...], places: list[str]
) -> None:
    for name in ("home/user", "data/models/one"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "file").touch()
    (tmp_path / "data/more").symlink_to("/home/user")
    (tmp_path / "link").symlink_to("data")
    assert shown_by_bubblewrap(tmp_path, *targets) == places


def test_apptainer_command_line(root: Root) -> None:
    argv = Apptainer(program="apptainer", config_dir=Path("/c")).argv(root, MOUNTS, INNER)
    as_root = ["--userns"] if os.getuid() == 0 else []
    assert argv == [
        *("apptainer", "--quiet", "exec", "--containall", "--cleanenv", "--no-home"),
        *("--no-mount", "hostfs,bind-paths,sys,cwd", "--net", "--network", "none", "--hostname", "sandbox"),
        *("--no-init", "--no-privs", *as_root),
        *(
            part
            for path in kernel_settings_here()
            for part in ("--mount", f"type=bind,source={path},destination={path},ro")
        ),
        *("--mount", "type=bind,source=/host/home,destination=/root"),
        *("--mount", 'type=bind,"source=/host/a,b",destination=/opt/tools,ro'),
        *("--pwd", "/", str(root.base), "/usr/bin/python3", "init.py"),
    ]


def test_apptainers_runtime_gets_the_markers_under_a_name_that_it_passes_on() -> None:
    environment = Apptainer(program="apptainer", config_dir=Path("/c")).environment({"MARK": "m"})
    assert environment == {"MARK": "m", "APPTAINERENV_MARK": "m", "APPTAINER_CONFIGDIR": "/c"}


def test_what_lies_in_a_mount_is_mounted_after_it(root: Root, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    mounts = (
        Mount(source=Path("/reward"), target="/root/.openclaw/workspace/reward"),
        Mount(source=Path("/workspace"), target="/root/.openclaw/workspace", writable=True),
    )
    placed = [mount.target for mount in _mounts(root, command(mounts=mounts), tmp_path / "run")]
    assert placed[:4] == ["/tmp", "/root", "/var/tmp", INIT_TARGET]
    assert placed[4:] == [mounts[1].target, mounts[0].target, WATCH_TARGET]


def test_without_a_home_or_a_proxy_home_is_a_folder_of_the_run_and_no_socket_is_bound(
    root: Root, tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    placed = {mount.target: mount for mount in _mounts(root, command(), tmp_path / "run")}
    assert placed[SANDBOX_HOME].source.parent == tmp_path / "run"
    assert SOCKET_TARGET not in placed
    assert json.loads(_command_text(command(), SandboxLimits()))["proxy_socket"] is None


def test_the_proxy_socket_is_bound_and_named_to_init(root: Root, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with_proxy = command(proxy_socket=Path("/host/p.sock"))
    assert Mount(source=Path("/host/p.sock"), target=SOCKET_TARGET, writable=True) in _mounts(
        root, with_proxy, tmp_path / "run"
    )
    told = json.loads(_command_text(with_proxy, SandboxLimits()))
    assert (told["proxy_socket"], told["proxy_port"]) == (SOCKET_TARGET, PROXY_PORT)
    assert PROXY_URL.endswith(f":{PROXY_PORT}")


def test_a_commands_own_path_and_home_win() -> None:
    told = json.loads(_command_text(command(env={"PATH": "/mine"}), SandboxLimits()))
    assert told["env"] == {"PATH": "/mine", "HOME": SANDBOX_HOME}


def test_the_hosts_root_shows_programs_and_no_accounts_keys_or_resolver(tmp_path: Path) -> None:
    root = host_root(tmp_path / "top")
    targets = {mount.target for mount in root.mounts}
    assert "/usr" in targets
    assert not {"/etc", "/etc/shadow", "/etc/ssl", "/etc/resolv.conf", "/home", "/root", "/var", "/opt"} & targets
    assert not any(mount.writable for mount in root.mounts)
    assert sorted(path.name for path in (tmp_path / "top/home").iterdir()) == []


def test_accounts_are_root_and_the_caller_both_at_home_in_the_sandbox(tmp_path: Path) -> None:
    root = image_root(Path("/image"), tmp_path)
    lines = [line.split(":") for line in (tmp_path / "passwd").read_text().splitlines()]
    assert {int(line[2]) for line in lines} == {0, os.getuid()}
    assert {line[5] for line in lines} == {SANDBOX_HOME}
    assert {mount.target for mount in root.mounts} == {"/etc/passwd", "/etc/group"}


@pytest.mark.parametrize("module", [init, watch, reap])
def test_programs_of_their_own_import_the_standard_library_only(module: object) -> None:
    tree = ast.parse(Path(module.__file__).read_text())  # type: ignore[attr-defined]
    imports = [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
    names = {alias.name for node in imports if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in imports if isinstance(node, ast.ImportFrom)}
    names -= {"clawhpc.sandbox.watch"}  # goes with init
    assert {name.partition(".")[0] for name in names} <= sys.stdlib_module_names


def test_exit_codes_are_those_of_a_shell() -> None:
    assert init.exit_code(7 << 8) == 7
    assert init.exit_code(9) == 137
