import errno
import os
import time

import numpy as np
import pytest

from experiments.lra.tasks import store


class TestStore:
    def generate(self, allocate):
        allocate("x", (3,), np.uint8)[:] = [1, 2, 3]

    def test_generates_once(self, tmp_path):
        folder = tmp_path / "data"
        store.stored(folder, {"a": 1}, self.generate)
        again = store.stored(folder, {"a": 1}, lambda allocate: pytest.fail("generated again"))
        assert again["x"].tolist() == [1, 2, 3]
        store.verify(folder)

    def test_the_first_of_two_that_generate_at_once_is_kept(self, tmp_path):
        folder = tmp_path / "data"

        def late(allocate):
            store.stored(folder, {"a": 1}, self.generate)
            allocate("x", (3,), np.uint8)[:] = [1, 2, 3]

        assert store.stored(folder, {"a": 1}, late)["x"].tolist() == [1, 2, 3]
        assert list(tmp_path.iterdir()) == [folder]
        store.verify(folder)

    def test_a_killed_generator_leaves_nothing(self, tmp_path):
        def killed(allocate):
            self.generate(allocate)
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            store.stored(tmp_path / "data", {}, killed)
        assert list(tmp_path.iterdir()) == []

    def test_a_full_disk_is_an_error_that_leaves_nothing(self, tmp_path, monkeypatch):
        def full(descriptor, offset, size):
            raise OSError(errno.ENOSPC, "full")

        def large(allocate):
            allocate("x", (2**20,), np.uint8)

        monkeypatch.setattr(store.os, "posix_fallocate", full)
        with pytest.raises(OSError, match=r"x\.npy of .*data needs 1,048,704 bytes") as error:
            store.stored(tmp_path / "data", {}, large)
        assert error.value.errno == errno.ENOSPC
        assert list(tmp_path.iterdir()) == []
        monkeypatch.undo()
        # Untouched pages have their blocks.
        store.stored(tmp_path / "data", {}, large)
        assert (tmp_path / "data" / "x.npy").stat().st_blocks * 512 >= 2**20

    def test_other_facts_and_changed_contents_are_refused(self, tmp_path):
        folder = tmp_path / "data"
        store.stored(folder, {"a": 1}, self.generate)
        with pytest.raises(ValueError, match=r"has .*'a': 1.*, not .*'a': 2"):
            store.stored(folder, {"a": 2}, self.generate)
        np.save(folder / "x.npy", np.array([1, 2, 4], np.uint8))
        with pytest.raises(ValueError, match=r"x\.npy is not what was generated"):
            store.verify(folder)
        np.save(folder / "x.npy", np.array([1, 2], np.uint8))
        with pytest.raises(ValueError, match=r"x\.npy must be \[3\], got \(2,\)"):
            store.stored(folder, {"a": 1}, self.generate)

    @pytest.mark.parametrize("name", ["manifest.json", "x.npy"])
    @pytest.mark.parametrize("damage", ["cut", "emptied", "deleted", "changed", "nested"])
    def test_damaged_files_are_named(self, tmp_path, name, damage):
        folder = tmp_path / "data"
        store.stored(folder, {"a": 1}, self.generate)
        path, content = folder / name, (folder / name).read_bytes()
        if damage == "deleted":
            path.unlink()
        else:
            cut = {"cut": content[:-2], "emptied": b"", "changed": content[:-2] + b"yz"}
            path.write_bytes((cut | {"nested": b"[" * 100_000})[damage])
        with pytest.raises(ValueError, match=rf"data/{name} (cannot be read|is not what)"):
            store.stored(folder, {"a": 1}, self.generate)

    def test_drafts_of_killed_processes_are_removed(self, tmp_path):
        for name, age in (("old", 2 * store.ABANDONED), ("new", 0)):
            (tmp_path / f".unfinished-{name}").mkdir()
            at = time.time() - age
            os.utime(tmp_path / f".unfinished-{name}", (at, at))
        store.stored(tmp_path / "data", {"a": 1}, self.generate)
        left = {path.name for path in tmp_path.iterdir()}
        assert left == {"data", ".unfinished-new"}

    def test_a_folder_of_something_else_is_not_taken_for_data(self, tmp_path):
        def late(allocate):
            self.generate(allocate)
            (tmp_path / "data" / "notes").mkdir(parents=True)

        with pytest.raises(OSError, match="not empty"):
            store.stored(tmp_path / "data", {}, late)
        assert [path.name for path in tmp_path.iterdir()] == ["data"]
