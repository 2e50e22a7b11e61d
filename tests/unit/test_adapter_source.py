"""Where the adapter is found, what is fetched, and which noise range follows."""

import json

import huggingface_hub
import pytest

from vllm_uno import adapter_source
from vllm_uno.adapter_source import (
    AdapterMetadata,
    AdapterSource,
    fetch_adapter,
    find_adapter,
    noise_range,
    pin,
    read_metadata,
)

QWEN = "Qwen/Qwen3-8B"
UNO_QWEN = AdapterSource("s-sahoo/uno-qwen3-8B", "adapter")


def make_adapter(folder, **metadata):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_bytes(b"")
    if metadata:
        (folder / "uno_config.json").write_text(json.dumps(metadata))
    return folder


class Hub:
    """Stands in for huggingface_hub: `files` by repository, a log of what was asked."""

    def __init__(self, monkeypatch, cache):
        self.files, self.cached, self.asked, self.cache = {}, set(), [], cache
        self.down = False
        monkeypatch.setattr(huggingface_hub, "file_exists", self.file_exists)
        monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", self.from_cache)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", self.snapshot_download)
        self.set_offline(monkeypatch, False)

    @staticmethod
    def set_offline(monkeypatch, offline):
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", offline)

    def file_exists(self, repo, name, *, revision=None):
        self.asked.append((repo, name, revision))
        if self.down:
            raise ConnectionError("no network")
        return name in self.files.get(repo, ())

    def from_cache(self, repo, name, *, revision=None):
        return "/cached/file" if (repo, name) in self.cached else None

    def snapshot_download(self, repo, *, revision=None, allow_patterns=None):
        if repo not in self.files:
            raise OSError(f"404 {repo}")
        self.patterns = allow_patterns
        commit = revision or "c0ffee"
        folder = self.cache / f"models--{repo.replace('/', '--')}" / "snapshots" / commit
        for name in self.files[repo]:
            if name in allow_patterns:
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_text("{}")
        return str(folder)


@pytest.fixture
def hub(monkeypatch, tmp_path):
    return Hub(monkeypatch, tmp_path / "hub")


@pytest.fixture
def warnings(monkeypatch):
    """Messages that adapter_source logs as warnings."""
    found = []
    monkeypatch.setattr(
        adapter_source.logger, "warning", lambda text, *args: found.append(text % args)
    )
    return found


def adapter_files(top=""):
    return [top + name for name in ("adapter_config.json", "adapter_model.safetensors")]


# --- parsing -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("s-sahoo/uno-qwen3-8B:adapter", UNO_QWEN),
        ("IFM/K2-Horizon-7B-Uno", AdapterSource("IFM/K2-Horizon-7B-Uno")),
        ("/data/uno", AdapterSource("/data/uno")),
        ("/data/uno:a/b", AdapterSource("/data/uno", "a/b")),
        ("/data/uno:/a/b/", AdapterSource("/data/uno", "a/b")),
    ],
)
def test_parse_and_str(text, source):
    assert AdapterSource.parse(text) == source
    assert AdapterSource.parse(str(source)) == source


def test_parse_keeps_the_revision():
    assert AdapterSource.parse("a/b:c", "v1") == AdapterSource("a/b", "c", "v1")


def test_parse_a_folder_whose_name_has_a_colon(tmp_path):
    folder = tmp_path / "run:3"
    folder.mkdir()
    assert AdapterSource.parse(str(folder)) == AdapterSource(str(folder))
    assert AdapterSource.parse(f"{folder}:sub") == AdapterSource(str(folder), "sub")
    # Gone, it is read as a subfolder: the error of fetch_adapter then names both.
    assert AdapterSource.parse(str(tmp_path / "gone:3")) == AdapterSource(
        str(tmp_path / "gone"), "3"
    )


def test_parse_expands_the_home_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert AdapterSource.parse("~/uno:a") == AdapterSource(f"{tmp_path}/uno", "a")


@pytest.mark.parametrize("text", [":adapter", "repo/id:", ":", "repo/id:/"])
def test_parse_refuses_half_a_source(text):
    with pytest.raises(ValueError, match=r"^uno_lora_path=.* of the form 'path-or-hub-id:subf"):
        AdapterSource.parse(text)


# --- finding -----------------------------------------------------------------------------


def test_the_setting_comes_first(hub, tmp_path):
    make_adapter(tmp_path / "model" / "adapter")
    found = find_adapter(str(tmp_path / "model"), None, "my/adapter:x", "v2")
    assert found == AdapterSource("my/adapter", "x", "v2")
    assert not hub.asked


def test_a_folder_beside_a_local_model(hub, tmp_path):
    folder = make_adapter(tmp_path / "model" / "adapter")
    assert find_adapter(str(tmp_path / "model"), None, None, None) == AdapterSource(str(folder))
    assert not hub.asked


