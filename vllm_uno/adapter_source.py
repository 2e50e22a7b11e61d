"""Where the UNO adapter is, and which noise it was trained on.

Metadata of an adapter (`uno_config.json` in the adapter folder, written by our trainer;
every key may be missing):

    {
      "noise_low": 1,              lowest noise id
      "mask_token_id": 151669,     noise ids are drawn from [noise_low, mask_token_id)
      "block_sizes": [2, 4, 8],    block sizes trained with
      "base_model": "Qwen/Qwen3-8B",
      "revision": "..."            revision of the base model
    }
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from pathlib import Path
from typing import Any

# Below vLLM's logger, which has the handlers. vLLM is not imported: the trainer reads this too.
logger = logging.getLogger("vllm.uno")

METADATA_FILE = "uno_config.json"
CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
ADAPTER_FOLDER = "adapter"


@dataclasses.dataclass(frozen=True)
class AdapterSource:
    """A folder, or a folder of a hub repository.

    Attributes:
        location: local path or hub id.
        subfolder: folder below it, None for the top.
        revision: branch, tag or commit of a hub repository; None is the default branch.

    """

    location: str
    subfolder: str | None = None
    revision: str | None = None

    @classmethod
    def parse(cls, text: str, revision: str | None = None) -> AdapterSource:
        """Read "path-or-hub-id[:subfolder]"; an existing path may itself contain ':'.

        Raises:
            ValueError: nothing before or after the ':'.

        """
        path = os.path.expanduser(text)
        # Windows drive letters need no care: vLLM does not run there.
        if ":" not in text or os.path.isdir(path):
            location, subfolder = path, None
        else:
            location, _, subfolder = path.rpartition(":")
            subfolder = subfolder.strip("/")
            if not location or not subfolder:
                raise ValueError(
                    f"uno_lora_path={text!r} is neither a folder that exists nor of the form "
                    f"'path-or-hub-id:subfolder'."
                )
        return cls(location, subfolder, revision)

    @property
    def is_local(self) -> bool:
        """Whether `location` is a folder of this machine or was meant as one."""
        return os.path.isdir(self.location) or self.location.startswith(("/", "."))

    def __str__(self) -> str:
        return f"{self.location}:{self.subfolder}" if self.subfolder else self.location


@dataclasses.dataclass(frozen=True)
class Published:
    """A published adapter: where it is and, if known, the end of its noise range."""

    source: AdapterSource
    mask_token_id: int | None = None
    noise_low: int = 1


# By base model, in lower case. The repository of the first one has a config.json of another
# architecture at its root, which is why nothing but its adapter folder is ever read.
PUBLISHED = {
    "qwen/qwen3-8b": Published(AdapterSource("s-sahoo/uno-qwen3-8B", "adapter"), 151669),
    "ifm/k2-horizon-7b": Published(AdapterSource("IFM/K2-Horizon-7B-Uno")),
    "ifm/k2-horizon-0.9b": Published(AdapterSource("IFM/K2-Horizon-0.9B-Uno")),
}


@dataclasses.dataclass(frozen=True)
class AdapterMetadata:
    """Contents of `uno_config.json`; what it does not say is None or empty."""

    noise_low: int | None = None
    mask_token_id: int | None = None
    block_sizes: tuple[int, ...] = ()
    base_model: str | None = None
    revision: str | None = None


def find_adapter(
    model: str,
    model_revision: str | None,
    uno_lora_path: str | None,
    uno_lora_revision: str | None,
) -> AdapterSource:
    """Find the adapter of `model` (a local folder or hub id).

    Order: `uno_lora_path`; an `adapter/` folder in the model's own folder or repository; the
    table of published adapters. A hub that cannot be reached is not an error here: the
    search goes on.

    Raises:
        ValueError: nothing found; names `uno_lora_path` and the places looked at.

    """
    if uno_lora_path is not None:
        return AdapterSource.parse(uno_lora_path, uno_lora_revision)
    looked = []
    if os.path.isdir(model):
        folder = Path(model, ADAPTER_FOLDER)
        if (folder / CONFIG_FILE).is_file():
            return AdapterSource(str(folder.absolute()))
        looked.append(f"{folder} (no {CONFIG_FILE} there)")
    else:
        found, place = _has_adapter_folder(model, uno_lora_revision or model_revision)
        if found:
            return AdapterSource(model, ADAPTER_FOLDER, uno_lora_revision or model_revision)
        looked.append(place)
    published = _published(model)
    if published is not None:
        return dataclasses.replace(published.source, revision=uno_lora_revision)
    known = ", ".join(sorted(entry.source.location for entry in PUBLISHED.values()))
    looked.append(f"the published adapters ({known}), of which none is for this model")
    raise ValueError(
        f"no UNO adapter found for model {model!r}. Set uno_lora_path in the speculative "
        f"config to a local folder or hub id. Looked at: {'; '.join(looked)}."
    )


def fetch_adapter(source: AdapterSource) -> Path:
    """Return the local folder of an adapter, downloading it from the hub if need be.

    Where the named folder has no adapter_config.json but an `adapter/` folder below it does,
    that one is meant.

    Raises:
        ValueError: names `uno_lora_path` and what is missing.

    """
    hint = f"uno_lora_path={str(source)!r}"
    if source.is_local:
        root = Path(source.location)
        if not root.is_dir():
            raise ValueError(f"{hint}: the folder {root} does not exist.")
    else:
        root = _download(source, hint)
    folder = root / source.subfolder if source.subfolder else root
    if not folder.is_dir():
        raise ValueError(f"{hint}: there is no folder {source.subfolder!r} in it.")
    nested = folder / ADAPTER_FOLDER
    if not (folder / CONFIG_FILE).is_file() and (nested / CONFIG_FILE).is_file():
        folder = nested
    if not (folder / CONFIG_FILE).is_file():
        raise ValueError(
            f"{hint}: {folder} has no {CONFIG_FILE}; it must be the folder of a PEFT LoRA "
            f"adapter (with {CONFIG_FILE} and {WEIGHTS_FILE})."
        )
    if not (folder / WEIGHTS_FILE).is_file():
        pickled = sorted(p.name for p in folder.glob("adapter_model.*"))
        if pickled:
            raise ValueError(
                f"{hint}: {folder} has {', '.join(pickled)} but no {WEIGHTS_FILE}; convert it "
                f"to safetensors (PEFT's save_pretrained(..., safe_serialization=True))."
            )
        raise ValueError(f"{hint}: {folder} has no {WEIGHTS_FILE}.")
    return folder.absolute()


def pin(source: AdapterSource, folder: Path) -> AdapterSource:
    """Return the source that every process will resolve to the same adapter.

    Args:
        source: where the adapter was found.
        folder: what `fetch_adapter(source)` returned.

    Returns:
        The absolute path of a local adapter, or the hub id with the folder and commit found.

    """
    if source.is_local:
        return AdapterSource(str(folder))
    # The hub's cache lays a repository's files out as snapshots/<commit>/<path>.
    parts = folder.parts
    if "snapshots" in parts:
        at = len(parts) - 1 - parts[::-1].index("snapshots")
        commit, below = parts[at + 1], "/".join(parts[at + 2 :])
        return AdapterSource(source.location, below or None, commit)
    return source


def read_metadata(folder: Path) -> AdapterMetadata:
    """Read `uno_config.json` of an adapter folder; all None if there is none.

    Raises:
        ValueError: the file is no JSON object, or a value has the wrong type.

    """
    path = folder / METADATA_FILE
    if not path.is_file():
        return AdapterMetadata()
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} (metadata of the UNO adapter) is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} (metadata of the UNO adapter) must hold a JSON object.")

    def get(name: str, kind: type) -> Any:
        value = values.get(name)
        if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
            raise ValueError(f"{path}: {name} must be of type {kind.__name__}, got {value!r}.")
        return value

    block_sizes = get("block_sizes", list) or []
    if not all(isinstance(size, int) and not isinstance(size, bool) for size in block_sizes):
        raise ValueError(f"{path}: block_sizes must be a list of int, got {block_sizes!r}.")
    return AdapterMetadata(
        noise_low=get("noise_low", int),
        mask_token_id=get("mask_token_id", int),
        block_sizes=tuple(block_sizes),
        base_model=get("base_model", str),
        revision=get("revision", str),
    )


def noise_range(
    folder: Path,
    model: str,
    mask_token_id: int | None,
    noise_low: int,
    vocab_size: int,
    source: AdapterSource | None = None,
) -> tuple[int, int]:
    """Return the half-open range [low, high) of noise ids that the adapter was trained on.

    Order: the adapter's own metadata; the table of published adapters; the settings. An
    adapter of the user's own (`source` is not the published one) is not in the table, so
    there the setting comes before it.

    Args:
        folder: local adapter folder.
        model: the base model, a local folder or hub id.
        mask_token_id: setting `uno_mask_token_id`, None where not set.
        noise_low: setting `uno_noise_low`, 1 where not set.
        vocab_size: number of token ids of the model.
        source: where the adapter was found, if known.

    Raises:
        ValueError: nothing says where the range ends (names `uno_mask_token_id`), or not
            0 <= low < high <= vocab_size.

    """
    metadata = read_metadata(folder)
    published = _published(model)
    low: int | None
    if metadata.mask_token_id is not None:
        low, high, origin = (
            metadata.noise_low,
            metadata.mask_token_id,
            f"{folder / METADATA_FILE}",
        )
    elif (
        published is not None
        and published.mask_token_id is not None
        and (mask_token_id is None or _same_place(source, published.source))
    ):
        low, high, origin = (
            published.noise_low,
            published.mask_token_id,
            "the published adapter",
        )
    elif mask_token_id is not None:
        low, high, origin = metadata.noise_low, mask_token_id, "uno_mask_token_id"
    else:
        raise ValueError(
            f"nothing says which noise the UNO adapter in {folder} was trained on: it has no "
            f"{METADATA_FILE} with a mask_token_id and is not in the table of published "
            f"adapters. Set uno_mask_token_id in the speculative config (noise ids are drawn "
            f"from [uno_noise_low, uno_mask_token_id))."
        )
    if low is None:
        low = noise_low
    for name, setting, used in (
        ("uno_mask_token_id", mask_token_id, high),
        # The default of uno_noise_low cannot be told from a user's 1.
        ("uno_noise_low", None if noise_low == 1 else noise_low, low),
    ):
        if setting is not None and setting != used:
            logger.warning(
                "%s=%d contradicts %s, which says %d: the latter is used.",
                name,
                setting,
                origin,
                used,
            )
    if not 0 <= low < high <= vocab_size:
        raise ValueError(
            f"the noise range [{low}, {high}) (from {origin}) must lie within the vocabulary "
            f"[0, {vocab_size}) and not be empty. Set uno_noise_low and uno_mask_token_id to "
            f"the range that the adapter was trained on."
        )
    return low, high


def _base_model_id(model: str) -> str:
    """Hub id of a model; a folder of the hub's cache (offline mode) names it in its path."""
    if os.path.isdir(model):
        for part in Path(model).absolute().parts:
            if part.startswith("models--"):
                return part.removeprefix("models--").replace("--", "/")
    return model


