"""The file of a cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.errors import ConfigError
from quire.placement.cluster_file import read_cluster
from tests.planning.test_placement import GB, GIB

GPU_FILE = """
[nodes]
count = 4
gpus = 8
gpu_memory = "80GB"
device = "a100-80g"
[network]
inside = "300GB"
between = "3.125GB"
"""


def test_a_cluster_file_has_the_machines_of_the_paper(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(GPU_FILE)
    cluster = read_cluster(file)
    assert (cluster.num_units, cluster.unit, cluster.slot_memory, cluster.is_fast) == (32, "GPU", 80 * GB, False)
    assert (cluster.network.between, cluster.network.inside) == (25 * GB // 8, 300 * GB)
    file.write_text(GPU_FILE + "fast = true\n")
    assert read_cluster(file).is_fast
    file.write_text('[nodes]\ncores = 16\nmemory = "64GiB"\n')
    cluster = read_cluster(file)
    assert (cluster.num_units, cluster.slots, cluster.unit, cluster.slot_memory) == (1, 16, "machine", 4 * GIB)
    assert cluster.is_fast, "nothing leaves a single machine"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nodes = ", "cannot read the configuration file"),
        ("[node]\ncount = 2", "unknown section [node] in"),
        ("[[nodes]]\ncount = 2", "'nodes' in"),
        ("[nodes]\ngpu = 8", "did you mean nodes.gpus?"),
        ("[nodes]\ncount = 0", "nodes.count is 0; it must be a whole number of at least 1"),
        ("[nodes]\ncount = 2", "nodes.gpus is 0 and nodes.cores is missing: set one of them"),
        ("[nodes]\ngpus = 8", "nodes.gpus is 8: set nodes.gpu_memory"),
        ("[nodes]\ngpus = 8\ngpu_memory = 'much'", "nodes.gpu_memory is 'much'; it must be a size such as"),
        ("[nodes]\ngpus = 8\ngpu_memory = '80GB'\ncores = 4", "nodes.cores is for machines without GPUs"),
        ("[nodes]\ncores = 5000\nmemory = '8GB'", "nodes.cores is 5000; it must be at most 4,096"),
        ("[nodes]\ncount = 20000\ngpus = 8", "nodes.count is 20000; it must be at most 10,000"),
        ("[nodes]\ncores = 8", "nodes.cores is 8: set nodes.memory"),
        ("[nodes]\ncores = 8\nmemory = '8GB'\ndevice = 'a100'", "nodes.device is for GPUs, and nodes.gpus is 0"),
        ("[nodes]\ncount = 2\ncores = 8\nmemory = '8GB'", "nodes.count is 2: set network.between"),
        ("[nodes]\ncores = 8\nmemory = '8GB'\n[network]\nbetween = '1GB'", "network.between is for several machines"),
        (GPU_FILE.replace("3.125GB", "0"), "network.between is 0; it must be bytes per second above 0"),
    ],
)
def test_a_bad_cluster_file_is_refused_with_the_key_and_the_way_out(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as error:
        read_cluster(file)
    assert message in str(error.value) and str(file) in str(error.value) and "\n" not in str(error.value)
