"""From YAML and the command line to typed settings.

Each part keeps its own settings class, which holds the defaults; `RunConfig` puts them together, `conf/` overrides
them, the command line overrides that. Hydra composes, msgspec checks the types; an unknown key names the known ones.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import hydra
import msgspec
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from clawhpc.campaign.collect import Collector
from clawhpc.campaign.install import PolicySource
from clawhpc.campaign.loop import Campaign, choose_heldout
from clawhpc.campaign.run import open_run
from clawhpc.campaign.settings import CampaignSettings, EvaluateSettings, PolicyChoice
from clawhpc.command import one_line_errors, prepare_process, start_log
from clawhpc.credit.settings import CreditSettings
from clawhpc.errors import ClawError, UserError
from clawhpc.estimate.settings import PlanSettings
from clawhpc.harness.base import check_mcp
from clawhpc.harness.claude_code import ClaudeCodeSettings
from clawhpc.harness.codex import CodexSettings
from clawhpc.harness.gemini_cli import GeminiCliSettings
from clawhpc.harness.hermes import HermesSettings
from clawhpc.harness.mini_swe_agent import MiniSweAgentSettings
from clawhpc.harness.nanobot import NanobotSettings
from clawhpc.harness.openclaw import OpenClawSettings
from clawhpc.harness.opencode import OpencodeSettings
from clawhpc.harness.pi import PiSettings
from clawhpc.harness.qwen_code import QwenCodeSettings
from clawhpc.harness.registry import ADAPTERS
from clawhpc.harness.whitebox import WhiteboxSettings
from clawhpc.keys import check_keys, make_absolute
from clawhpc.launch.pool import WorkerPool
from clawhpc.launch.settings import LaunchSettings
from clawhpc.launch.turn import this_job, this_turn
from clawhpc.learner.settings import ColdStartSettings, LearnerSettings, SftSettings
from clawhpc.ledger import Ledger, default_root
from clawhpc.records import Limits, TaskSpec
from clawhpc.sandbox.settings import SandboxSettings
from clawhpc.serve.settings import EngineSettings
from clawhpc.tasks.servers import check_shown
from clawhpc.tasks.sets import TaskSets, TaskSettings
from clawhpc.verify.settings import VerifySettings, check_rubrics, judge_keys
from clawhpc.worker.settings import WorkerSettings, WorkerSpec

log = logging.getLogger(__name__)

PACKAGED_CONF = Path(__file__).parent / "conf"
CONF_DIR = PACKAGED_CONF if PACKAGED_CONF.is_dir() else Path(__file__).parents[1] / "conf"
"""In an installed package beside the code, in a checkout beside the package."""
PATHS = (
    *("cache_dir", "scratch_dir", "run.root", "policy.folder"),
    *("tasks.folder", "tasks.heldout", "tasks.images", "tasks.mcp.folder", "sandbox.image"),
    *("evaluate.policies", "evaluate.sets", "sft.runs"),
)
"""The keys that hold paths, or paths by name."""
OmegaConf.register_new_resolver("join", "+".join, replace=True)  # a list in a name: ${join:${harness.names}}
OmegaConf.register_new_resolver("basename", lambda path: os.path.basename(path or ""), replace=True)
FORMER_TURN_S = 120.0
"""For the process of a job's former turn to end, on another host, before the next turn goes on with its run."""


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """Where a run is written."""

    root: str = "runs"
    name: str = "default"
    """The run is `root/name/NNN`. The same configuration goes on with its unfinished run; another begins a new one."""


