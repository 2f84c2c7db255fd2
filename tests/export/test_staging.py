"""A directory appears complete or not at all, and never in the place of something precious."""

import os
import signal
from pathlib import Path

import pytest

from gptqkit.errors import OutputExistsError
from gptqkit.export.staging import check_target, staged


def write(out, *, overwrite=False, error=None):
    with staged(out, overwrite=overwrite) as directory:
        (directory / "quantize_config.json").write_text("{}")
        assert directory.parent == Path(os.path.realpath(out)).parent  # on the same file system
        if error is not None:
            raise error


def test_it_appears_with_usual_permissions_and_its_parents(tmp_path):
    write(tmp_path / "new" / "out")
    mask = os.umask(0)
    os.umask(mask)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["out"]
    assert ((tmp_path / "new" / "out").stat().st_mode & 0o777) == (0o777 & ~mask)


def test_an_existing_model_is_replaced_only_where_asked(tmp_path):
    out = tmp_path / "out"
    write(out)
    (out / "mark").touch()
    with pytest.raises(OutputExistsError, match="exists already"):
        write(out)
    assert (out / "mark").exists()
    write(out, overwrite=True)
    assert not (out / "mark").exists()
    (tmp_path / "link").symlink_to(out)
    write(tmp_path / "link", overwrite=True)  # what the link points to
    assert (tmp_path / "link").is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "out"]


@pytest.mark.parametrize("name", ["thesis.txt", "config.json"])  # a float model may be the only copy
def test_what_is_no_quantized_model_is_never_overwritten(tmp_path, name):
    precious = tmp_path / "precious"
    precious.mkdir()
    write(precious, overwrite=True)  # empty, it held nothing
    (precious / "quantize_config.json").unlink()
    (precious / name).write_text('{"model_type": "llama"}')
    for target in (precious, precious / name):
        with pytest.raises(OutputExistsError, match="something else than a quantized model"):
            write(target, overwrite=True)
    assert [path.name for path in precious.iterdir()] == [name]
    (precious / "config.json").write_text('{"quantization_config": {}}')
    check_target(precious, overwrite=True)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device"), ValueError("bug")])
@pytest.mark.parametrize("existing", [True, False])
def test_a_failure_leaves_nothing_and_keeps_the_old(tmp_path, error, existing):
    if existing:
        write(tmp_path / "out")
        (tmp_path / "out" / "mark").touch()
    with pytest.raises(type(error)):
        write(tmp_path / "out", overwrite=True, error=error)
    assert [path.name for path in tmp_path.iterdir()] == (["out"] if existing else [])
    assert (tmp_path / "out" / "mark").exists() == existing


def test_a_failing_rename_brings_the_old_back(tmp_path, monkeypatch):
    write(tmp_path / "out")
    (tmp_path / "out" / "mark").touch()
    rename = Path.rename

    def refuse_new(self, target):
        if not (self / "mark").exists():
            raise OSError(5, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refuse_new)
    with pytest.raises(OSError, match="Input/output error"):
        write(tmp_path / "out", overwrite=True)
    assert (tmp_path / "out" / "mark").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_files_and_names_are_synced_before_the_directory_appears(tmp_path, monkeypatch):
    synced = set()
    sync = os.fsync

    def record(descriptor):
        assert not (tmp_path / "out").exists() or os.fstat(descriptor).st_ino == tmp_path.stat().st_ino
        synced.add(os.fstat(descriptor).st_ino)
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    with staged(tmp_path / "out") as directory:
        (directory / "inner").mkdir()
        (directory / "inner" / "file").touch()
        (directory / "file").touch()
    everything = [tmp_path, tmp_path / "out", *(tmp_path / "out").rglob("*")]
    assert len(everything) == 5
    assert synced >= {path.stat().st_ino for path in everything}


def test_places_where_nothing_can_be_made_are_refused_at_once(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match="file is no directory"):
        check_target(tmp_path / "file" / "out", overwrite=False)
    if os.geteuid():
        (tmp_path / "locked").mkdir(mode=0o500)
        with pytest.raises(PermissionError, match="locked is not writable"):
            check_target(tmp_path / "locked" / "out", overwrite=False)


def test_a_full_disk_is_an_os_error(material, tmp_path):
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(OSError, match=r"could not be written|File too large"):
            material().write(tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert list(tmp_path.iterdir()) == []
