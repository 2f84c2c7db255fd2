"""Constants per device are readable and the split stays within what the kernels take."""

from pathlib import Path

import pytest

from gptqkit.kernels import tuning
from gptqkit.kernels.tuning import MOST_SPLITS, file_name, read_tuning, tuning_for

FILES = sorted((Path(tuning.__file__).parent / "devices").glob("*.json"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_file_serves_all_bit_widths(path):
    constants = read_tuning(path)
    assert set(constants.crossover) == {2, 3, 4, 8}
    for bits in constants.crossover:
        assert constants.fused(bits, 1)
        assert not constants.fused(bits, 1 << 20)


def test_unknown_devices_get_the_defaults():
    assert tuning_for("no such GPU") == read_tuning(next(path for path in FILES if path.stem == "default"))
    assert file_name("NVIDIA H200") == "nvidia-h200.json"


def test_dense_rows_are_whole_tiles_of_about_the_size_asked_for():
    constants = tuning_for("no such GPU")
    assert constants.dense_rows(2 * 28672) == 1024
    for columns in (32, 1000, 4096, 8192):
        rows = constants.dense_rows(2 * columns)
        assert rows % 256 == 0
        assert rows == 1024 or 0 <= constants.dense_bytes - rows * 2 * columns < 256 * 2 * columns


def test_split_fills_the_device_and_not_more():
    constants = tuning_for("no such GPU")
    for tiles in (1, 16, 64, 448, 10_000):
        for columns in (32, 4096, 28672):
            split = constants.split(tiles, columns, 132)
            assert 1 <= split <= MOST_SPLITS
            assert split == 1 or columns // split >= constants.least_inputs_per_block
    assert constants.split(64, 4096, 132) == 4
    assert constants.split(448, 8192, 132) == 1
