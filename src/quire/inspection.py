"""Inspects a model before it is loaded: what it needs and what fits. Reads only headers, and all bytes for a digest."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import Any

from quire.config import EngineConfig
from quire.engine.build import ops_type, resolve
from quire.engine.calibration import Calibration
from quire.engine.footprint import Footprint, footprint
from quire.engine.sizes import EngineSizes
from quire.errors import QuireError
from quire.folders import user_path
from quire.load import find_calibration
from quire.models.digest import Digest, Report, digest_of
from quire.models.image_folder import ImageError, image_path, open_image
from quire.models.images import engine_image_spec
from quire.models.layers import torch_dtype
from quire.models.loading import TensorGroup, group_tensors
from quire.models.resolve import resolve_model
from quire.models.shape import ModelShape
from quire.models.weights import Checkpoint, open_model
from quire.stores.opening import check_disk
from quire.stores.sizing import disk_bytes_per_token, measure_disk, tokens_that_fit

EXAMPLE_BYTES = 20 << 30
"""Assumed size of the folder if tiers.disk does not give one."""


@dataclass(frozen=True)
class ModelInspection:
    """A model with settings.

    given    the settings of the user
    config   the same with automatic values resolved
    weights  the tensors grouped by type
    image    the file of packed layers: path, bytes, and whether it is written. None if none is used
    digest   None if it was not asked for
    """

    shape: ModelShape
    given: EngineConfig
    config: EngineConfig
    sizes: EngineSizes
    calibration: Calibration | None
    weights: list[TensorGroup]
    image: dict[str, Any] | None
    digest: Digest | None

    @classmethod
    def of(
        cls, model: str, given: EngineConfig, hashing: AbstractContextManager[Report] | None = None
    ) -> ModelInspection:
        """Reads the model's headers, and all of it for its digest. Raises ConfigError and ModelError.

        hashing  yields what is called with the bytes hashed so far, and all; None: no digest
        """
        path = resolve_model(model)
        with open_model(path) as checkpoint:
            calibration = find_calibration(path, given)
            config, sizes = resolve(given, checkpoint.shape, checkpoint, calibration)
            kinds = ops_type(config.attention.backend).kinds
            weights = group_tensors(checkpoint, torch_dtype(config.model.dtype), config.model.weights, kinds)
            image = _image(checkpoint, config)
            digest = None
            if hashing is not None:
                with hashing as report:
                    digest = digest_of(checkpoint, report)
            return cls(checkpoint.shape, given, config, sizes, calibration, weights, image, digest)

    def sequences(self, length: int) -> int:
        """Number of sequences of a length that fit at once."""
        return self.sizes.sequences(length) if length <= self.sizes.max_context else 0

    def footprint(self) -> Footprint:
        """The memory of a whole process."""
        return footprint(self.shape, self.config, self.sizes)

    def to_json(self, lengths: Sequence[int]) -> dict[str, Any]:
        """All numbers. lengths: those of which it says how many sequences fit."""
        config = self.config
        return {
            **asdict(self.sizes),
            "weights": [asdict(part) for part in self.weights],
            "image": self.image,
            "digest": None if self.digest is None else asdict(self.digest),
            "architecture": self.shape.architecture,
            "num_parameters": self.shape.num_parameters,
            "dtype": config.model.dtype,
            "calibration": None if self.calibration is None else self.calibration.hash,
            "device": config.runtime.device,
            "tokens": self.sizes.tokens,
            "process_bytes": self.footprint().total,
            "sequences": {length: self.sequences(length) for length in lengths},
            "retain": {"threshold": config.retain.threshold, "budget": config.retain.budget},
            "fails_first": self.sizes.fails_first,
        }

    def disk(self) -> dict[str, Any]:
        """The capacity of the folder of tiers.disk, and its measured speed if the folder is given. Raises QuireError if
        the folder cannot be written, or if an engine would refuse it.
        """
        shape, sizes, tiers = self.shape, self.sizes, self.config.tiers
        cap = EXAMPLE_BYTES if tiers.disk is None else tiers.disk_bytes
        per_token = disk_bytes_per_token(sizes.chunk_bytes, shape.num_layers, shape.num_kv_heads)
        speed, is_limited, folder = None, False, None
        if tiers.disk is not None:
            folder = user_path(tiers.disk_folder)
            try:
                check_disk(tiers)
                speed = measure_disk(folder)
            except OSError as error:
                raise QuireError(f"tiers.disk: {folder} cannot be measured ({error.strerror or error})") from error
            is_limited = tiers.disk_bandwidth is not None and tiers.disk_bandwidth < speed
            speed = float(tiers.disk_bandwidth or speed) if is_limited else speed
        return {
            "codec": self.config.cache.codec,
            "bytes_per_token": sizes.bytes_per_token,
            "disk_bytes_per_token": per_token,
            "folder": None if folder is None else str(folder),
            "capacity_bytes": cap,
            "tokens": tokens_that_fit(cap, per_token),
            "bytes_per_second": speed,
            "is_limited": is_limited,
            "break_even_tokens_per_second": None if speed is None else speed / per_token,
        }


def _image(checkpoint: Checkpoint, config: EngineConfig) -> dict[str, Any] | None:
    """The layer image of this configuration: path, bytes, and whether it is written. None if it uses none."""
    wanted = engine_image_spec(checkpoint, config)
    if wanted is None:
        return None
    try:
        found = open_image(wanted.origin)
    except FileNotFoundError:
        return {"path": str(image_path(wanted.origin)), "num_bytes": wanted.num_bytes, "written": False}
    except ImageError:
        return {"path": None, "num_bytes": wanted.num_bytes, "written": False}
    return {"path": str(found.path), "num_bytes": found.num_bytes, "written": True}
