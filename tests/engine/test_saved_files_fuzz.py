"""Damaged measurements and saved conversations give the same result or an InputError."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from fuzzing import altered, attempt, damage, damages
from hypothesis import given
from hypothesis import strategies as st
from runtime import engine

from infinigen_jax.engine.saved_file import SavedFile, write_saved
from infinigen_jax.evaluation.parts import Measurement, Parts


@given(changes=damages)
def test_saved_measurements(tmp_path_factory, changes):
    """A damaged part, or one of another key, is measured again."""
    folder = tmp_path_factory.mktemp("parts")
    parts = Parts(folder / "result.json", {"text": "a"})
    arrays = {"scores": np.arange(50.0), "positions": np.arange(50)}
    parts.save({"budget": 0.1}, Measurement(arrays, {"seconds": 1.5}))
    whole = parts.load({"budget": 0.1})
    assert whole is not None and whole.values == {"seconds": 1.5}
    other = Parts(folder / "result.json", {"text": "b"})
    assert other.load({"budget": 0.1}) is parts.load({"budget": 0.2}) is None
    (path,) = (folder / "result.json.parts").iterdir()
    damage(path, changes)
    found = parts.load({"budget": 0.1})
    if found is not None:
        assert found.values == {"seconds": 1.5} and found.arrays.keys() == arrays.keys()
        for name, array in arrays.items():
            np.testing.assert_array_equal(found.arrays[name], array)


@pytest.fixture(scope="module")
def conversation(tmp_path_factory) -> Path:
    talk = engine("one").conversation(context=200)
    list(talk.turn([5, 6, 7], 5))
    talk.save(path := tmp_path_factory.mktemp("talk") / "whole")
    return path


@given(changes=damages)
def test_saved_conversations(conversation, changes):
    """The checksum finds everything."""
    path = conversation.with_name("damaged")
    shutil.copyfile(conversation, path)
    changed = damage(path, changes)
    file = attempt(lambda: SavedFile(path))
    assert changed == (file is None)


@given(data=st.data())
def test_saved_conversations_with_another_content(conversation, data):
    """The checksum fits; records and arrays of another kind are refused all the same."""
    whole = SavedFile(conversation)
    record = whole.record
    arrays = {n: whole.read(n, *info[:2]) for n, info in whole._file.tensors.items()}
    del arrays["record"], arrays["checksum"]
    if data.draw(st.booleans()):
        record = altered(data.draw(st.randoms()), record)
    else:
        name = data.draw(st.sampled_from(sorted(arrays)))
        less = arrays[name][..., :-1] if arrays[name].ndim else arrays[name]
        others = {"less": less, "kind": arrays[name].astype(np.int8), "none": None}
        other = others[data.draw(st.sampled_from(sorted(others)))]
        arrays = {n: other if n == name else x for n, x in arrays.items()}
        arrays = {n: x for n, x in arrays.items() if x is not None}
    path = conversation.with_name("changed")
    layout = {name: (array.dtype, array.shape) for name, array in arrays.items()}
    write_saved(path, record, layout, arrays.items())
    resumed = attempt(lambda: engine("one").resume(path))
    if resumed is not None:
        assert resumed.cached in (len(resumed.tokens), len(resumed.tokens) - 1)
        assert len(arrays) == len(whole._file.tensors) - 2
