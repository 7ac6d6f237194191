"""accelerate launch --quiet -m train --config configs/train/x.yaml [flags]: data -> heads checkpoint."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

from filelock import FileLock

from medusa_heads import base_model
from medusa_heads.checkpoint import load_heads, save_heads
from medusa_heads.embedded import cache_dir
from medusa_heads.heads import create_heads
from medusa_heads.lock import lock_output
from medusa_heads.model_card import model_card
from medusa_heads.replacing import remove_abandoned
from train.config import TrainConfig, parse_config
from train.draft_model_config import DraftModelConfig

MOVING = ".previous"  # becomes `previous` once all earlier files are in it
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
    if config.max_length > base_model.max_length(model):
        raise ValueError(
            f"max_length: {config.max_length} is beyond the base model's context of {base_model.max_length(model)} tokens; lower it"
        )
    check_token_ids(rows, base_model.vocab_size(model))
    check_token_ids(validation_rows, base_model.vocab_size(model))
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


def claim_output(output: Path, config: TrainConfig) -> FileLock | None:
    """Refuses, before any work, to replace finished heads or to write where it cannot or where another run does.

    Returns the lock that the first process holds on the folder while it runs.
    """
    if config.overwrite:
        refuse_inputs_within(output, config)
    elif (output / "config.json").exists():
        raise ValueError(f"--output-dir {output} already holds finished heads: choose another folder, or pass --overwrite to replace them")
    if os.environ.get("RANK", "0") != "0":
        return None
    try:
        output.mkdir(parents=True, exist_ok=True)
        probe = output / f".probe-{os.getpid()}"
        probe.touch()
        probe.unlink()
        lock = lock_output(output.resolve(), "--output-dir")
        remove_abandoned(output / "checkpoints", ".step-")
        if config.overwrite or (output / MOVING).exists():
            set_aside(output)
        return lock
    except OSError as error:
        raise ValueError(f"--output-dir {output} cannot be written ({error.strerror}): choose another folder") from None


def refuse_inputs_within(output: Path, config: TrainConfig) -> None:
    """Raises ValueError when something that the run reads lies in the folder whose files --overwrite moves away."""
    named = {"base": [config.base], "data": config.data, "validation": config.validation}
    named |= {name: [getattr(config, name)] for name in ("validation_prompts", "init_heads", "hidden_states_dir")}
    for name, paths in named.items():
        for path in filter(None, paths):
            if Path(path).exists() and Path(path).resolve().is_relative_to(output.resolve()):
                raise ValueError(
                    f"{name}: {path} lies in --output-dir {output}, whose files --overwrite moves away: move it, or choose another folder"
                )


def set_aside(output: Path) -> None:
    """Moves earlier heads and checkpoints into `previous`, so that nothing of them mixes with the new ones and
    a killed run resumes from its own checkpoints (without --overwrite). Killed itself, it is finished by the next start."""
    moving, previous = output / MOVING, output / "previous"
    earlier = [path for path in output.iterdir() if path not in (moving, previous)]
    if not earlier and not moving.exists():
        return
    moving.mkdir(exist_ok=True)
    for path in sorted(earlier, key=lambda p: p.name != "config.json"):  # config.json first: it marks the folder as whole
        path.rename(moving / path.name)
    shutil.rmtree(previous, ignore_errors=True)
    moving.rename(previous)


def tracker_config(config: TrainConfig | DraftModelConfig) -> dict[str, Any]:
    """The options as every tracker takes them: plain numbers and text."""
    return {name: value if isinstance(value, (int, float, str, bool)) else str(value) for name, value in config.schedule_dict().items()}


def start_tracker(accelerator: Any, config: TrainConfig | DraftModelConfig) -> None:
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


def prepare_data(config: TrainConfig) -> tuple[Any, Any, Any]:
    """Tokenised training rows, validation rows (or None) and the counts of the former.

    Every process comes here; one prepares under a file lock, the others read its cache.
    """
    from datasets import concatenate_datasets

    from train.tokenized_data import tokenize_dataset

    cache = cache_dir() / "tokenized"
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"cannot write the data cache {cache} ({error.strerror}): set MEDUSA_HEADS_CACHE to a folder that can be written"
        ) from None
    with FileLock(cache / "prepare.lock"):
        tokenizer = base_model.load_tokenizer(config.base, revision=config.revision)
        rows, counts = tokenize_dataset(
            config.data,
            tokenizer,
            max_length=config.max_length,
            limit=config.limit,
            data_format=config.data_format,
            cache_dir=cache,
        )
        validation = []
        if config.validation:
            validation.append(tokenize_dataset(config.validation, tokenizer, max_length=config.max_length, cache_dir=cache)[0])
    if config.held_out:
        rows, held_out = split_by_id(rows, config.held_out)
        validation.append(held_out)
    return rows, concatenate_datasets(validation) if validation else None, counts


def split_by_id(rows: Any, num_held_out: int) -> tuple[Any, Any]:
    """Rows -> (training rows, held-out rows): those whose id has the lowest SHA-256 are held out, so
    that the choice depends on nothing but the ids. Several samples of one prompt (`id#0`, `id#1`) are never in both."""
    if num_held_out >= len(rows):
        raise ValueError(f"held_out: {num_held_out} of {len(rows)} conversations leaves none to train on: lower --held-out")
    prompts = [re.sub(r"#\d+$", "", row_id) for row_id in rows["id"]]
    hashes = [hashlib.sha256(prompt.encode()).hexdigest() for prompt in prompts]
    order = sorted(range(len(rows)), key=hashes.__getitem__)
    held_out, last = order[:num_held_out], hashes[order[num_held_out - 1]] if num_held_out else ""
    training = [index for index in order[num_held_out:] if hashes[index] != last]
    if not training:
        raise ValueError(f"held_out: {num_held_out} conversations leave none of another prompt to train on: lower --held-out")
    return rows.select(sorted(training)), rows.select(sorted(held_out))


def check_token_ids(rows: Any | None, vocab_size: int) -> None:
    """Raises ValueError naming the first row, if any, whose token ids, stored with it, are another model's."""
    for batch in () if rows is None else rows.select_columns(["id", "input_ids"]).with_format("numpy").iter(1000):
        for row_id, ids in zip(batch["id"], batch["input_ids"], strict=True):
            if len(ids) and ids.max() >= vocab_size:
                raise ValueError(
                    f"data: conversation {row_id} holds token id {ids.max()}, and the base has {vocab_size} tokens: it was answered by "
                    "another model; answer the prompts anew with `medusa-heads regenerate`"
                )


