"""The real clients of both hubs against the hubs that the other tests use in their place."""

import importlib
import json
import urllib.request

import pytest
from support.hubs import huggingface, modelscope
from support.hubs.hub import Fault

from rotationzoo.zoo.hubs.registry import open_hub

NAME = "org/zoo"
TENSORS = b"\x00tensors" * 50_000
CARD = json.dumps({"rotations": 3}).encode()


@pytest.fixture
def hub():
    with huggingface.serve() as hub:
        yield hub


@pytest.fixture
def api(hub, monkeypatch):
    """The client, which read its settings long ago, when it was imported."""
    client = importlib.import_module("huggingface_hub")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    # With it on, the client asks the real hub for a list of agents, whatever its endpoint is here.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_TELEMETRY", True)
    return client.HfApi(endpoint=hub.endpoint, token=hub.token)


def add(api, files=None, **options):
    from huggingface_hub import CommitOperationAdd

    files = files or {"zoo/meta.json": CARD, "zoo/rotations.safetensors": TENSORS}
    operations = [CommitOperationAdd(path, data) for path, data in files.items()]
    return api.create_commit(NAME, operations, commit_message="Add rotations", **options)


def test_huggingface_round_trip(hub, api, tmp_path):
    api.create_repo(NAME)
    api.create_repo(NAME, exist_ok=True)
    first = add(api, parent_commit=hub.head(NAME)).oid
    assert first == hub.head(NAME)
    assert hub.commits(NAME) == 2
    assert hub.files(NAME)["zoo/rotations.safetensors"] == TENSORS
    assert add(api).oid == first  # nothing changed
    assert hub.commits(NAME) == 2

    api.create_tag(NAME, tag="v1", revision=first)
    later = hub.commit(NAME, {"zoo/new.json": b"{}"}, delete=["zoo/meta.json"])
    assert api.model_info(NAME, expand=["sha"]).sha == later
    refs = api.list_repo_refs(NAME)
    assert (refs.tags[0].name, refs.tags[0].target_commit) == ("v1", first)
    folder = tmp_path / "copy"
    api.snapshot_download(NAME, revision="v1", cache_dir=tmp_path / "cache", local_dir=folder)
    for path, data in hub.files(NAME, "v1").items():
        assert (folder / path).read_bytes() == data
    assert any("localhost" not in request and "/storage/" in request for request in hub.requests)
    assert not hub.leaks


def test_huggingface_knows_its_files(hub, api):
    hub.create(NAME)
    hub.commit(
        NAME,
        {f"many/{number}.json": b"{}" for number in range(1100)} | {"big.safetensors": TENSORS},
    )
    files = {entry.path: entry for entry in api.list_repo_tree(NAME, recursive=True)}
    assert len(files) == 1103  # over two pages, with .gitattributes and the folder
    siblings = {
        sibling.rfilename: sibling for sibling in api.model_info(NAME, files_metadata=True).siblings
    }
    assert siblings["big.safetensors"].lfs.sha256 == files["big.safetensors"].lfs.sha256
    assert siblings["many/7.json"].blob_id == files["many/7.json"].blob_id
    hub.hidden.add("big.safetensors")
    assert "big.safetensors" not in api.list_repo_files(NAME)
    assert api.file_exists(NAME, "big.safetensors")


def test_huggingface_pull_request(hub, api, tmp_path):
    from huggingface_hub.errors import HfHubHTTPError

    hub.create(NAME)
    start = hub.head(NAME)
    pull = add(api, create_pr=True)
    assert (pull.pr_num, hub.head(NAME)) == (1, start)
    path = api.hf_hub_download(NAME, "zoo/meta.json", revision=pull.pr_revision, cache_dir=tmp_path)
    with open(path, "rb") as file:
        assert file.read() == CARD
    assert [found.title for found in api.get_repo_discussions(NAME, discussion_status="open")] == [
        "Add rotations"
    ]
    hub.commit(NAME, {"other.json": b"{}"})
    api.merge_pull_request(NAME, 1)
    assert hub.files(NAME) == {**hub.files(NAME, "refs/pr/1"), "other.json": b"{}"}
    assert not list(api.get_repo_discussions(NAME, discussion_status="open"))
    with pytest.raises(HfHubHTTPError) as caught:
        add(api, {"late.json": b"{}"}, parent_commit=start)
    assert caught.value.response.status_code == 412


