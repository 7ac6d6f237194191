"""accelerate launch --quiet -m train --config configs/train/x.yaml [flags]: data -> heads checkpoint."""

from __future__ import annotations

import dataclasses
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

from medusa_heads import base_model
from medusa_heads.checkpoint import load_heads, save_heads
from medusa_heads.heads import create_heads
from medusa_heads.model_card import model_card
from train.config import TrainConfig, parse_config
from train.output_folder import claim_output
from train.run_config import RunConfig
from train.training_data import check_fits_base, frequent_tokens, prepare_data

MIXED_PRECISION = {"float32": "no", "bfloat16": "bf16", "float16": "fp16"}


def main(argv: list[str] | None = None) -> int:
    """Trains heads; see `exit_status`."""
    base_model.quiet_transformers()
    return exit_status(lambda: run(parse_config(sys.argv[1:] if argv is None else argv)))


def exit_status(training: Callable[[], object]) -> int:
    """Runs it; user errors (ValueError) become one line and exit status 2, the end of another process one and exit status 1, Ctrl-C one
    and exit status 130."""
    try:
        training()
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # below the progress bar
        print("\ninterrupted: the same command, without --overwrite, goes on from the last checkpoint", file=sys.stderr)
        return 130
    except RuntimeError as error:
        if not is_lost_process(error):
            raise
        reason = str(error).splitlines()[0]
        print(
            f"error: another process of this run has ended ({reason}): look for its own message, then start the command again; "
            "it goes on from the last checkpoint",
            file=sys.stderr,
        )
        return 1
    return 0


def leave(status: int) -> NoReturn:
    """Ends this process with what `main` returned; after the end of another one at once.

    A gloo thread may still hold a tensor of the call that failed. Freed while Python takes itself down, it aborts the process.
    """
    if status == 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # the system frees the lock on the folder
    raise SystemExit(status)


def is_lost_process(error: RuntimeError) -> bool:
    """Whether this is how NCCL or gloo tell that a process they wait for is gone."""
    import torch.distributed

    return isinstance(error, torch.distributed.DistError) or "gloo" in str(error)


def run(config: TrainConfig) -> Path:
    """One training run, resumed where it stopped; returns the folder of the finished heads."""
    output = Path(config.output_dir)
    check_adapter_options(config)
    lock = claim_output(output, config)
    check_tracker(config.log_with)
    check_deepspeed(config)
    rows, validation_rows, counts = prepare_data(config)  # before the process group starts: no time-out can hit it

    import torch
    from accelerate.utils import set_seed

    from train.acceptance import make_validation
    from train.headed_model import HeadedModel
    from train.objectives import Objective
    from train.packing import PackedDataset
    from train.sharding import in_lock_step, loading_device
    from train.state_manifest import tokenizer_keys
    from train.trainer import Trainer

    make_model: Callable[..., HeadedModel] = HeadedModel
    trainer_type = Trainer
    if config.lora_rank:
        from train.medusa2 import Medusa2Trainer, tuned_model

        make_model, trainer_type = tuned_model(config), Medusa2Trainer
    dtype = pick_precision(config.base_dtype)
    accelerator = make_accelerator(dtype, config.log_with, output)
    set_seed(config.seed)
    model, tokenizer = base_model.load_base(
        config.base,
        dtype=base_model.parse_dtype(dtype),
        device=loading_device(accelerator, quantization=config.base_quantization),
        revision=config.revision,
        quantization=config.base_quantization,
    )
    check_fits_base(model, rows, validation_rows, max_length=config.max_length)
    vocabulary = None
    if config.init_heads:
        initial = load_heads(config.init_heads, model, dtype=torch.float32)
        heads, vocabulary = initial.heads, initial.draft_vocabulary
        heads.config = replace(
            heads.config, base_model=config.base, base_revision=config.revision, base_quantization=config.base_quantization
        )
        heads.requires_grad_(True)
    else:
        heads = create_heads(config.heads_config(), model)
    keys = tokenizer_keys(tokenizer)
    packed = PackedDataset(rows, pack_length=config.pack_length, num_heads=heads.config.num_heads, tokenizer_keys=keys)
    accelerator.print(f"{counts}; {len(packed)} packed rows of up to {config.pack_length} tokens")
    if config.log_with != "none":
        start_tracker(accelerator, config)
    if config.draft_vocab_size:
        vocabulary = frequent_tokens(packed.documents, config.draft_vocab_size)
    headed = make_model(
        model,
        heads,
        draft_vocabulary=vocabulary,
        objective=Objective(config.objective, config.lk_eta),
        d_pace=config.slot_weights == "d_pace",
    )
    trainer = trainer_type(config, headed, packed, accelerator)
    trainer.train(make_validation(replace(config, num_heads=heads.config.num_heads), validation_rows, model, tokenizer))
    with in_lock_step(accelerator, trainer.headed):
        if accelerator.is_main_process:
            write_heads(config, trainer, validation_rows, counts, output, vocabulary)
    accelerator.wait_for_everyone()
    if lock is not None:
        lock.release()
    trainer.history.finish()
    accelerator.state.destroy_process_group()  # nothing may wait for others after it
    return output