def frequent_tokens(rows: Any, size: int) -> Any:
    """The `size` most frequent supervised tokens, ascending; fewer where the text has fewer."""
    import numpy as np
    import torch

    counts = np.zeros(1, dtype=np.int64)
    for batch in rows.select_columns(["input_ids", "assistant_mask"]).with_format("numpy").iter(1000):
        ids = np.concatenate([row[mask.astype(bool)] for row, mask in zip(batch["input_ids"], batch["assistant_mask"], strict=True)])
        found = np.bincount(ids, minlength=len(counts))
        found[: len(counts)] += counts
        counts = found
    order = np.argsort(-counts, kind="stable")[:size]
    return torch.from_numpy(np.sort(order[counts[order] > 0]))


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
    staging = output / "finished"
    save_heads(trainer.heads, staging, card=card, measured=measured, draft_vocabulary=vocabulary)
    for path in sorted(staging.iterdir(), key=lambda p: p.name == "config.json"):  # config.json last: it marks the folder as whole
        target = output / path.name
        if target.is_dir():
            shutil.rmtree(target)
        path.rename(target)
    staging.rmdir()
    print(f"heads written to {output}")
    try:
        print(f"picture of the run: {plot_history(output)}")
    except (ValueError, OSError) as error:
        print(f"no picture of the run: {error}", file=sys.stderr)


def choose_heads(config: TrainConfig, trainer: Any) -> dict[str, Any]:
    """Puts the heads to be written into the model; returns what the card says of the choice."""
    from train.acceptance import MAX_NEW_TOKENS

    validations = trainer.validations
    if not validations.measured:
        return {}
    (best, best_length), (last, last_length) = validations.best, validations.measured[-1]
    chosen = trainer.take_best() if config.keep == "best" else last
    print(
        f"the heads of step {chosen} are kept; decoded acceptance length of the best (step {best}) {best_length:.3f}, "
        f"of the last (step {last}) {last_length:.3f}"
    )
    conditions = f"{len(trainer.validation.prompts)} prompts, {config.validation_tree}, up to {MAX_NEW_TOKENS} new tokens, greedy"
    return {
        f"decoded on validation ({conditions})": {
            "chosen step": chosen,
            "acceptance length of the best": f"{best_length:.4g} (step {best})",
            "acceptance length of the last": f"{last_length:.4g} (step {last})",
        }
    }


if __name__ == "__main__":
    leave(main())