def test_huggingface_faults(hub, api, tmp_path):
    from huggingface_hub.errors import (
        EntryNotFoundError,
        HfHubHTTPError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    hub.create(NAME)
    hub.commit(NAME, {"zoo/rotations.safetensors": TENSORS})

    def fetch(name="zoo/rotations.safetensors", **options):
        with open(
            api.hf_hub_download(NAME, name, cache_dir=tmp_path, force_download=True, **options),
            "rb",
        ) as file:
            return file.read()

    hub.faults.append(Fault("GET", "safetensors", 503))
    with pytest.raises(HfHubHTTPError) as caught:
        fetch()
    assert caught.value.response.status_code == 503
    hub.faults.append(Fault("GET", "rotations", "flip"))
    spoilt = fetch()
    assert (len(spoilt), sum(one != other for one, other in zip(spoilt, TENSORS, strict=True))) == (
        len(TENSORS),
        1,
    )
    for what in ("cut", "drop", 429):  # the client gets over these
        hub.faults.append(Fault("GET", "/storage/", what))
        assert fetch() == TENSORS
    assert not any(fault.count for fault in hub.faults)
    hub.faults.append(Fault("POST", "/commit/", "lost"))
    with pytest.raises(Exception, match="disconnected"):
        add(api)
    assert hub.commits(NAME) == 3

    with pytest.raises(EntryNotFoundError):
        fetch("nothing.json")
    with pytest.raises(RevisionNotFoundError):
        fetch(revision="nowhere")
    with pytest.raises(HfHubHTTPError, match="401"):
        api.model_info(NAME, token="hf_wrong")
    hub.private = True
    with pytest.raises(RepositoryNotFoundError):
        api.model_info(NAME, token=False)
    hub.remove(NAME)
    with pytest.raises(RepositoryNotFoundError):
        api.model_info(NAME)
    assert not hub.leaks


def test_huggingface_data_set(hub, api):
    from huggingface_hub import HfFileSystem

    hub.create(f"datasets/{NAME}")
    hub.commit(
        f"datasets/{NAME}", {"data/train.jsonl": b'{"text": "one"}\n', "data/big.parquet": TENSORS}
    )
    assert api.dataset_info(NAME).sha == hub.head(f"datasets/{NAME}")
    files = HfFileSystem(endpoint=hub.endpoint, token=hub.token, skip_instance_cache=True)
    assert sorted(files.glob(f"datasets/{NAME}/**/*.*l*")) == [f"datasets/{NAME}/data/train.jsonl"]
    assert files.cat(f"datasets/{NAME}/data/big.parquet") == TENSORS
    assert not hub.leaks


def test_leaks_are_noticed(hub):
    request = urllib.request.Request(
        hub.endpoint.replace("127.0.0.1", "localhost") + "/api/whoami-v2"
    )
    request.add_header("Authorization", f"Bearer {hub.token}")
    with urllib.request.urlopen(request, timeout=10) as answer:
        assert json.load(answer)["name"] == "tester"
    assert hub.leaks == ["GET /api/whoami-v2"]


def test_modelscope_round_trip(tmp_path):
    # The client reads its settings when it is imported. Without those of the product, it would
    # repeat failed requests for a minute in every later test of this process.
    open_hub("modelscope")
    client = pytest.importorskip("modelscope_hub")
    errors = importlib.import_module("modelscope_hub.errors")
    source = tmp_path / "source"
    (source / "zoo").mkdir(parents=True)
    (source / "zoo" / "meta.json").write_bytes(CARD)
    (source / "zoo" / "rotations.safetensors").write_bytes(TENSORS)
    with modelscope.serve() as hub:
        folders = dict(cache_dir=tmp_path / "cache", config_dir=tmp_path / "config")
        api = client.HubApi(
            config=client.HubConfig(endpoint=hub.endpoint, token=hub.token, **folders)
        )
        api.create_repo(NAME, "model", visibility="public")
        with pytest.raises(errors.AlreadyExistsError):
            api.create_repo(NAME, "model", visibility="public")
        api.upload_folder(
            NAME,
            "model",
            source,
            commit_message="Add rotations",
            use_cache=False,
            disable_tqdm=True,
        )
        assert hub.files(NAME)["zoo/rotations.safetensors"] == TENSORS
        assert hub.commits(NAME) == 2
        assert {entry.path for entry in api.list_repo_files(NAME, "model")} >= set(hub.files(NAME))
        api.create_repo_tag(NAME, "model", "v1", revision="master")
        hub.commit(NAME, {"zoo/meta.json": b"{}"})

        hub.faults += [Fault("GET", "safetensors", "flip"), Fault("GET", "meta.json", 503)]
        copy = tmp_path / "copy"
        api.download_repo(NAME, "model", revision="v1", local_dir=copy)
        for path, data in hub.files(NAME, "v1").items():
            assert (copy / path).read_bytes() == data
        assert not any(fault.count for fault in hub.faults)
        assert not hub.leaks

        wrong = client.HubApi(
            config=client.HubConfig(endpoint=hub.endpoint, token="ms_wrong", **folders)
        )
        with pytest.raises(errors.AuthenticationError):
            wrong.create_repo("org/other", "model")
