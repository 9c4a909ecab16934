"""`python -m trainer CONFIG.yaml`: one rank of a run, under torchrun or any env:// launcher.

Exit status: 0 done, 1 the run failed, 2 the request was wrong; the last line on stderr says why.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from trainer.config import TrainerConfig, load_config
from trainer.config_errors import ConfigError
from trainer.data import Corpus, DataError, evaluation_windows, load_corpus
from trainer.environment import Environment, WorldError, read_environment

DONE, FAILED, WRONG_REQUEST = 0, 1, 2


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line; argparse exits with 2 on a wrong one."""
    parser = argparse.ArgumentParser(
        prog="python -m trainer",
        description="Train one rank of a configuration.",
        epilog="Example: torchrun --nproc-per-node 4 -m trainer run.yaml --set train.steps=40",
    )
    parser.add_argument("config", metavar="CONFIG.yaml", type=Path)
    parser.add_argument("--out", metavar="DIR", type=Path, help="default $TESTBED_RUN_DIR, else ./out/<name>")
    parser.add_argument("--set", metavar="KEY=VALUE", action="append", default=[], dest="overrides")
    parser.add_argument(
        "--resume", action="store_true", help="continue from the newest whole checkpoint in DIR"
    )
    return parser.parse_args(argv)


def output_folder(arguments: argparse.Namespace) -> Path:
    """--out, else $TESTBED_RUN_DIR, else ./out/<name of the configuration file>."""
    if arguments.out is not None:
        return Path(arguments.out)
    if run_dir := os.environ.get("TESTBED_RUN_DIR"):
        return Path(run_dir)
    return Path("out") / Path(arguments.config).stem


def refuse_other_run(out: Path, *, resume: bool) -> None:
    """Raise ConfigError if `out` holds checkpoints that a fresh run would mix with its own."""
    if not resume and any((out / "checkpoints").glob("step-*")):
        raise ConfigError(
            f"--out: {out} holds checkpoints of an earlier run, allowed with --resume, or another folder"
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Run one rank; returns the exit status."""
    # Python would notice Ctrl-C only after gloo's wait; records are flushed, so dying at once loses nothing
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    arguments = parse_arguments(argv)
    try:
        config = load_config(arguments.config, arguments.overrides)
        environment = read_environment(config.parallel)
        corpus = load_corpus(config.data, config.seed)
        evaluation_windows(corpus, config)
        out = output_folder(arguments)
        refuse_other_run(out, resume=arguments.resume)
        (out / "ranks").mkdir(parents=True, exist_ok=True)
    except (ConfigError, WorldError, DataError) as error:
        print(error, file=sys.stderr)
        return WRONG_REQUEST
    except OSError as error:
        print(f"--out: {error.filename} cannot be made: {error.strerror}", file=sys.stderr)
        return WRONG_REQUEST
    try:
        run(config, environment, corpus, out, resume=arguments.resume)
    except ConfigError as error:
        _leave(str(error), WRONG_REQUEST)
    except Exception as error:  # the boundary: whatever happened is reported and ends this rank
        traceback.print_exc()
        _fail(environment.rank, error)
    return DONE


def run(config: TrainerConfig, environment: Environment, corpus: Corpus, out: Path, *, resume: bool) -> None:
    """Connect, find the checkpoint to continue from if asked to, train, disconnect."""
    import torch  # noqa: PLC0415 - 2.6 CPU-seconds that a wrong request should not cost

    from trainer.ranks import connect  # noqa: PLC0415
    from trainer.replica_world import connect_replica  # noqa: PLC0415
    from trainer.resume import find  # noqa: PLC0415
    from trainer.train import Trainer  # noqa: PLC0415

    torch.set_num_threads(1)
    timeout_s, survivors = config.train.timeout_s, None
    if config.parallel.on_replica_loss == "continue":
        world, survivors = connect_replica(config, environment)
    else:
        world = connect(config.parallel, environment, timeout_s)
    resumed = find(config, world, out, corpus.sha256) if resume else None
    if resume and world.rank == 0:
        print(
            resumed.sentence if resumed else f"{out}: found no checkpoint, so training starts anew",
            flush=True,
        )
    Trainer(config, world, corpus, out, resumed=resumed, survivors=survivors).run()
    world.control.barrier()  # nobody leaves while another still reads its sockets
    if survivors is not None:
        survivors.close()
    world.close()


def _fail(rank: int, error: Exception) -> NoReturn:
    """Say in one line what happened, and leave."""
    said = " ".join(str(error).split())
    prefix = "" if said.startswith("rank ") else f"rank {rank}: "
    _leave(f"{prefix}{said or type(error).__name__}", FAILED)


def _leave(sentence: str, status: int) -> NoReturn:
    """Leave at once, with a last line on stderr.

    Not through the interpreter's shutdown: it joins threads, and an exchange in flight would hold it
    until the group's timeout.
    """
    print(sentence, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    sys.exit(main())
