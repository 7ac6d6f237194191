"""HeadsConfig: what a set of draft heads is, as stored in a heads checkpoint's config.json."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from medusa_heads.json_text import parse_json
from medusa_heads.suggest import unknown_keys_error

FORMAT_VERSION = 1
MOST = 1024  # heads, and blocks of one: far beyond any use, and before memory ends


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadsConfig:
    """The architecture of a set of draft heads and the base model they belong to.

    Head k (from 1) predicts the token k + 1 positions after the hidden state it reads: the base
    model itself predicts position 1.
    """

    architecture: str = "medusa"
    """Head family: a name registered in `medusa_heads.heads`."""
    num_heads: int = 4
    """K, the number of future positions proposed besides the base model's own next token."""
    num_layers: int = 1
    """Residual blocks per head."""
    hidden_size: int = 0
    """D, the width of the base model's last hidden state. 0 until attached."""
    vocab_size: int = 0
    """V, the number of logits of the base model. 0 until attached."""
    own_lm_head: bool = False
    """One trainable [V, D] output matrix per head instead of the base model's frozen lm_head."""
    base_model: str = ""
    """Name or path of the base model the heads were trained on."""
    base_revision: str | None = None
    """Revision of the base model on the hub, where it has one."""
    base_quantization: str = "none"
    """How its weights were packed when it was loaded: `8bit`, `4bit`, or `none`, as its files hold them."""
    base_fingerprint: str = ""
    """SHA-256 over config fields and sampled weight rows of the base model (see fingerprint.py)."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of one head family alone; unknown ones are refused by that family."""

    def __post_init__(self) -> None:
        if self.num_heads < 1:
            raise ValueError(f"num_heads is {self.num_heads}; heads predict at least one position: set num_heads to 1 or more")
        if self.num_layers < 1:
            raise ValueError(f"num_layers is {self.num_layers}; a head needs at least one block: set num_layers to 1 or more")
        for name in ("num_heads", "num_layers"):
            if getattr(self, name) > MOST:
                raise ValueError(f"{name} is {getattr(self, name)}; at most {MOST} are of use: set {name} lower")

    def to_json(self) -> str:
        return json.dumps({"format_version": FORMAT_VERSION, **dataclasses.asdict(self)}, indent=2) + "\n"

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> HeadsConfig:
        """Builds a config from JSON values. Raises ValueError on unknown keys or a newer format."""
        values = dict(values)
        version = values.pop("format_version", None)
        if version != FORMAT_VERSION:
            newer = isinstance(version, int) and version > FORMAT_VERSION
            raise ValueError(
                f"heads config has format_version {version!r}, this version of medusa-heads reads {FORMAT_VERSION}: "
                + ("upgrade medusa-heads" if newer else "is this a medusa-heads checkpoint? Exported formats are not read here")
            )
        names = [f.name for f in dataclasses.fields(cls)]
        if error := unknown_keys_error(values, names, where="heads config"):
            raise ValueError(error)
        defaults = cls()
        for name, value in values.items():
            default = getattr(defaults, name)
            kind = str if default is None else type(default)
            if type(value) is not kind and not (value is None and default is None):
                raise ValueError(
                    f"heads config: {name} is {value!r}, of the wrong type (expected {kind.__name__}): "
                    "the checkpoint is damaged, copy it again"
                )
        return cls(**values)

    @classmethod
    def from_file(cls, path: Path) -> HeadsConfig:
        try:
            values = parse_json(path.read_text())
        except FileNotFoundError:
            raise ValueError(f"no config.json in {path.parent}: --heads needs a folder written by medusa-heads") from None
        except OSError as error:
            raise ValueError(f"{path} cannot be read ({error.strerror}): copy the checkpoint again") from None
        except ValueError as error:
            raise ValueError(f"{path} is not valid JSON ({error}): the checkpoint is damaged, copy it again") from None
        if not isinstance(values, dict):
            raise ValueError(f"{path} holds no JSON object: the checkpoint is damaged, copy it again")
        try:
            return cls.from_dict(values)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
