"""Times of operators and collectives follow published measurements, and what must hold of any."""

from dataclasses import replace

import pytest

from interlace.errors import InputError
from interlace.hardware.cluster import Cluster, load_cluster
from interlace.hardware.collective_times import (
    GroupPlace,
    across_bytes_per_s,
    axis_place,
    collective_time,
    group_place,
)
from interlace.hardware.operator_times import (
    fused_attention_s,
    launched_s,
    matmul_s,
    matmul_share,
    moved_s,
    unfused_attention_s,
)
from interlace.ir.graph import Kind

A100 = load_cluster("a100-80")

AZURE, H200, B200 = (load_cluster(name) for name in ("a100-40", "h200", "b200"))


A100_PCIE = (
    (4096, 1536, 5120, 0.788),
    (4096, 512, 32768, 0.715),
    (5120, 12288, 4096, 0.720),
    (24640, 5120, 1536, 0.703),
    (4096, 7168, 576, 0.644),
    (7168, 18432, 4096, 0.717),
    (33024, 7168, 2048, 0.732),
    (4096, 4096, 4096, 0.725),
    (128384, 4096, 4096, 0.709),
    (4096, 64256, 4096, 0.746),
    (4096, 4096, 7168, 0.742),
    (768, 4096, 4096, 0.725),
    (4096, 16128, 4096, 0.734),
    (4096, 8192, 57344, 0.755),
    (5120, 8192, 4096, 0.707),
    (4096, 64128, 8192, 0.746),
    (4096, 8192, 14336, 0.740),
    (1280, 8192, 4096, 0.682),
)
"""Rows, columns, depth, share of 312 TFLOP/s: every tenth GEMM of SimuMax's a100_pcie.json."""
B200_SXM = (
    (4096, 10240, 8192, 0.645),
    (4096, 8192, 64128, 0.466),
    (8192, 3584, 4096, 0.404),
    (4096, 16384, 26624, 0.508),
    (4096, 16384, 13312, 0.502),
    (6144, 5120, 4096, 0.486),
    (4096, 7168, 18432, 0.430),
    (28672, 8192, 4096, 0.487),
    (2560, 16384, 4096, 0.647),
    (4096, 6144, 4096, 0.653),
    (4096, 4096, 1536, 0.639),
    (16128, 4096, 4096, 0.535),
    (16384, 4096, 2048, 0.359),
    (2048, 8192, 4096, 0.430),
    (32768, 8192, 16384, 0.503),
    (8192, 10240, 16384, 0.491),
    (102400, 5120, 16384, 0.492),
    (24576, 1536, 16384, 0.511),
)
"""The same of 2,250 TFLOP/s: every 28th of its b200_bf16_ceperm.json."""


@pytest.mark.parametrize(
    ("rows", "cluster", "matmul", "most"),
    [(A100_PCIE, A100, 0.78, 0.08), (B200_SXM, B200, 0.5, 0.18)],
)
def test_matmuls_are_near_measured_ones(
    rows: tuple[tuple[int, int, int, float], ...], cluster: Cluster, matmul: float, most: float
) -> None:
    """The mean error over shapes of two GPUs; a GPU on PCIe has less power."""
    device = replace(cluster.device, reached=replace(cluster.device.reached, matmul=matmul))
    errors = []
    for m, n, k, share in rows:
        measured_s = 2.0 * m * n * k / (device.flops_per_s * share)
        errors.append(abs(matmul_s(device, m, n, k) / measured_s - 1))
    assert sum(errors) / len(errors) < most


def test_a_matmul_pays_for_its_last_wave_and_its_last_tiles() -> None:
    """One tile more than fits costs a wave; an odd size costs what it is rounded up to."""
    fits, one_more = (
        matmul_share(128 * 108, 256, 4096, 108),
        matmul_share(128 * 109, 256, 4096, 108),
    )
    assert one_more < 0.8 * fits
    assert matmul_share(4096, 4096, 4096, 108) > matmul_share(4097, 4097, 4096, 108)
    assert matmul_share(4096, 4096, 64, 108) < 0.4
    small = matmul_s(A100.device, 1, 1, 1)
    assert small == pytest.approx(A100.device.kernel_s, rel=0.3)


