"""The kernel's code without a device: its index arithmetic on the CPU, and its text by the CUDA compiler."""

from __future__ import annotations

import ctypes
import itertools
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.transfers.cuda.kernel import KERNEL_NAME, LANES, OPTIONS, THREADS, kernel_source
from tests.cuda.cpu_kernel import compiled

ARCHITECTURES = ("80", "90", "100")


def run_on_cpu(
    source: np.ndarray, target: np.ndarray, rows: list[tuple[int, int, int]], n_blocks: int, n_threads: int
) -> None:
    columns = np.array(rows, dtype=np.uint64).reshape(-1, 3).T.copy()
    columns[0] += np.uint64(source.ctypes.data)
    columns[1] += np.uint64(target.ctypes.data)
    compiled().launch(columns.ctypes.data, len(rows), n_blocks, n_threads)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40), st.integers(0, 2100)), min_size=1, max_size=8),
    st.integers(1, 3),
    st.sampled_from([LANES, 2 * LANES, THREADS]),
)
def test_every_piece_arrives_whatever_its_alignment(
    drawn: list[tuple[int, int, int]], n_blocks: int, n_threads: int
) -> None:
    source = np.random.default_rng(1).integers(0, 256, 20_000, dtype=np.uint8)
    target = np.zeros(20_000, dtype=np.uint8)
    rows, at = [], 0
    for source_gap, target_gap, nbytes in drawn:
        rows.append((at + source_gap, at + target_gap, nbytes))
        at += 40 + nbytes
    expected = target.copy()
    for source_at, target_at, nbytes in rows:
        expected[target_at : target_at + nbytes] = source[source_at : source_at + nbytes]
    run_on_cpu(source, target, rows, n_blocks, n_threads)
    assert np.array_equal(target, expected)


@pytest.mark.parametrize(("here", "there"), itertools.product(range(17), repeat=2))
def test_heads_and_tails_at_every_pair_of_alignments(here: int, there: int) -> None:
    source = np.random.default_rng(2).integers(1, 256, 600, dtype=np.uint8)
    for nbytes in (1, 3, 4, 15, 16, 17, 31, 33, 200, 515):
        target = np.zeros(600, dtype=np.uint8)
        run_on_cpu(source, target, [(here, there, nbytes)], 1, LANES)
        assert np.array_equal(target[there : there + nbytes], source[here : here + nbytes])
        assert not target[:there].any()
        assert not target[there + nbytes :].any()


def nvrtc() -> ctypes.CDLL:
    """NVRTC from its wheel, or from a toolkit; skips loudly where there is none."""
    candidates = ["libnvrtc.so", "libnvrtc.so.13", "libnvrtc.so.12"]
    try:
        import nvidia
    except ImportError:
        pass
    else:
        roots = [Path(root) for root in nvidia.__path__]
        candidates = [str(path) for root in roots for path in sorted(root.rglob("libnvrtc.so*"))] + candidates
    for candidate in candidates:
        try:
            return ctypes.CDLL(candidate)
        except OSError:
            continue
    pytest.skip("NVRTC is not installed (pip install nvidia-cuda-nvrtc): THE KERNEL IS NOT COMPILED HERE")


def ptx_of(source: str, architecture: str) -> str:
    library = nvrtc()
    program = ctypes.c_void_p()
    text = source.encode()
    assert library.nvrtcCreateProgram(ctypes.byref(program), text, b"gather.cu", 0, None, None) == 0
    flags = [f"-arch=compute_{architecture}".encode(), *(option.encode() for option in OPTIONS)]
    code = library.nvrtcCompileProgram(program, len(flags), (ctypes.c_char_p * len(flags))(*flags))
    size = ctypes.c_size_t()
    assert library.nvrtcGetProgramLogSize(program, ctypes.byref(size)) == 0
    report = ctypes.create_string_buffer(size.value)
    assert library.nvrtcGetProgramLog(program, report) == 0
    assert code == 0, report.value.decode()
    assert library.nvrtcGetPTXSize(program, ctypes.byref(size)) == 0
    ptx = ctypes.create_string_buffer(size.value)
    assert library.nvrtcGetPTX(program, ptx) == 0
    assert library.nvrtcDestroyProgram(ctypes.byref(program)) == 0
    return ptx.value.decode()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_kernel_compiles_to_ptx(architecture: str) -> None:
    ptx = ptx_of(kernel_source(), architecture)
    assert f".target sm_{architecture}" in ptx
    assert f".entry {KERNEL_NAME}(" in ptx


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_sixteen_bytes_move_in_one_instruction(architecture: str) -> None:
    """Four loads of 16 bytes are in flight in each lane before the first store."""
    ptx = ptx_of(kernel_source(), architecture)
    wide = re.findall(r"(ld|st)\.(?:global\.)?v2\.[ub]64", ptx)
    assert re.search(r"(?:ld ){4}(?:st ){4}", " ".join(wide) + " ")


def test_an_error_in_the_kernel_is_seen() -> None:
    with pytest.raises(AssertionError, match=r"gather\.cu"):
        ptx_of(kernel_source().replace("u64 n_elements", "u64 n_element"), "90")
