"""accelerate launch --quiet -m train.draft_model --base B --layers N --data F --output-dir D: data -> a draft model for B.

The draft model is B's embedding, first N layers, final norm and lm_head, distilled on answers of B: a
checkpoint that transformers loads like any other, for speculative sampling (infer/drafters/draft_model.py).
"""

from __future__ import annotations

import copy
import json
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

from medusa_heads import base_model
from medusa_heads.replacing import replacing_folder
from medusa_heads.versions import commit, versions
from train import zero
from train.__main__ import (
    check_tracker,
    exit_status,
    leave,
    make_accelerator,
    pick_precision,
    start_tracker,
)
from train.draft_model_config import DraftModelConfig, parse_config
from train.output_folder import claim_output
from train.training_data import check_fits_base, prepare_data

RECORD = "draft_model.json"


def main(argv: list[str] | None = None) -> int:
    """Distils a draft model; see `exit_status`."""
    base_model.quiet_transformers()
    return exit_status(lambda: run(parse_config(sys.argv[1:] if argv is None else argv)))


def run(config: DraftModelConfig) -> Path:
    """One training run, resumed where it stopped; returns the folder of the finished draft model."""
    output = Path(config.output_dir)
    if (output / "config.json").exists() and not config.overwrite:
        raise ValueError(f"--output-dir {output} already holds a finished model: choose another folder, or pass --overwrite to replace it")
    lock = claim_output(output, config)
    check_tracker(config.log_with)
    zero.refuse("a draft model does not train", instead="ddp.yaml")
    rows, validation_rows, counts = prepare_data(config)  # before the process group starts: no time-out can hit it

    from accelerate.utils import set_seed

    from medusa_heads.first_layers import copy_first_layers
    from train.draft_model_loss import DistilledModel
    from train.draft_model_trainer import DraftModelTrainer
    from train.packing import PackedDataset
    from train.sharding import is_sharded

    dtype = pick_precision(config.base_dtype)
    accelerator = make_accelerator(dtype, config.log_with, output)
    if is_sharded(accelerator):
        raise ValueError("a draft model is trained on one GPU or data parallel: launch with --config_file configs/accelerate/ddp.yaml")
    set_seed(config.seed)
    base, tokenizer = base_model.load_base(
        config.base, dtype=base_model.parse_dtype(dtype), device=accelerator.device, revision=config.revision
    )
    check_fits_base(base, rows, validation_rows, max_length=config.max_length)
    if config.layers >= (depth := len(base_model.decoder_layers(base))):
        raise ValueError(f"layers: {config.layers} is no saving, the base model has {depth}; take fewer")
    distilled = DistilledModel(base, copy_first_layers(base, config.layers), train_embeddings=config.train_embeddings)
    packed = PackedDataset(rows, pack_length=config.pack_length, num_heads=1)
    accelerator.print(f"{counts}; {len(packed)} packed rows of up to {config.pack_length} tokens")
    if config.log_with != "none":
        start_tracker(accelerator, config)
    trainer = DraftModelTrainer(config, distilled, packed, accelerator)
    trainer.train()
    if accelerator.is_main_process:
        record = describe(config, trainer, validation_rows, counts)
        write_draft_model(trainer.distilled.draft, tokenizer, output, dtype=base.dtype, record=record)
    accelerator.wait_for_everyone()
    if lock is not None:
        lock.release()
    trainer.history.finish()
    accelerator.state.destroy_process_group()  # nothing may wait for others after it
    return output


def describe(config: DraftModelConfig, trainer: Any, validation_rows: Any, counts: Any) -> dict[str, Any]:
    """What the draft model was made of, how and with what; measured on validation where there is any."""
    from train.draft_model_trainer import measure
    from train.packing import PackedDataset

    measured: dict[str, float] = {}
    held_out: list[str] = []
    if validation_rows is not None:
        held_out = list(validation_rows["id"])
        rows = PackedDataset(validation_rows, pack_length=config.pack_length, num_heads=1)
        with trainer.accelerator.autocast():
            measured = measure(trainer.distilled, rows, batch_size=config.batch_size)
        print("validation: " + " ".join(f"{name} {value:.3f}" for name, value in measured.items()))
    return {
        "base_model": config.base,
        "base_revision": config.revision,
        "base_fingerprint": trainer.base_fingerprint,
        "num_layers": config.layers,
        "measured": measured,
        "data": {"files": [Path(f).name for f in config.data], "counts": str(counts)},
        "recipe": config.schedule_dict(),
        "validation_ids": held_out,
        "command": f"python -m train.draft_model {shlex.join(sys.argv[1:])}",
        "versions": versions(),
        "commit": commit(),
    }


def write_draft_model(draft: Any, tokenizer: Any, output: Path, *, dtype: Any, record: dict[str, Any]) -> None:
    """The draft model in `dtype` with its tokenizer and record, beside the checkpoints in `output`.

    Made whole in a folder of its own, then moved, config.json last: without it nothing loads as a model.
    """
    staging = output / "finished"
    with replacing_folder(staging) as work:
        copy.deepcopy(draft).to(dtype).save_pretrained(work)
        tokenizer.save_pretrained(work)
        (work / RECORD).write_text(json.dumps(record, indent=1) + "\n")
    for path in sorted(staging.iterdir(), key=lambda p: p.name == "config.json"):
        target = output / path.name
        if target.is_dir():
            shutil.rmtree(target)
        path.rename(target)
    staging.rmdir()
    print(f"draft model written to {output}")


if __name__ == "__main__":
    leave(main())