@pytest.mark.parametrize(
    ("sequence", "causal", "tflops"),
    [(512, False, 114), (2048, False, 187), (16384, False, 196), (2048, True, 145)],
)
def test_attention_is_near_the_paper(sequence: int, *, causal: bool, tflops: float) -> None:
    """FlashAttention-2's backward on an A100, 16k tokens of 16 heads of 128: within 25 %."""
    seconds = fused_attention_s(
        A100.device,
        batch=16384 // sequence,
        heads=16,
        sequence=sequence,
        head_size=128,
        causal=causal,
        backward=True,
    )
    work = 10e-12 * 16384 * 16 * sequence * 128 / (2 if causal else 1)
    assert work / seconds == pytest.approx(tflops, rel=0.25)


def test_unfused_attention_takes_longer() -> None:
    """It writes its scores; its backward takes longer than its forward."""
    shape = {"batch": 2, "heads": 16, "sequence": 2048, "head_size": 128}
    fused = fused_attention_s(A100.device, **shape)
    forward = unfused_attention_s(A100.device, **shape)
    assert fused * 2 < forward < unfused_attention_s(A100.device, **shape, backward=True)


def test_the_host_starts_operators_one_by_one() -> None:
    """Small operators take the time of their launches, large ones their own."""
    assert launched_s(A100.device, 1e-6, 10) == pytest.approx(10 * A100.device.launch_s)
    assert launched_s(A100.device, 1.0, 10) == 1.0
    assert moved_s(A100.device, 0, kernels=2) == 2 * A100.device.kernel_s


@pytest.mark.parametrize(
    ("cluster", "kind", "ranks", "full_bytes", "measured_us", "algorithm"),
    [
        # nccl-tests published by NetX-lab/Echo: A100 40 GB, Azure ND v4.
        (AZURE, Kind.ALL_REDUCE, 2, 2**30, 5203.1, "ring"),
        (AZURE, Kind.ALL_REDUCE, 8, 2**30, 8139.2, "ring"),
        (AZURE, Kind.ALL_REDUCE, 16, 2**34, 251757.0, "ring"),
        (AZURE, Kind.ALL_REDUCE, 32, 2**32, 67271.0, "ring"),
        (AZURE, Kind.ALL_REDUCE, 128, 2**32, 69831.0, "ring"),
        (AZURE, Kind.ALL_REDUCE, 128, 2**21, 214.0, "tree"),
        # Hetu-Galvatron: 8 devices of one host of A100.
        (AZURE, Kind.ALL_TO_ALL, 8, 2**30, 4815.1, "all to all"),
        # vTrain: the host of the resharding paper.
        (load_cluster("v100"), Kind.ALL_REDUCE, 4, 2**30, 18869.0, "ring"),
        # stas00/ml-engineering, network/README.md.
        (H200, Kind.ALL_GATHER, 8, 2**34, 41594.9, "ring"),
        (H200, Kind.REDUCE_SCATTER, 8, 2**34, 41422.9, "ring"),
        (H200, Kind.ALL_REDUCE, 4, 2**33, 35466.3, "ring"),
        (B200, Kind.ALL_REDUCE, 8, 2**34, 35551.42, "switch"),
        (B200, Kind.ALL_REDUCE, 32, 2**34, 87181.76, "two levels"),
    ],
)
def test_collectives_are_near_measured_ones(
    cluster: Cluster,
    kind: Kind,
    ranks: int,
    full_bytes: int,
    measured_us: float,
    algorithm: str,
) -> None:
    """Within 12 % for large tensors, 25 % below 4 MiB, and by the algorithm that NCCL takes."""
    found = collective_time(cluster, kind, full_bytes, group_place(cluster, range(ranks)))
    assert found.algorithm == algorithm
    within = 0.12 if full_bytes > 2**22 else 0.25
    assert found.seconds * 1e6 == pytest.approx(measured_us, rel=within)


