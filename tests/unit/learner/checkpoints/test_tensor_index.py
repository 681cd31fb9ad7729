"""The index of a checkpoint's tensors: what is written is read, and nothing else is."""

import io
import json
import os
import pickle
import zipfile

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
)
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from tests.fixtures.learner.checkpoints import weight_of, write_tensor_files
from vcpo.api.optimizer import Optimizer
from vcpo_learner.checkpoints import tensor_files
from vcpo_learner.checkpoints.manifest import DamageError
from vcpo_learner.checkpoints.tensor_files import TensorFiles, read_parameters
from vcpo_learner.checkpoints.tensor_index import read_index
from vcpo_learner.optimizer.policy_optimizer import PolicyOptimizer

NAME = "parameters.weight"


@pytest.fixture
def folder(tmp_path):
    """Files of one parameter of 3 x 2 numbers."""
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(torch.arange(6.0).view(3, 2))
    return write_tensor_files(tmp_path / "tensors", model)


def document_of(folder):
    return json.loads((folder / ".metadata").read_text())


def write_index(folder, document):
    (folder / ".metadata").write_text(json.dumps(document))


def test_an_index_says_which_bytes_are_which_rows(folder):
    (part,) = document_of(folder)["tensors"][NAME]["parts"]
    assert document_of(folder)["tensors"][NAME]["size"] == [3, 2]
    assert (part["file"], part["first_row"], part["num_rows"]) == ("__0_0.distcp", 0, 3)
    data = (folder / part["file"]).read_bytes()[part["begin"] :][: part["length"]]
    found = torch.load(io.BytesIO(data), weights_only=True)
    assert torch.equal(found, torch.arange(6.0).view(3, 2))


def test_rows_in_several_parts_are_read(folder):
    """The part is given twice, as rows 0 to 2 and, from another file, as rows 3 to 5."""
    document = document_of(folder)
    (part,) = document["tensors"][NAME]["parts"]
    (folder / "__1_0.distcp").write_bytes((folder / "__0_0.distcp").read_bytes())
    second = part | {"file": "__1_0.distcp", "first_row": 3}
    document["tensors"][NAME] |= {"size": [6, 2], "parts": [part, second]}
    write_index(folder, document)
    whole = torch.empty(6, 2)
    read_parameters(folder, {"weight": whole})
    assert whole.tolist() == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]] * 2


def pickled_index(tmp_path):
    """DCP's own index, whose only entry is bytes that would make a file when they are unpickled."""

    class Command:
        def __reduce__(self):
            return os.open, (str(tmp_path / "ran"), os.O_CREAT)

    index = Metadata(state_dict_metadata={NAME: BytesStorageMetadata()})
    index.storage_data = {MetadataIndex(NAME): Command()}
    return pickle.dumps(index)


def test_a_pickle_is_no_index_and_runs_nothing(folder, tmp_path):
    (folder / ".metadata").write_bytes(pickled_index(tmp_path))
    with pytest.raises(DamageError, match=r"\.metadata: the index: Invalid JSON: .* restore"):
        read_index(folder)
    assert not (tmp_path / "ran").exists()


WRONG_ENTRIES = {
    "no tensor": ({"bytes": "__0_0.distcp"}, r"weight\.dtype: Field required"),
    "nothing": (None, r"parameters\.weight: Input should be"),
    "a part more": ({"size": [3, 2], "parts": [], "more": 1}, r"weight\.parts: Tuple should have"),
    "huge": ({"size": [1 << 54, 2]}, r"weight\.size\.0: Input should be less than"),
    "negative": ({"size": [-3, 2]}, r"weight\.size\.0: Input should be greater than"),
    "empty": ({"size": [0, 2]}, r"weight\.size\.0: Input should be greater than"),
    "more rows": ({"size": [4, 2]}, r"weight: must have 4 rows, its parts have 3"),
    "wide rows": ({"size": [3, 1 << 40]}, r"part 0: must have at least 13194139533312 bytes"),
    "a number as text": ({"size": ["3", 2]}, r"weight\.size\.0: Input should be a valid integer"),
    "no numbers": ({"dtype": "object"}, r"weight\.dtype: String should match"),
    "no parameter's": ({"dtype": "int64"}, r"weight: must be of float32, is of int64"),
    "many axes": ({"size": [1] * 9}, r"weight\.size: Tuple should have at most 8"),
}


@pytest.mark.parametrize(("change", "message"), WRONG_ENTRIES.values(), ids=WRONG_ENTRIES)
def test_an_entry_that_no_learner_writes_is_refused_by_name(folder, change, message):
    document = document_of(folder)
    entry = document["tensors"][NAME]
    document["tensors"][NAME] = (
        None
        if change is None
        else change
        | ({} if "bytes" in change else {key: entry[key] for key in entry if key not in change})
    )
    write_index(folder, document)
    with pytest.raises(DamageError, match=message) as told:
        read_index(folder)
    assert "restore the checkpoint from a copy, or remove its folder" in str(told.value)