def make_accelerator(dtype: str, log_with: str, output: Path) -> Any:
    """Starts the process group, if any. Raises ValueError under a strategy, or with a setting of it, that is not supported."""
    from accelerate import Accelerator
    from accelerate.utils import DistributedDataParallelKwargs, InitProcessGroupKwargs

    from train import zero
    from train.sharding import start_sharding

    accelerator = Accelerator(
        mixed_precision="no" if zero.is_asked_for() else MIXED_PRECISION[dtype],  # its engine would turn the heads' weights to it
        log_with=None if log_with == "none" else log_with,
        project_dir=str(output),
        step_scheduler_with_optimizer=False,
        kwargs_handlers=[
            InitProcessGroupKwargs(timeout=timedelta(hours=2)),  # the others wait while one measures and writes
            DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True),  # the base's buffers are frozen too
        ],
    )
    accelerator.gradient_accumulation_steps = 1  # losses are divided by the counts of a whole window already
    start_sharding(accelerator)
    return accelerator


def tracker_config(config: RunConfig) -> dict[str, Any]:
    """The options as every tracker takes them: plain numbers and text."""
    return {name: value if isinstance(value, (int, float, str, bool)) else str(value) for name, value in config.schedule_dict().items()}


def start_tracker(accelerator: Any, config: RunConfig) -> None:
    """Raises ValueError when the tracker does not start: better before training than after."""
    try:
        accelerator.init_trackers(config.project, config=tracker_config(config))
    except Exception as error:
        raise ValueError(f"--log-with {config.log_with} does not start ({error!r}); repair it, or use --log-with none") from error


def pick_precision(dtype: str) -> str:
    """`--base-dtype` -> the type itself. Raises ValueError for one that the device of this run cannot train in."""
    import torch

    on_gpu = torch.cuda.is_available() and os.environ.get("ACCELERATE_USE_CPU", "false").lower() != "true"
    has_bfloat16 = on_gpu and torch.cuda.is_bf16_supported(including_emulation=False)
    if dtype == "auto":
        return "bfloat16" if has_bfloat16 else "float32"
    if dtype == "bfloat16" and on_gpu and not has_bfloat16:
        raise ValueError(f"--base-dtype bfloat16: {torch.cuda.get_device_name()} cannot calculate in it; use float16 or float32")
    if dtype == "float16" and not on_gpu:
        raise ValueError("--base-dtype float16: training in it needs a GPU; use float32 or bfloat16 on a CPU")
    return dtype


def check_adapter_options(config: TrainConfig) -> None:
    """Refuses, before any work, options of an adapter where none is asked for: whoever forgot its rank would train a frozen base."""
    for option in dataclasses.fields(config):
        if config.lora_rank or not option.name.startswith("lora_"):
            continue
        default = option.default_factory() if callable(option.default_factory) else option.default
        if getattr(config, option.name) != default:
            raise ValueError(f"{option.name}: there is no adapter that it could be of: add --lora-rank N, or leave it out")