def test_a_folder_in_the_models_repository(hub):
    hub.files[QWEN] = adapter_files("adapter/")
    assert find_adapter(QWEN, "r1", None, None) == AdapterSource(QWEN, "adapter", "r1")
    assert hub.asked == [(QWEN, "adapter/adapter_config.json", "r1")]
    assert find_adapter(QWEN, "r1", None, "r2") == AdapterSource(QWEN, "adapter", "r2")


def test_a_cached_folder_needs_no_network(hub, monkeypatch):
    hub.cached.add((QWEN, "adapter/adapter_config.json"))
    hub.set_offline(monkeypatch, True)
    assert find_adapter(QWEN, None, None, None) == AdapterSource(QWEN, "adapter")
    assert not hub.asked


@pytest.mark.parametrize(
    ("model", "source"),
    [
        (QWEN, UNO_QWEN),
        ("qwen/qwen3-8b", UNO_QWEN),
        ("IFM/K2-Horizon-7B", AdapterSource("IFM/K2-Horizon-7B-Uno")),
        ("IFM/K2-Horizon-0.9B", AdapterSource("IFM/K2-Horizon-0.9B-Uno")),
    ],
)
def test_published_adapters(hub, model, source):
    assert find_adapter(model, None, None, None) == source


def test_no_network_is_not_fatal(hub):
    hub.down = True
    assert find_adapter(QWEN, None, None, None) == UNO_QWEN
    assert len(hub.asked) == 1


def test_offline_asks_nothing(hub, monkeypatch):
    hub.set_offline(monkeypatch, True)
    assert find_adapter(QWEN, None, None, None) == UNO_QWEN
    assert not hub.asked


def test_the_hubs_cache_folder_names_the_model(hub, tmp_path):
    # With HF_HUB_OFFLINE, vLLM replaces a hub id by its cached snapshot.
    snapshot = tmp_path / "hub" / "models--Qwen--Qwen3-8B" / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    assert find_adapter(str(snapshot), None, None, None) == UNO_QWEN


def test_nothing_found_says_where(hub, tmp_path):
    hub.down = True
    with pytest.raises(ValueError, match=r"^no UNO adapter found for model 'my/model'") as error:
        find_adapter("my/model", None, None, None)
    text = str(error.value)
    assert "Set uno_lora_path" in text
    assert "adapter/ in the repository my/model (could not be reached: ConnectionError)" in text
    assert "s-sahoo/uno-qwen3-8B" in text
    assert "IFM/K2-Horizon-7B-Uno" in text
    with pytest.raises(ValueError, match="no UNO adapter found") as error:
        find_adapter(str(tmp_path), None, None, None)
    assert f"{tmp_path}/adapter (no adapter_config.json there)" in str(error.value)


# --- fetching ----------------------------------------------------------------------------


def test_fetch_a_local_folder(tmp_path):
    folder = make_adapter(tmp_path / "x" / "y")
    assert fetch_adapter(AdapterSource(str(folder))) == folder
    assert fetch_adapter(AdapterSource(str(tmp_path / "x"), "y")) == folder


def test_fetch_makes_paths_absolute(tmp_path, monkeypatch):
    make_adapter(tmp_path / "x")
    monkeypatch.chdir(tmp_path)
    assert fetch_adapter(AdapterSource.parse("x")) == tmp_path / "x"


def test_fetch_looks_into_the_adapter_folder(tmp_path, hub):
    folder = make_adapter(tmp_path / "x" / "adapter")
    assert fetch_adapter(AdapterSource(str(tmp_path / "x"))) == folder
    hub.files["a/b"] = adapter_files("adapter/")
    assert fetch_adapter(AdapterSource("a/b")).parts[-2:] == ("c0ffee", "adapter")


def test_fetch_from_the_hub_takes_only_the_adapter(hub):
    hub.files[UNO_QWEN.location] = [
        "config.json",
        "model.safetensors",
        *adapter_files("adapter/"),
        "adapter/uno_config.json",
    ]
    folder = fetch_adapter(UNO_QWEN)
    snapshot = folder.parent
    assert sorted(p.name for p in folder.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
        "uno_config.json",
    ]
    assert [p.name for p in snapshot.iterdir()] == ["adapter"]


def test_fetch_errors(tmp_path, hub):
    def message(source):
        with pytest.raises(ValueError, match=r"^uno_lora_path='") as error:
            fetch_adapter(source)
        return str(error.value)

    gone = str(tmp_path / "gone")
    assert message(AdapterSource(gone)) == (
        f"uno_lora_path='{gone}': the folder {gone} does not exist."
    )
    assert "there is no folder 'sub' in it" in message(AdapterSource(str(tmp_path), "sub"))
    assert "has no adapter_config.json" in message(AdapterSource(str(tmp_path)))
    folder = make_adapter(tmp_path / "x")
    (folder / "adapter_model.safetensors").unlink()
    assert "has no adapter_model.safetensors" in message(AdapterSource(str(folder)))
    (folder / "adapter_model.bin").write_bytes(b"")
    text = message(AdapterSource(str(folder)))
    assert "has adapter_model.bin but no adapter_model.safetensors; convert it to saf" in text
    text = message(AdapterSource("no/such", None, "v9"))
    assert "(uno_lora_revision='v9'): neither a local folder nor a hub repository" in text
    assert "404 no/such" in text


