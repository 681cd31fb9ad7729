"""Volumes of the fake kubelet."""

import base64

import pytest

from tests.fakes.kubelet.environment import MissingReferenceError, Relocation, UnsupportedPodError
from tests.fakes.kubelet.volumes import PodPaths, make_volumes, mount_points, volume_references


def pod(*volumes, mounts=()):
    container = {"name": "main", "volumeMounts": list(mounts)}
    return {"spec": {"volumes": list(volumes), "containers": [container]}}


CONFIG = {"name": "config", "configMap": {"name": "demo-config"}}
CLAIM = {"name": "run", "persistentVolumeClaim": {"claimName": "demo-learner"}}
NOWHERE = Relocation({}, "127.70.0.1")


@pytest.fixture
def paths(tmp_path):
    return PodPaths(root=tmp_path, namespace="team", pod="demo-0", uid="u1")


def test_a_config_map_becomes_files(paths):
    objects = {("configmaps", "demo-config"): {"data": {"run.yaml": "steps: 3"}}}
    make_volumes(pod(CONFIG), paths, objects, NOWHERE)
    assert (paths.directory / "config/run.yaml").read_text() == "steps: 3"


def test_paths_in_a_text_file_are_those_of_this_machine(paths):
    objects = {("configmaps", "demo-config"): {"data": {"run.yaml": "model: /models/tiny"}}}
    make_volumes(pod(CONFIG), paths, objects, Relocation({"/models": "/here"}, "127.70.0.1"))
    assert (paths.directory / "config/run.yaml").read_text() == "model: /here/tiny"


def test_binary_content_is_left_alone(paths):
    content = b"\xff/models/tiny"
    binary = {"weights": base64.b64encode(content).decode()}
    objects = {("configmaps", "demo-config"): {"binaryData": binary}}
    make_volumes(pod(CONFIG), paths, objects, Relocation({"/models": "/here"}, "127.70.0.1"))
    assert (paths.directory / "config/weights").read_bytes() == content


def test_a_secret_is_decoded(paths):
    objects = {("secrets", "shared"): {"data": {"token": "aGk="}}}
    make_volumes(pod({"name": "s", "secret": {"secretName": "shared"}}), paths, objects, NOWHERE)
    assert (paths.directory / "s/token").read_text() == "hi"


def test_a_missing_key_is_named(paths):
    volume = {"name": "c", "configMap": {"name": "x", "items": [{"key": "a", "path": "b"}]}}
    with pytest.raises(MissingReferenceError, match="a"):
        make_volumes(pod(volume), paths, {("configmaps", "x"): {"data": {}}}, NOWHERE)


def test_a_claim_outlives_its_pod(paths):
    mounts = [{"name": "run", "mountPath": "/var/lib/vcpo", "subPath": "uid"}]
    make_volumes(pod(CLAIM, mounts=mounts), paths, {}, NOWHERE)
    paths.forget()
    assert (paths.root / "claims/team/demo-learner/uid").is_dir()


def test_a_scratch_volume_goes_with_its_pod(paths):
    make_volumes(pod({"name": "scratch", "emptyDir": {}}), paths, {}, NOWHERE)
    paths.forget()
    assert not paths.directory.exists()


def test_a_mount_without_its_volume_is_refused(paths):
    mounted = pod(mounts=[{"name": "gone", "mountPath": "/x"}])
    with pytest.raises(UnsupportedPodError, match="gone"):
        mount_points(mounted, mounted["spec"]["containers"][0], paths)


def test_a_volume_of_the_host_is_refused(paths):
    with pytest.raises(UnsupportedPodError, match="host"):
        make_volumes(pod({"name": "host", "hostPath": {"path": "/"}}), paths, {}, NOWHERE)


def test_volumes_name_the_objects_that_they_hold():
    assert volume_references(pod(CONFIG, CLAIM)) == [("configmaps", "demo-config")]