def test_ports_are_shared() -> None:
    """One port of 10 Gbit/s serves four devices: alone one has it, together a quarter each."""
    v100 = load_cluster("v100")
    assert across_bytes_per_s(v100, 1) == pytest.approx(10e9 / 8 * 0.9)
    assert across_bytes_per_s(v100, 4) == pytest.approx(10e9 / 8 * 0.9 / 4)
    ports = [across_bytes_per_s(A100, senders) for senders in (1, 8)]
    assert ports[0] == ports[1]  # one port each
    alone, beside = (
        collective_time(v100, Kind.SEND, 2**30, group_place(v100, (0, 4), senders)).seconds
        for senders in (1, 4)
    )
    assert beside == pytest.approx(4 * alone, rel=0.01)


def test_a_host_of_two_boards_is_as_fast_as_what_joins_them() -> None:
    """Groups of one board run at NVLink's rate; a group of both at that of PCIe."""
    inside = replace(A100.intra_host, island=4, between_gb_per_s=60)
    boards = replace(A100, intra_host=inside)
    one, both = (
        collective_time(boards, Kind.ALL_REDUCE, 2**30, group_place(boards, range(ranks))).seconds
        for ranks in (4, 8)
    )
    place = group_place(A100, range(4))
    assert one == collective_time(A100, Kind.ALL_REDUCE, 2**30, place).seconds
    assert both == pytest.approx(2 * 7 / 8 * 2**30 / (60e9 * 0.77), rel=0.01)
    slower = replace(boards, intra_host=replace(inside, between_efficiency=0.5))
    found = collective_time(slower, Kind.ALL_REDUCE, 2**30, group_place(slower, range(8))).seconds
    assert found == pytest.approx(2 * 7 / 8 * 2**30 / (60e9 * 0.5), rel=0.01)


def test_a_message_to_the_other_board_shares_what_joins_them() -> None:
    """With the other devices of its board, which send at once; one within the board does not."""
    inside = replace(A100.intra_host, island=4, between_gb_per_s=200)
    boards = replace(A100, intra_host=inside)

    def seconds(cluster: Cluster, stride: int) -> float:
        return collective_time(cluster, Kind.SEND, 1e9, axis_place(cluster, 2, stride, 64)).seconds

    assert seconds(boards, 2) == seconds(A100, 2)
    latency = seconds(A100, 4) - 1e9 / A100.intra_host.bytes_per_s
    assert seconds(boards, 4) - latency == pytest.approx(1e9 / (50e9 * inside.efficiency))


def test_an_axis_of_a_mesh_has_a_place() -> None:
    """Neighbours fill a host; ranks a host apart are alone in theirs, among eight senders."""
    assert axis_place(A100, 8, 1, 64) == GroupPlace(ranks=8, hosts=1, local=8, senders=8)
    apart = GroupPlace(ranks=8, hosts=8, local=1, senders=8, apart=8)
    assert axis_place(A100, 8, 8, 64) == apart
    apart = GroupPlace(ranks=16, hosts=4, local=4, senders=8, apart=2)
    assert axis_place(A100, 16, 2, 64) == apart
    assert collective_time(A100, Kind.ALL_REDUCE, 9, axis_place(A100, 1, 8, 64)).seconds == 0
    with pytest.raises(InputError, match="16 ranks in steps of 8 do not fit in 64"):
        axis_place(A100, 16, 8, 64)
    with pytest.raises(InputError, match="5 ranks do not lie 2 to a host on 2 hosts"):
        GroupPlace(ranks=5, hosts=2, local=2, senders=2)


@pytest.mark.parametrize("kind", [Kind.ALL_REDUCE, Kind.ALL_GATHER, Kind.ALL_TO_ALL, Kind.SEND])
def test_times_grow_with_bytes(kind: Kind) -> None:
    """Whatever the algorithm."""
    place = group_place(A100, range(16))
    times = [collective_time(A100, kind, 2**power, place).seconds for power in range(4, 34, 3)]
    assert times == sorted(times)
