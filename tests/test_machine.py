"""What a machine has is read from the system, control groups included."""

import os

import torch

from gptqkit.machine import _cgroup_room, look


def write(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n")


def test_the_tightest_control_group_counts_and_cached_files_are_room(tmp_path):
    membership = tmp_path / "cgroup"
    membership.write_text("0::/user/job\n")
    root = tmp_path / "mount"
    write(root)  # the outermost group has no limit
    write(root / "user", memory__max=1000, memory__current=900, memory__stat="anon 500\ninactive_file 300")
    write(root / "user" / "job", memory__max="max", memory__current=100, memory__stat="inactive_file 50")
    assert _cgroup_room(root, membership) == 400
    write(root / "user" / "job", memory__max=200, memory__current=100, memory__stat="inactive_file 50")
    assert _cgroup_room(root, membership) == 150


def test_in_a_container_the_mounted_group_is_our_own(tmp_path):
    membership = tmp_path / "cgroup"
    membership.write_text("0::/of/the/host\n")
    write(tmp_path / "mount", memory__max=1000, memory__current=1200, memory__stat="inactive_file 0")
    assert _cgroup_room(tmp_path / "mount", membership) == 0


def test_version_1(tmp_path):
    membership = tmp_path / "cgroup"
    membership.write_text("3:cpu:/\n2:memory,hugetlb:/job\n0::/\n")
    write(
        tmp_path / "mount" / "memory" / "job",
        memory__limit_in_bytes=1000,
        memory__usage_in_bytes=300,
        memory__stat="total_inactive_file 100",
    )
    assert _cgroup_room(tmp_path / "mount", membership) == 800


def test_no_limit_is_no_number(tmp_path):
    assert _cgroup_room(tmp_path, tmp_path / "missing") is None
    (tmp_path / "cgroup").write_text("0::/\n")
    assert _cgroup_room(tmp_path, tmp_path / "cgroup") is None


def test_this_machine(tmp_path):
    machine = look(torch.device("cpu"), tmp_path / "not" / "there" / "yet")
    free = os.statvfs(tmp_path)
    assert abs(machine.disk - free.f_bavail * free.f_frsize) < 1 << 30
    assert machine.memory is None or machine.memory > machine.program > 10 << 20
    assert (machine.gpu is None) == (not torch.cuda.is_available())