@dataclass(frozen=True, kw_only=True)
class HarnessChoice:
    """Which harnesses run the tasks; several are mixed."""

    names: tuple[str, ...] = ("claude_code",)
    claude_code: ClaudeCodeSettings = field(default_factory=ClaudeCodeSettings)
    openclaw: OpenClawSettings = field(default_factory=OpenClawSettings)
    codex: CodexSettings = field(default_factory=CodexSettings)
    pi: PiSettings = field(default_factory=PiSettings)
    qwen_code: QwenCodeSettings = field(default_factory=QwenCodeSettings)
    opencode: OpencodeSettings = field(default_factory=OpencodeSettings)
    gemini_cli: GeminiCliSettings = field(default_factory=GeminiCliSettings)
    mini_swe_agent: MiniSweAgentSettings = field(default_factory=MiniSweAgentSettings)
    hermes: HermesSettings = field(default_factory=HermesSettings)
    nanobot: NanobotSettings = field(default_factory=NanobotSettings)
    whitebox: WhiteboxSettings = field(default_factory=WhiteboxSettings)

    def __post_init__(self) -> None:
        names = set(self.names)
        if not names or not ADAPTERS.keys() >= names or len(names) < len(self.names):
            raise ValueError(f"names={list(self.names)}: allowed are {', '.join(ADAPTERS)}, each once")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The whole configuration of a run."""

    seed: int = 0
    """Of everything: conf/config.yaml hands it on."""
    cache_dir: str = ""
    """Harness installs, images, compiled kernels, policies of the cold start."""
    scratch_dir: str | None = None
    """Node-local, with a short path; None for a folder of the user's in /tmp."""
    run: RunSettings = field(default_factory=RunSettings)
    tasks: TaskSettings = field(default_factory=TaskSettings)
    harness: HarnessChoice = field(default_factory=HarnessChoice)
    sandbox: SandboxSettings = field(default_factory=SandboxSettings)
    engine: EngineSettings = field(default_factory=EngineSettings)
    worker: WorkerSettings = field(default_factory=WorkerSettings)
    limits: Limits = field(default_factory=Limits)
    verify: VerifySettings = field(default_factory=VerifySettings)
    launch: LaunchSettings = field(default_factory=LaunchSettings)
    campaign: CampaignSettings = field(default_factory=CampaignSettings)
    learner: LearnerSettings = field(default_factory=LearnerSettings)
    credit: CreditSettings = field(default_factory=CreditSettings)
    policy: PolicyChoice = field(default_factory=PolicyChoice)
    evaluate: EvaluateSettings = field(default_factory=EvaluateSettings)
    cold_start: ColdStartSettings = field(default_factory=ColdStartSettings)
    sft: SftSettings = field(default_factory=SftSettings)
    plan: PlanSettings = field(default_factory=PlanSettings)
    """What `python -m clawhpc.plan` takes for granted; nothing else asks for it."""

    def __post_init__(self) -> None:
        warmup_steps, num_steps = self.learner.critic.warmup_steps, self.campaign.num_steps
        if self.credit.needs_critic and warmup_steps >= num_steps > 0:
            raise ValueError(
                f"learner.critic.warmup_steps={warmup_steps}: must be less than campaign.num_steps={num_steps}, "
                "or the policy never learns"
            )
        by_harness: dict[str, Mapping[str, float]] = {
            "tasks.turns": self.tasks.turns,
            "credit.harness_weights": self.credit.harness_weights,
        }
        for key, named in by_harness.items():
            if unknown := sorted(named.keys() - ADAPTERS.keys()):
                raise ValueError(f"{key}.{unknown[0]}: allowed are {', '.join(ADAPTERS)}")
        if self.tasks.mix == "one" and len(self.harness.names) > 1:
            for name in self.harness.names:
                if (weight := self.credit.harness_weight(name)) != 1:
                    raise ValueError(
                        f"credit.harness_weights.{name}={weight}: does nothing with tasks.mix=one, as a step has one "
                        "harness, and nothing for it to weigh more than; allowed are turns, each"
                    )

    def policy_folder(self) -> Path:
        """`policy.folder`, or where sft puts what it makes of these settings: other settings, another policy.

        UserError where the policy is behind an API.
        """
        if self.policy.endpoint.is_set:
            raise UserError(
                f"policy.endpoint.model={self.policy.endpoint.model}: a model behind an API gives no tokens to train "
                "on; it can be evaluated, and sft can imitate it"
            )
        if self.policy.folder is not None:
            return Path(self.policy.folder)
        harnesses = {name: getattr(self.harness, name, None) for name in self.harness.names}
        generate = self.tasks.generate
        inputs = (harnesses, generate.families, generate.seed, self.policy.shape, self.cold_start)
        digest = hashlib.sha256(msgspec.json.encode(inputs)).hexdigest()[:12]
        return Path(self.cache_dir) / "policies" / f"cold-start-{digest}"

    def policy_source(self) -> PolicySource:
        """Where training or evaluation starts. UserError when it is not there, or no policy, or behind an API."""
        source = PolicySource(folder=self.policy_folder(), renderer=self.policy.renderer, thinking=self.policy.thinking)
        source.check()
        return source

    def learner_settings(self) -> LearnerSettings:
        """`learner`, with rows that hold whatever the engine does."""
        return self.learner.for_context(self.engine.max_model_len)

    def scratch_root(self) -> Path | None:
        """Node-local folder for what is temporary; None for the ledger's own choice."""
        return Path(self.scratch_dir) if self.scratch_dir else None

    def worker_spec(self, run_root: Path) -> WorkerSpec:
        """What a worker of this run is told."""
        return WorkerSpec(
            run_root=str(run_root),
            cache_dir=self.cache_dir,
            scratch_root=self.scratch_dir,
            worker=self.worker,
            engine=self.engine,
            sandbox=self.sandbox,
            limits=self.limits,
            harnesses={name: getattr(self.harness, name) for name in self.harness.names},
            endpoint=self.policy.endpoint,
            verify=self.verify,
        )