def _published(model: str) -> Published | None:
    return PUBLISHED.get(_base_model_id(model).lower())


def _same_place(one: AdapterSource | None, other: AdapterSource) -> bool:
    return one is not None and one.location.lower() == other.location.lower()


def _has_adapter_folder(repo: str, revision: str | None) -> tuple[bool, str]:
    """Whether a hub repository has `adapter/adapter_config.json`, and where was looked."""
    import huggingface_hub

    name = f"{ADAPTER_FOLDER}/{CONFIG_FILE}"
    place = f"{ADAPTER_FOLDER}/ in the repository {repo}"
    try:
        if isinstance(huggingface_hub.try_to_load_from_cache(repo, name, revision=revision), str):
            return True, place
        if huggingface_hub.constants.HF_HUB_OFFLINE:
            return False, f"{place} (its cached files only: HF_HUB_OFFLINE is set)"
        return huggingface_hub.file_exists(repo, name, revision=revision), place
    except Exception as error:  # whatever the hub says, the search goes on
        logger.info("Could not look for %s in %s: %s", name, repo, error)
        return False, f"{place} (could not be reached: {type(error).__name__})"


def _download(source: AdapterSource, hint: str) -> Path:
    """Local snapshot of a hub repository, of which only the adapter's files are fetched."""
    import huggingface_hub

    top = f"{source.subfolder}/" if source.subfolder else ""
    files = (CONFIG_FILE, WEIGHTS_FILE, METADATA_FILE)
    folders = (top, f"{top}{ADAPTER_FOLDER}/")
    try:
        return Path(
            huggingface_hub.snapshot_download(
                source.location,
                revision=source.revision,
                allow_patterns=[folder + file for folder in folders for file in files],
            )
        )
    except Exception as error:
        at = f" (uno_lora_revision={source.revision!r})" if source.revision else ""
        raise ValueError(
            f"{hint}{at}: neither a local folder nor a hub repository that can be fetched: {error}"
        ) from error
