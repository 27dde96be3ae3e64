"""The fast kernels spill no registers, and ptxas serialised no wgmma: read from the reports left beside the library."""

import re
from pathlib import Path

import pytest

from flash_attn_minimal._core import library

FOLDER = Path(library.path()).parent / "ptxas"
# Every kernel except those that exist to be read, or to serve all remaining calls.
PATTERNS = (
    "attention/*ward/*_sm*.log",
    "attention/*ward/*_sm*/**/*.log",
    "attention/statistics/*_sm*.log",
    "attention/split/**/*.log",
    "attention/decode/**/*.log",
    "transformer/linear/*.log",
    "transformer/w4/**/*.log",
)
# Kernels that may spill, and how much. 64 rows of head dim 256 leave no register for the position in the list of work;
# it stays in local memory from before the loop over tiles until after it.
MAY_SPILL = {
    # Head dims 512 and 256 with every option: around the random numbers of dropout. Ten rounds spill nothing, seven do.
    r"attention_kernelI\w+Li512ELi256ELNS_5MmaSmE0ELNS0_7OptionsE1E": 84,
    r"decode_split_kernelI\w+Li256ELi64E": 24,
    # The tile of sm_80 for head dim 128 on pages, there alone: one register, read once in a step of 3000 instructions.
    r"attention_kernelI\w+Li128ELi128ELNS_5MmaSmE3ELNS0_7OptionsE0ELNS0_7KeyRowsE1E": 8,
    # One to four registers, each stored and read once in a step of 2200 to 3000 instructions.
    r"gradient_kernelI\w+Li64ELi64ELNS_5MmaSmE[123]E": 16,
    r"gradient_kernelI\w+Li128ELi128ELNS_5MmaSmE[123]E": 12,
    r"gradient_kernelI\w+Li256ELi256ELNS_5MmaSmE4E": 8,
    # In the warpgroup for dQ, which has 64 registers: what it needs to store rows, and two reads a tile where it adds.
    r"backward_wgmma_pair_kernelI\w+BackwardPlanIdE[4-7]E": 24,
    r"backward_wgmma_pair_kernelI\w+BackwardPlanIdE[89]E": 64,
    # In the thread that takes keys, which has 32: one, stored and read between walks.
    r"backward_wgmma_(bias_)?kernelI\w+BackwardPlanIdE(1\d|2\d|43|44)E": 4,
    # mma_short_sm80, head dim 128: two blocks on a multiprocessor are 10 % faster than one, which would spill nothing.
    r"mma_short_sm80\w+gradient_kernelI\w+Li128ELNS0_6ScoresE": 216,
    r"mma_short_sm80\w+gradient_kernelI\w+Li64ELNS0_6ScoresE": 8,  # with options: what a block knows of its walk
    r"mma_short_sm80\w+gradient_kernelI\w+Li256ELNS0_6ScoresE": 52,
    # wgmma_float32_sm90, head dim 128 with options: P has a scale for each row, twice in its loop of 128 exponentials.
    r"attention_kernelILi128ELb1EEEvNS0_18WgmmaFloat32Params": 64,
    # wgmma_float32_sm90, dK and dV of head dim 128: twelve registers in a step of 192 wgmmas.
    r"gradient_kernelILi128ELNS0_3OwnE0E(Lb0E)?EEvNS0_11PartsParams": 68,
    r"gradient_kernelILi128ELNS0_3OwnE0ELb1EEEvNS0_11PartsParams": 40,  # with options
    # wgmma_float32_wide_sm90, dK and dV with options: eight registers in a step of 192 wgmmas.
    r"gradient_kernelILNS0_3OwnE0ELb1EEEvNS0_10WideParams": 80,
    # mma_float32_sm80, head dim 512 with options: two registers of a tile of 32 keys.
    r"attention_kernelINS_10SplitFloatELi512ELi512ELNS_5MmaSmE0ELNS0_7OptionsE1E": 8,
    r"gradient_kernelILi64ELNS0_3OwnE0E(Lb[01]E)?EEvNS0_11PartsParams": 8,  # in the warp that loads statistics
    # mma_float32_sm80: up to ten registers in a step of 1500 instructions and more; head dims above 128.
    r"attention_kernelINS_10SplitFloatELi(192|256)E\w+OptionsE0": 40,
    # The same with options: the bounds of masks by intervals take registers, too.
    r"attention_kernelINS_10SplitFloatELi192E\w+OptionsE1": 56,
    r"attention_kernelINS_10SplitFloatELi256E\w+OptionsE1": 200,
    r"gradient_kernelILi256E\w+GradientParams": 40,
    # Masks by blocks and of pairs, backward: the thread that takes keys has 32 registers and stores some between walks.
    r"backward_wgmma_kernelI\w+BackwardPlanIdE2[01]E": 28,
    # Masks by intervals, backward: the same thread.
    r"backward_wgmma_kernelI\w+BackwardPlanIdE1[45]E": 8,
    # Masks by blocks, head dim 64: four positions, once for each item, one of which a step of 2500 instructions reads.
    r"forward_wgmma_blocks_kernelI\w+WgmmaPlanIdE28E": 32,
    # Softcap backward. Head dim 64: two registers in a step of 2300 instructions; 128, float16: after the loop.
    r"backward_wgmma_kernelI\w+BackwardPlanIdE12E": 8,
    r"backward_wgmma_kernelI6__half\w+BackwardPlanIdE13E": 24,
    # Options at head dim 128, forward, three warpgroups: one register in a step of 4000 instructions.
    r"forward_wgmma_kernelI\w+WgmmaPlanIdE16E": 4,
    # Bias and dropout. Forward: one register in a step of 4000 instructions. Backward at 64: a register in a step of
    # 2300 instructions and one before the loop; at 128: after the loop.
    r"forward_wgmma_bias_kernelI\w+WgmmaPlanIdE35E": 4,
    r"backward_wgmma_bias_kernelI\w+BackwardPlanIdE22E": 8,
    r"backward_wgmma_bias_kernelI6__half\w+BackwardPlanIdE23E": 16,
    # Bias at head dim 64, 128 rows: positions in the rings, once for each item.
    r"forward_wgmma_bias_kernelI\w+WgmmaPlanIdE49E": 32,
    # Masks by intervals at head dim 64, 128 rows: the same.
    r"forward_wgmma_kernelI\w+WgmmaPlanIdE50E": 32,
    # Bias of float32, backward: two registers in a step of 2300 instructions, and after the loop.
    r"backward_wgmma_bias_kernelI6__half\w+BackwardPlanIdE25E": 28,
    # Shared prefixes at head dim 128: a position, once for each item.
    r"prefix_wgmma_kernelI\w+SplitTileE3E": 8,
    # One of the five tiles of keys of wgmma_split_sm90; statistics of rows: two registers in a loop over keys.
    r"split_wgmma_kernelI\w+SplitTileE4E": 4,
    r"row_statistics_kernelI": 8,
    # float32_sm80: a pointer, outside the loops over columns and keys.
    r"attention_kernelILi256ELi128ELi32EEEvNS0_13Float32Params": 8,
}
REPORTS = sorted(report for pattern in PATTERNS for report in FOLDER.glob(pattern))