@contextmanager
def open_campaign(config: RunConfig, tasks: TaskSets, folder: Path) -> Iterator[Campaign]:
    """A campaign with running workers, in its run below `folder`; the same configuration goes on with its own run.

    Within the block the run is this process's alone; after it, and within 10 s of the process's death, its workers,
    engines and sandboxes on this machine are gone. UserError, before there is a run, when there are too few tasks to
    evaluate on, or one of them needs what a harness does not have, or a judge where there is none.
    """
    check_tasks(config, (*tasks.train, *tasks.heldout))
    tasks = dataclasses.replace(tasks, heldout=choose_heldout(tasks, config.campaign.eval_tasks))
    with (
        open_run(folder, msgspec.yaml.encode(config), wait_s=former_turn_s(), turn=this_turn()) as paths,
        Ledger.open(config.scratch_root(), job=this_job()) as ledger,
        WorkerPool(config.launch, config.worker_spec(paths.root), ledger) as pool,
    ):
        log.info("run %s", paths.root)
        collector = Collector(paths, pool, config.campaign.stall_min)
        yield Campaign(
            config.campaign,
            paths=paths,
            collector=collector,
            ledger=ledger,
            tasks=tasks,
            harnesses=config.harness.names,
            mix=config.tasks.mix,
            turns=config.tasks.turns,
        )


def check_tasks(config: RunConfig, tasks: Sequence[TaskSpec]) -> None:
    """UserError where one of `tasks` needs what a harness does not have, or a judge that is not there, has no time or
    no key; where a harness would be shown what it must not see. Those whose harness will have less time than they say
    are counted in the log.
    """
    judge_keys(config.verify.judge, os.environ)
    check_rubrics(tasks, config.verify.judge, config.limits)
    for name in config.harness.names:
        check_mcp(ADAPTERS[name], tasks)
    check_shown(tasks, kept_folders(config))
    most_s = config.limits.harness_s
    if cut := sum(task.run_s is not None and task.run_s > most_s for task in tasks):
        log.warning("%d tasks would give a harness more than limits.deadline_s leaves it, %g s", cut, most_s)


