"""A directory appears complete or not at all, and never in the place of something precious."""

import json
import os
import shutil
import signal
from contextlib import nullcontext
from pathlib import Path

import pytest

from gptqkit.errors import OutputExistsError
from gptqkit.export.staging import check_target, remove_leftovers, staged


def write(out, error=None, **options):
    with staged(out, **options) as directory:
        (directory / "inner").mkdir()
        (directory / "inner" / "file").touch()
        (directory / "quantize_config.json").write_text("{}")
        if error is not None:
            raise error


def test_it_appears_synced_with_usual_permissions(tmp_path, monkeypatch):
    out, synced, sync = tmp_path / "new" / "out", set(), os.fsync

    def record(descriptor):
        assert not out.exists() or os.fstat(descriptor).st_ino == out.parent.stat().st_ino  # what it holds came before
        synced.add(os.fstat(descriptor).st_ino)
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    write(out)
    everything = [out.parent, *out.parent.rglob("*")]
    assert len(everything) == 5
    assert synced >= {path.stat().st_ino for path in everything}
    (tmp_path / "usual").mkdir()
    assert out.stat().st_mode == (tmp_path / "usual").stat().st_mode


def test_an_existing_model_is_replaced_only_where_asked(tmp_path):
    out, link = tmp_path / "out", tmp_path / "link"
    write(out)
    (out / "mark").touch()
    link.symlink_to(out)
    with pytest.raises(OutputExistsError, match=r"exists already; .*, or overwrite it \(overwrite=True, --overwrite"):
        write(out, overwrite=False)
    assert (out / "mark").exists()
    write(link, overwrite=True)  # what it points to
    assert not (out / "mark").exists()
    assert link.is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "out"]


@pytest.mark.parametrize("name", ["thesis.txt", "config.json"])  # a float model may be the only copy
def test_what_is_no_quantized_model_is_never_overwritten(tmp_path, name):
    (tmp_path / "precious").mkdir()
    check_target(tmp_path / "precious", overwrite=True)  # it is empty
    (tmp_path / "precious" / name).write_text('{"model_type": "llama"}')
    for target in (tmp_path / "precious", tmp_path / "precious" / name):
        with pytest.raises(OutputExistsError, match="something other than a quantized model"):
            write(target, overwrite=True)
        with pytest.raises(OutputExistsError, match=r"exists already; choose another directory$"):
            write(target, overwrite=False)
    assert [path.name for path in (tmp_path / "precious").iterdir()] == [name]


@pytest.mark.parametrize("method", ["fp8", "fbgemm_fp8", "mxfp4", "gptq"])
def test_sources_in_fp8_and_mxfp4_count_as_float_models(tmp_path, method):
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": method}}))
    with nullcontext() if method == "gptq" else pytest.raises(OutputExistsError, match="something other than a quant"):
        check_target(tmp_path, overwrite=True)


@pytest.mark.parametrize("existing", [True, False])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "disk full"), ValueError("bug"), None])
def test_a_failure_leaves_nothing_and_keeps_the_old(tmp_path, monkeypatch, error, existing):
    if existing:
        write(tmp_path / "out")
        (tmp_path / "out" / "mark").touch()
    rename = Path.rename

    def refuse_new(self, target):
        if error is None and not (self / "mark").exists():
            raise OSError(5, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refuse_new)
    with pytest.raises(type(error or OSError())):
        write(tmp_path / "out", error, overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == (["out"] if existing else [])
    assert (tmp_path / "out" / "mark").exists() == existing


def test_a_full_disk_is_an_os_error(material, tmp_path):
    resource = pytest.importorskip("resource")
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match="file is no directory"):
        check_target(tmp_path / "file" / "out", overwrite=False)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(OSError, match=r"could not be written|File too large"):
            material().write(tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def leave(out, stage):
    """Die while a checkpoint is made, or while an old one is replaced."""
    rename, seen = Path.rename, []

    def counted(self, target):
        seen.append(target)
        if len(seen) == {"made": 1, "between": 2, "replaced": 0}[stage]:
            os.kill(os.getpid(), signal.SIGKILL)
        return rename(self, target)

    Path.rename = counted
    shutil.rmtree = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
    write(out, overwrite=True)


@pytest.mark.parametrize("stage", ["made", "between", "replaced"])
def test_what_a_crash_left_is_removed_by_the_next_write_and_nothing_is_lost(tmp_path, stage):
    out, other = tmp_path / "out", tmp_path / f".out.gptqkit-replaced-{'x' * 8}"
    write(out)
    (out / "mark").touch()
    other.mkdir()
    child = os.fork()
    if child == 0:
        leave(out, stage)
    os.waitpid(child, 0)
    assert len(list(tmp_path.iterdir())) > 2 - (stage == "between")
    with pytest.raises(OutputExistsError):
        write(out)
    assert sorted(path.name for path in tmp_path.iterdir()) == [other.name, "out"]
    assert (out / "mark").exists() == (stage != "replaced")
    write(out, overwrite=True)
    assert not (out / "mark").exists()


def test_what_another_process_is_at_work_on_stays(tmp_path):
    with staged(tmp_path / "out") as directory:
        (directory / "quantize_config.json").write_text("{}")
        remove_leftovers(tmp_path / "out")
        assert directory.exists()


def test_a_mount_point_is_no_target(tmp_path, monkeypatch):
    monkeypatch.setattr(os.path, "ismount", lambda path: str(path) == str(tmp_path / "disk"))
    (tmp_path / "disk").mkdir()
    for overwrite in (False, True):
        with pytest.raises(OSError, match="is a mount point"):
            check_target(tmp_path / "disk", overwrite=overwrite)
    check_target(tmp_path / "disk" / "out", overwrite=False)


def test_ctrl_c_between_the_renames_brings_the_old_one_back(tmp_path, monkeypatch):
    def write():
        with staged(tmp_path / "out", overwrite=True) as directory:
            (directory / "quantize_config.json").write_text("{}")

    write()
    (tmp_path / "out" / "mark").touch()
    rename = Path.rename

    def interrupted(self, target):
        if Path(target).name == "out" and not (self / "mark").exists():
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write()
    assert (tmp_path / "out" / "mark").exists()
