"""Peak rates of GPUs, by the names that they give themselves."""

import re

# Peak of one GPU in TFLOP/s, dense (no sparsity), at boost clock: bfloat16 on tensor cores with
# float32 sums, and float32 without TF32. Names are what torch.cuda.get_device_name gives. Sources:
# the vendor's data sheets; NVIDIA prints Hopper, Ada L40S and Blackwell tensor rates with sparsity,
# which is twice the dense rate. A value that no data sheet settles is left out.
PEAK_TFLOPS: tuple[tuple[str, dict[str, float]], ...] = (
    (r"NVIDIA A(10|80)0-(SXM4|PCI[Ee])-(40|80)GB", {"bfloat16": 312, "float32": 19.5}),
    (r"NVIDIA A(10|80)0 80GB PCIe", {"bfloat16": 312, "float32": 19.5}),
    (r"NVIDIA A30", {"bfloat16": 165, "float32": 10.3}),
    (r"NVIDIA A40", {"bfloat16": 149.7, "float32": 37.4}),
    (r"NVIDIA RTX A6000", {"bfloat16": 154.8, "float32": 38.7}),
    (r"NVIDIA L4", {"bfloat16": 121, "float32": 30.3}),
    (r"NVIDIA L40", {"bfloat16": 181.05, "float32": 90.5}),
    (r"NVIDIA L40S", {"bfloat16": 362.05, "float32": 91.6}),
    (r"NVIDIA H100 PCIe", {"bfloat16": 756, "float32": 51}),
    (r"NVIDIA H100 NVL", {"bfloat16": 835, "float32": 60}),
    (r"NVIDIA H100 80GB HBM3", {"bfloat16": 989, "float32": 67}),
    (r"NVIDIA H800", {"bfloat16": 989, "float32": 67}),
    (r"NVIDIA H200", {"bfloat16": 989, "float32": 67}),
    (r"NVIDIA H200 NVL", {"bfloat16": 835, "float32": 60}),
    (r"NVIDIA GH200 (120|144G|480)(GB)?( HBM3e?)?", {"bfloat16": 989, "float32": 67}),
    (r"NVIDIA B200", {"bfloat16": 2250}),
    (r"NVIDIA GB200", {"bfloat16": 2500}),
    (r"NVIDIA GeForce RTX 3090", {"bfloat16": 71, "float32": 35.6}),
    (r"NVIDIA GeForce RTX 4090", {"bfloat16": 165.2, "float32": 82.6}),
    (r"NVIDIA GeForce RTX 5090", {"bfloat16": 209.5, "float32": 104.8}),
    (r"AMD Instinct MI300X( OAM)?", {"bfloat16": 1307.4, "float32": 163.4}),
)


def peak_flops(device_name: str, dtype: str) -> float | None:
    """Dense peak in FLOP/s of the GPU that torch calls `device_name`; None when not known.

    Slices (MIG), laptop and export variants have other peaks and are not known here.
    """
    for pattern, peaks_tflops in PEAK_TFLOPS:
        if re.fullmatch(pattern, device_name.strip()):
            peak_tflops = peaks_tflops.get(dtype.removeprefix("torch."))
            return None if peak_tflops is None else peak_tflops * 1e12
    return None
