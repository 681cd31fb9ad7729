"""A Job downloads what learner and workers load, and says what is wrong with a name."""

from __future__ import annotations

import pytest

from vcpo.api.workloads import Model
from vcpo.service.lifecycle import StartError
from vcpo.service.model_download import download
from vcpo.service.model_files import CACHE_VARIABLE, local_model


def test_a_worker_finds_what_the_job_downloaded_without_writing(tmp_path, monkeypatch):
    pytest.importorskip("fsspec")
    import fsspec

    files = fsspec.filesystem("memory")
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        files.pipe(f"/org-model/{name}", b"{}")
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    url = "memory://org-model"
    folder = download(Model(name=url))
    before = sorted(tmp_path.iterdir())
    assert local_model(url) == folder
    assert local_model(url, with_weights=False) != folder
    assert sorted(tmp_path.iterdir()) == before


def test_a_model_that_the_hub_does_not_give_is_named_with_the_cure(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(StartError, match=r"spec\.model\.name: 'not a name' cannot be downloaded"):
        download(Model(name="not a name"))
