"""The training loop, whatever the mode: everything that it takes is opened, used step by step, and closed.

Not covered: what a step does (`trainer.py`).
"""

import shlex
from collections.abc import Callable
from contextlib import closing

from bridge.atropos.stream import AtroposStream
from bridge.config import TrainConfig
from bridge.learn import reference
from bridge.learn.opening import MakeOptimizer
from bridge.modes import way_of
from bridge.modes.mode import RunContext, ServerProcess
from bridge.optimizers import factory
from bridge.rollouts.environment import EnvironmentStream
from bridge.rollouts.sampler import fit_completions
from bridge.rollouts.stream import Stream
from bridge.run.checkpoint import Found
from bridge.run.metrics import Summary
from bridge.run.reporting import Reporter
from bridge.run.run_directory import CHECKPOINTS, RunDirectory
from bridge.run.trainer import Trainer
from bridge.scoring.score import Scores
from bridge.types import Environment


def train(
    config: TrainConfig,
    environment: Environment | None,
    run: RunDirectory,
    reporter: Reporter,
    *,
    recipe: Callable[[], Scores] | None = None,
    process: ServerProcess | None = None,
    resume: Found | None = None,
    chosen: TrainConfig | None = None,
    make_optimizer: MakeOptimizer = factory.make,
) -> Summary:
    """Train up to step `config.training_steps`, leave metrics and checkpoints behind, and tell `reporter` of each step.

    `environment` has the problems; None where rollouts come from elsewhere. What scores is made by `recipe` in
    processes of its own; without one, `environment` scores, in this process. An interrupt or an error ends the run with
    the weights of the last published step saved. `process` is the server if this run started it: if it dies, it is
    started again. `resume` is the checkpoint to resume from. `make_optimizer` is for comparisons. `config` may hold
    derived values where nothing was `chosen`; both are written to the run directory.

    Raises:
        BridgeError: whatever the mode, the environment, the server or the disk gave as a reason to stop.
    """
    chosen = chosen or config
    reference.check(config)
    config = config.changed(save_path=config.checkpoints.save_path or run.checkpoints)
    name = str(run.path.absolute())
    context = RunContext(name=name, scratch=run.served, note=run.note, resumes=resume is not None, process=process)
    mode = way_of(config)(config, context)
    try:
        config = fit_completions(config, mode.max_model_len, run.note)
        with closing(_stream(config, environment, run, reporter, recipe)) as stream:
            trainer = Trainer(config, stream, run, mode, reporter, make_optimizer, owns_server=process is not None)
            if resume is not None:
                trainer.resume(resume)
            elif config.mode == "shared_vllm" and mode.version:  # the other modes bring weights of their own
                run.note(
                    f"the server was trained before: step 1 starts from its weights, version {mode.version}, not from"
                    f" those of {config.model_name} (bridge restore {shlex.quote(config.model_name)} loads these)"
                )
            run.write_config(
                chosen, config.changed(lr=config.learning_rate)
            )  # from here on there is something to keep: a refused run leaves no trace
            first = 1 if resume is None else resume.progress.step + 1
            steps = f"steps {first} to {config.training_steps}"
            run.record(f"training {config.model_name} by --mode {config.mode}: {steps}")
            summary = trainer.run()
            run.record(f"all steps done; checkpoint {summary.checkpoint}")
            return summary
    finally:
        mode.close()


def _stream(
    config: TrainConfig,
    environment: Environment | None,
    run: RunDirectory,
    reporter: Reporter,
    recipe: Callable[[], Scores] | None,
) -> Stream:
    if config.rollouts.source == "atropos":
        assert config.checkpoints.save_path is not None, "derived from the run directory"
        folder = config.checkpoints.save_path.absolute()
        name = (folder.parent if folder.name == CHECKPOINTS else folder).name or "bridge"
        return AtroposStream(config, run.note, run_name=name)
    assert environment is not None, "nothing to sample for"
    return EnvironmentStream(config, environment, run.note, recipe=recipe, progress=reporter.progress)