def kept_folders(config: RunConfig) -> dict[str, str | None]:
    """Key -> a folder with tasks, rollouts or records in it."""
    return {
        "cache_dir": config.cache_dir,
        "scratch_dir": config.scratch_dir or str(default_root()),
        "run.root": config.run.root,
        "tasks.folder": config.tasks.folder,
        "tasks.heldout": config.tasks.heldout,
        **{f"evaluate.sets.{name}": folder for name, folder in config.evaluate.sets.items()},
    }


def former_turn_s() -> float:
    """How long to wait for a run that is in use: not at all, but in a job that Slurm has put back into the queue."""
    return FORMER_TURN_S if "SLURM_RESTART_COUNT" in os.environ else 0.0


def typed(cfg: DictConfig) -> RunConfig:
    """The settings in `cfg`. UserError names the key that is unknown or has the wrong type."""
    content = OmegaConf.to_container(cfg, resolve=True)
    assert isinstance(content, dict), "the root of a configuration is a mapping"
    check_keys(content, RunConfig, "")
    for key in PATHS:
        make_absolute(content, key)
    try:
        return msgspec.convert(content, RunConfig)
    except (msgspec.ValidationError, ValueError) as error:
        raise UserError(str(error).replace("$.", "")) from error


def entry_point(task: Callable[[RunConfig], None]) -> Callable[[], None]:
    """A command: composes the configuration, runs `task` on it, and turns errors into one line and an exit code."""
    failures: list[Exception] = []
    composing = True

    def composed(cfg: DictConfig) -> None:
        nonlocal composing
        composing = False
        try:
            config = typed(cfg)
            start_log()
            task(config)
        except (ClawError, OSError, OmegaConfBaseException) as error:
            if HydraConfig.get().mode == RunMode.MULTIRUN:
                raise  # a launcher must see that its job failed
            failures.append(error)  # out of Hydra's hands, which would print its overrides first

    composed.__module__, composed.__name__ = task.__module__, task.__name__
    command = hydra.main(version_base="1.3", config_path=str(CONF_DIR), config_name="config")(composed)

    def main() -> None:
        with one_line_errors(), explained_errors():
            os.environ["HYDRA_FULL_ERROR"] = "1"  # let the exception through to us
            prepare_process()
            register_defaults()
            try:
                command()
            except ValueError as error:
                if not composing:
                    raise
                raise UserError(f"{' '.join(sys.argv[1:])}: {error}") from error  # Hydra's, of engine=null
            for failure in failures:
                raise failure

    return main


def register_defaults() -> None:
    """Give Hydra the defaults of the settings classes, on which conf/config.yaml builds."""
    defaults = OmegaConf.create(msgspec.to_builtins(RunConfig()))
    free = (
        *(defaults.evaluate.policies, defaults.evaluate.sets, defaults.verify.judge.models),
        *(defaults.tasks.mcp.servers, defaults.tasks.turns, defaults.tasks.bases),
        *(defaults.credit.role_weights, defaults.credit.harness_weights),
        *(defaults.launch.slurm.sbatch, defaults.launch.campaign.sbatch),
    )
    for mapping in free:
        OmegaConf.set_struct(mapping, False)  # its keys are the user's: Hydra takes those that it has not seen
    ConfigStore.__deepcopy__ = _itself  # type: ignore[attr-defined]
    ConfigStore.instance().store(name="defaults", node=defaults)


def _itself(store: ConfigStore, memo: dict[int, object]) -> ConfigStore:
    """For `copy.deepcopy`: Hydra's --help copies its sources a hundred times, and changes none. 1.6 s of 2.5."""
    return store


@contextmanager
def explained_errors() -> Iterator[None]:
    """What Hydra and OmegaConf raise is a UserError."""
    try:
        yield
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(explain(error)) from error


def explain(error: Exception) -> str:
    """A configuration error in one line, with what is allowed."""
    cause = error.__cause__
    if isinstance(cause, OmegaConfBaseException) and cause.full_key and cause.parent_node is not None:
        parent = cause.parent_node
        if isinstance(parent, DictConfig):
            return f"unknown key {cause.full_key}; allowed are {', '.join(sorted(map(str, parent)))}"
    return " ".join(str(error).split())