def check_tracker(name: str) -> None:
    """Refuses a tracker whose package is not installed, before any work."""
    import importlib.util

    if name != "none" and importlib.util.find_spec(name) is None:
        raise ValueError(f"--log-with {name}: the package is not installed; pip install 'medusa-heads[{name}]', or use --log-with none")


def check_deepspeed(config: TrainConfig) -> None:
    """Refuses, where the launcher asked for DeepSpeed, what does not work with it, before any work."""
    from train import zero

    zero.check_possible()
    if config.lora_rank:
        zero.refuse("lora_rank: an adapter does not train")
    if pick_precision(config.base_dtype) == "float16":
        zero.refuse("base_dtype: float16, which needs losses to be scaled, does not train")


def write_heads(config: TrainConfig, trainer: Any, validation_rows: Any, counts: Any, output: Path, vocabulary: Any) -> None:
    """Chooses the heads, measures them on validation and writes them beside the checkpoints."""
    from train.evaluate import measure
    from train.history import plot_history
    from train.packing import PackedDataset

    choice = choose_heads(config, trainer)
    measured: dict[str, Any] = {}
    held_out: list[str] = []
    if validation_rows is not None:
        rows = PackedDataset(validation_rows, pack_length=config.pack_length, num_heads=trainer.num_heads)
        held_out = list(validation_rows["id"])
        try:
            measured = measure(trainer.headed, rows, draft_vocabulary=vocabulary).as_dict()
            print(f"validation, expected acceptance length by nodes: {measured['acceptance_length']}")
        except ValueError as error:  # hours of training are not thrown away for it
            print(f"warning: {error}. The heads are written without measured acceptance", file=sys.stderr)
    if config.lora_rank:
        from train.medusa2 import save_adapter

        tuned = save_adapter(trainer, output)
        trainer.heads.config = replace(trainer.heads.config, base_fingerprint=tuned, base_quantization="none")
    figures = {name: value for name, value in measured.items() if name != "static_nodes"} | choice  # those are long; in trees/measured.json
    if figures and config.lora_rank and config.base_quantization != "none":
        figures["measured on"] = f"the base in {config.base_quantization} with the adapter beside it, not the merged one"
    card = model_card(
        trainer.heads.config,
        base_license=None,
        data={"files": [Path(f).name for f in config.data], "counts": str(counts)},
        recipe=config.schedule_dict(),
        measured=figures,
        validation_ids=held_out,
        tuned=config.lora_rank > 0,
    )
    try:
        print(f"picture of the run: {plot_history(output)}")
    except (ValueError, OSError) as error:
        print(f"no picture of the run: {error}", file=sys.stderr)
    staging = output / "finished"
    save_heads(trainer.heads, staging, card=card, measured=measured, draft_vocabulary=vocabulary)
    for path in sorted(staging.iterdir(), key=lambda p: p.name == "config.json"):  # config.json last: it marks the folder as whole
        target = output / path.name
        if target.is_dir():
            shutil.rmtree(target)
        path.rename(target)
    staging.rmdir()
    print(f"heads written to {output}")


def choose_heads(config: TrainConfig, trainer: Any) -> dict[str, Any]:
    """Puts the heads to be written into the model; returns what the card says of the choice."""
    from train.acceptance import MAX_NEW_TOKENS

    validations = trainer.validations
    if not validations.measured:
        return {}
    best, last = validations.best, validations.measured[-1]
    chosen = trainer.take_best() if config.keep == "best" else last.step
    print(
        f"the heads of step {chosen} are kept; decoded acceptance length of the best (step {best.step}) {best.length:.3f}, "
        f"of the last (step {last.step}) {last.length:.3f}"
    )
    conditions = f"{len(trainer.validation.prompts)} prompts, {config.validation_tree}, up to {MAX_NEW_TOKENS} new tokens, greedy"
    return {
        f"decoded on validation ({conditions})": {
            "chosen step": chosen,
            "acceptance length of the best": f"{best.length:.4g} (step {best.step})",
            "acceptance length of the last": f"{last.length:.4g} (step {last.step})",
        }
    }


if __name__ == "__main__":
    leave(main())