def test_pin(hub, tmp_path):
    local = make_adapter(tmp_path / "x" / "adapter")
    source = AdapterSource(str(tmp_path / "x"))
    assert pin(source, fetch_adapter(source)) == AdapterSource(str(local))
    hub.files["a/b"] = adapter_files("deep/adapter/")
    for source in (AdapterSource("a/b", "deep"), AdapterSource("a/b", "deep/adapter")):
        pinned = pin(source, fetch_adapter(source))
        assert pinned == AdapterSource("a/b", "deep/adapter", "c0ffee")
        # What is pinned stays: it is what workers resolve again.
        assert pin(pinned, fetch_adapter(pinned)) == pinned
        assert AdapterSource.parse(str(pinned), pinned.revision) == pinned
    hub.files["a/top"] = adapter_files()
    source = AdapterSource("a/top")
    assert pin(source, fetch_adapter(source)) == AdapterSource("a/top", None, "c0ffee")


# --- metadata and noise ------------------------------------------------------------------


def test_metadata(tmp_path):
    assert read_metadata(tmp_path) == AdapterMetadata()
    folder = make_adapter(
        tmp_path,
        noise_low=3,
        mask_token_id=90,
        block_sizes=[2, 4],
        base_model="a/b",
        revision="r",
        other="kept out",
    )
    assert read_metadata(folder) == AdapterMetadata(3, 90, (2, 4), "a/b", "r")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[1]", "must hold a JSON object"),
        ('{"mask_token_id": "9"}', "mask_token_id must be of type int, got '9'"),
        ('{"noise_low": true}', "noise_low must be of type int, got True"),
        ('{"block_sizes": [2, "4"]}', "block_sizes must be a list of int"),
    ],
)
def test_broken_metadata(tmp_path, text, message):
    (tmp_path / "uno_config.json").write_text(text)
    with pytest.raises(ValueError, match=r"uno_config\.json") as error:
        read_metadata(tmp_path)
    assert message in str(error.value)


def test_noise_from_metadata_first(tmp_path, warnings):
    folder = make_adapter(tmp_path, noise_low=3, mask_token_id=90)
    assert noise_range(folder, QWEN, None, 1, 151936, UNO_QWEN) == (3, 90)
    assert noise_range(folder, QWEN, 90, 3, 151936) == (3, 90)
    assert not warnings
    assert noise_range(folder, QWEN, 91, 2, 151936) == (3, 90)
    assert len(warnings) == 2
    assert "uno_mask_token_id=91 contradicts" in warnings[0]
    assert "which says 90" in warnings[0]
    assert "uno_noise_low=2 contradicts" in warnings[1]


def test_noise_low_from_the_setting_where_metadata_has_none(tmp_path, warnings):
    folder = make_adapter(tmp_path, mask_token_id=90)
    assert noise_range(folder, "my/model", None, 5, 100) == (5, 90)
    assert not warnings


def test_noise_from_the_table(tmp_path, warnings):
    folder = make_adapter(tmp_path)
    assert noise_range(folder, QWEN, None, 1, 151936) == (1, 151669)
    assert noise_range(folder, QWEN, 151669, 1, 151936, UNO_QWEN) == (1, 151669)
    assert not warnings
    assert noise_range(folder, QWEN, 77, 1, 151936, UNO_QWEN) == (1, 151669)
    assert (
        "uno_mask_token_id=77 contradicts the published adapter, which says 151669" in (warnings[0])
    )


def test_noise_of_a_users_own_adapter_for_a_model_in_the_table(tmp_path, warnings):
    folder = make_adapter(tmp_path)
    own = AdapterSource(str(folder))
    assert noise_range(folder, QWEN, 77, 2, 151936, own) == (2, 77)
    assert not warnings


def test_noise_from_the_setting(tmp_path):
    folder = make_adapter(tmp_path)
    assert noise_range(folder, "IFM/K2-Horizon-7B", 77, 1, 100) == (1, 77)


def test_no_noise_range(tmp_path):
    folder = make_adapter(tmp_path)
    with pytest.raises(ValueError, match="Set uno_mask_token_id in the speculative config"):
        noise_range(folder, "IFM/K2-Horizon-7B", None, 1, 100)


@pytest.mark.parametrize(("low", "high"), [(-1, 50), (50, 50), (60, 50), (1, 101)])
def test_noise_range_outside_the_vocabulary(tmp_path, low, high):
    folder = make_adapter(tmp_path)
    with pytest.raises(ValueError, match="must lie within the vocabulary") as error:
        noise_range(folder, "my/model", high, low, 100)
    assert f"[{low}, {high}) (from uno_mask_token_id)" in str(error.value)
    assert "Set uno_noise_low and uno_mask_token_id" in str(error.value)
    assert noise_range(folder, "my/model", 100, 0, 100) == (0, 100)


def test_messages_reach_vllms_log():
    # vLLM configures its own logger only; a message beside it would be lost.
    assert adapter_source.logger.name.startswith("vllm.")