pytestmark = pytest.mark.skipif(
    not REPORTS, reason="no ptxas reports beside the library: installed, or built without CUDA"
)


@pytest.mark.parametrize("report", REPORTS, ids=lambda report: str(report.relative_to(FOLDER)).split(".")[0])
def test_no_spills(report):
    entries = re.findall(
        r"Compiling entry function '(\w+)' for '(\w+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores",
        report.read_text(),
        re.DOTALL,
    )
    allowed = {name: sum(most for kernel, most in MAY_SPILL.items() if re.search(kernel, name)) for name, *_ in entries}
    spilling = [
        f"{name} for {target}: {spilled} bytes" for name, target, _, spilled in entries if int(spilled) > allowed[name]
    ]
    assert not spilling, "\n".join(spilling)


@pytest.mark.parametrize("report", REPORTS, ids=lambda report: str(report.relative_to(FOLDER)).split(".")[0])
def test_wgmma_is_not_serialised(report):
    """To ptxas, C7508 (setmaxnreg ignored) to C7519 (an injected wait) are only infos, but they halve the speed."""
    assert re.findall(r".*\(C75\d\d\).*", report.read_text()) == []


def registers_of(pattern: str, kernel: str) -> set[int]:
    """The registers of a thread, for all Hopper kernels whose name matches."""
    text = "".join(report.read_text() for report in FOLDER.glob(pattern))
    entries = re.findall(r"Compiling entry function '(\w+)' for 'sm_90a?'.*?Used (\d+) registers", text, re.DOTALL)
    return {int(used) for name, used in entries if re.search(kernel, name)}


def test_attention_fits_beside_a_chain():
    """One block each of chain_w4_sm90 (17 warps, 5 on a quarter of a multiprocessor) and of decode_lanes (8 warps, one
    row of q, 128 columns of 16 bits): a quarter has 512 registers for each of 32 lanes."""
    chain = registers_of("transformer/w4/chain_w4_sm90*.log", "chain_w4_sm90_kernelILNS0_6FormatE[12]E")
    lanes = registers_of("attention/decode/lanes/16bit*.log", r"decode_lanes_cluster_kernelI\w+Li128ELi1E")
    if not (chain and lanes):
        pytest.skip("built without Hopper")
    assert 5 * -(-max(chain) // 8) * 8 + 2 * -(-max(lanes) // 8) * 8 <= 512