WRONG_PARTS = {
    "a file elsewhere": ({"file": "../__0_0.distcp"}, r"parts\.0\.file: String should match"),
    "an absolute path": ({"file": "/dev/zero"}, r"parts\.0\.file: String should match"),
    "two lines": ({"file": "__0_0.distcp\n"}, r"parts\.0\.file: String should match"),
    "no such file": ({"file": "__7_0.distcp"}, r"of __7_0\.distcp, which has 0"),
    "before the file": ({"begin": -1}, r"parts\.0\.begin: Input should be greater"),
    "beyond the file": ({"begin": 1 << 40}, r"part 0: ends at byte \d+ of __0_0\.distcp"),
    "no bytes": ({"length": 0}, r"parts\.0\.length: Input should be greater"),
    "few bytes": ({"length": 23}, r"part 0: must have at least 24 bytes, has 23"),
    "many bytes": ({"length": 1 << 40}, r"part 0: ends at byte \d+ of __0_0\.distcp"),
    "later rows": ({"first_row": 1}, r"part 0: must begin at row 0, begins at 1"),
    "earlier rows": ({"first_row": -1}, r"parts\.0\.first_row: Input should be greater"),
    "fewer rows": ({"num_rows": 2}, r"weight: must have 3 rows, its parts have 2"),
    "compression": ({"transform": "zstd"}, r"parts\.0\.transform: Extra inputs are not permitted"),
}


@pytest.mark.parametrize(("change", "message"), WRONG_PARTS.values(), ids=WRONG_PARTS)
def test_a_part_that_no_learner_writes_is_refused_by_name(folder, change, message):
    document = document_of(folder)
    document["tensors"][NAME]["parts"][0] |= change
    write_index(folder, document)
    with pytest.raises(DamageError, match=message):
        read_index(folder)


def test_bytes_that_belong_to_two_parts_are_refused(folder):
    document = document_of(folder)
    document["tensors"]["parameters.other"] = document["tensors"][NAME]
    write_index(folder, document)
    with pytest.raises(DamageError, match=r"__0_0\.distcp: byte 0 belongs to two parts"):
        read_index(folder)


def test_a_name_that_is_neither_a_parameter_nor_a_moment_is_refused(folder):
    document = document_of(folder)
    document["tensors"] = {"weight": document["tensors"][NAME]}
    write_index(folder, document)
    with pytest.raises(DamageError, match=r"tensors\.weight"):
        read_index(folder)


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_a_file_without_an_end_is_not_read(folder, name):
    (folder / name).unlink()
    (folder / name).symlink_to("/dev/zero")
    with pytest.raises(DamageError):
        read_index(folder)


def test_rows_that_are_compressed_are_not_read(folder):
    data = io.BytesIO()
    torch.save(torch.zeros(3, 2), data)
    packed = io.BytesIO()
    with (
        zipfile.ZipFile(data) as plain,
        zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as small,
    ):
        for name in plain.namelist():
            small.writestr(name, plain.read(name))
    (folder / "__0_0.distcp").write_bytes(packed.getvalue())
    document = document_of(folder)
    document["tensors"][NAME]["parts"][0] |= {"begin": 0, "length": len(packed.getvalue())}
    write_index(folder, document)
    with pytest.raises(DamageError, match="is compressed"):
        read_parameters(folder, {"weight": torch.empty(3, 2)})


def test_rows_that_would_run_code_run_nothing(folder, tmp_path):
    class Command:
        def __reduce__(self):
            return os.open, (str(tmp_path / "ran"), os.O_CREAT)

    data = io.BytesIO()
    torch.save({"rows": Command()}, data)
    (folder / "__0_0.distcp").write_bytes(data.getvalue())
    document = document_of(folder)
    document["tensors"][NAME]["parts"][0] |= {"begin": 0, "length": len(data.getvalue())}
    write_index(folder, document)
    with pytest.raises(DamageError, match="a tensor cannot be read"):
        read_parameters(folder, {"weight": torch.empty(3, 2)})
    assert not (tmp_path / "ran").exists()


def test_the_planner_reads_no_bytes_whatever_the_index_says():
    item = ReadItem(
        type=LoadItemType.BYTE_IO,
        dest_index=MetadataIndex(NAME),
        dest_offsets=torch.Size([0]),
        storage_index=MetadataIndex(NAME),
        storage_offsets=torch.Size([0]),
        lengths=torch.Size([1]),
    )
    with pytest.raises(DamageError, match=r"parameters\.weight: is no tensor"):
        tensor_files._TensorPlanner().load_bytes(item, io.BytesIO(b"x"))


def test_a_tensor_that_the_index_has_no_word_for_is_not_written(tmp_path):
    model = weight_of(1)
    model.weight.data = model.weight.data.half()
    files = TensorFiles(model, PolicyOptimizer(model, Optimizer()))
    with pytest.raises(ValueError, match=r"parameters\.weight: must be of float32"):
        files.save(tmp_path).result()
