"""Reading Nsight Compute's CSV; the format is that of its manual, the numbers are made up."""

import stat

import pytest
from conftest import CUDA_DEVICES

from flash_attn_lab.experiments import _ncu

HEAD = (
    '"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size","Device",'
    '"CC","Section Name","Metric Name","Metric Unit","Metric Value"'
)


def line(number, kernel, metric, unit, value):
    fields = (number, 7, "python3.11", "127.0.0.1", kernel, 1, 7, "(128, 1, 1)", "(64, 1, 1)", 0, "9.0",
              "Command line profiler metrics", metric, unit, value)  # fmt: skip
    return ",".join(f'"{field}"' for field in fields)


FILL = "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>, 1>(int, T2, T3)"
TEXT = "\n".join(
    [
        "==PROF== Connected to process 7 (/usr/bin/python3.11)",
        '==PROF== Profiling "scores_kernel" - 0: 0%....50%....100% - 1 pass',
        "a line of the program",
        "==PROF== Disconnected from process 7",
        HEAD,
        line(9, FILL, "dram__bytes_read.sum", "byte", "64"),
        line(0, "scores_kernel(AttentionParams)", "dram__bytes_read.sum", "byte", "1,048,576"),
        line(0, "scores_kernel(AttentionParams)", "dram__bytes_write.sum", "Mbyte", "2.5"),
        line(0, "scores_kernel(AttentionParams)", "gpu__time_duration.sum", "nsecond", "3,000"),
        line(0, "scores_kernel(AttentionParams)", "lts__t_bytes.sum", "byte", "4000000"),
        line(0, "scores_kernel(AttentionParams)", _ncu.WAVEFRONTS, "", "10"),
        line(0, "scores_kernel(AttentionParams)", _ncu.TENSOR[0], "%", "n/a"),
        line(0, "scores_kernel(AttentionParams)", _ncu.TENSOR[2], "%", "10"),
        line(1, "void out_kernel<float, 128>(int, \"\"x\"\")", "dram__bytes_read.sum", "Kbyte", "500"),
        line(1, "void out_kernel<float, 128>(int, \"\"x\"\")", "dram__bytes_write.sum", "byte", "0"),
        line(1, "void out_kernel<float, 128>(int, \"\"x\"\")", "gpu__time_duration.sum", "ns", "1000"),
        line(1, "void out_kernel<float, 128>(int, \"\"x\"\")", "lts__t_bytes.sum", "byte", "1000000"),
        line(1, "void out_kernel<float, 128>(int, \"\"x\"\")", _ncu.WAVEFRONTS, "", "5"),
        line(1, "void out_kernel<float, 128>(int, \"\"x\"\")", _ncu.TENSOR[2], "%", "50"),
        "",
    ]
)  # fmt: skip


def test_kernels_of_a_call_are_summed():
    [kernels] = _ncu.by_call(_ncu.parse(TEXT), 1)
    assert len(kernels) == 2
    assert kernels[0]["dram__bytes_read.sum"] == 1048576 and _ncu.TENSOR[0] not in kernels[0]
    found = _ncu.traffic(kernels)
    assert found["dram_bytes"] == 1048576 + 2.5e6 + 5e5
    assert found["l2_bytes"] == 5e6
    assert found["shared_bytes_moved"] == 15 * 128
    assert found["ncu_us"] == pytest.approx(4)


def test_a_metric_that_is_missing_from_one_kernel_is_missing_from_the_call():
    [kernels] = _ncu.by_call(_ncu.parse(TEXT.replace('"1000000"', '"n/a"')), 1)
    assert "l2_bytes" not in _ncu.traffic(kernels) and "dram_bytes" in _ncu.traffic(kernels)
    assert _ncu.traffic([]) == {}


def test_the_first_metric_of_the_tensor_cores_that_is_known(monkeypatch):
    asked = []

    def profile(metrics, framework, calls):
        asked.append(metrics[-1])
        if len(asked) == 1:
            raise _ncu.NcuError("ncu: Failed to find metric sm__pipe")
        if len(asked) == 2:
            return [[{_ncu.DURATION: 1.0}], []]
        return _ncu.by_call(_ncu.parse(TEXT), 1) + [[]]

    monkeypatch.setattr(_ncu, "profile", profile)
    assert _ncu.tensor_shares("torch", [{}, {}]) == [pytest.approx((10 * 3 + 50 * 1) / 4), None]
    assert asked == list(_ncu.TENSOR)

    def refuse(metrics, framework, calls):
        raise _ncu.NcuError("ERR_NVGPUCTRPERM")

    monkeypatch.setattr(_ncu, "profile", refuse)
    with pytest.raises(_ncu.NcuError, match="ERR_NVGPUCTRPERM"):
        _ncu.tensor_shares("torch", [{}])


def test_a_list_of_kernels_is_cut_at_the_fills():
    fill = _ncu.Kernel("cupy_fill__float32", {})
    a, b, c = (_ncu.Kernel(name, {name: 1.0}) for name in "abc")
    assert _ncu.by_call([fill, a, b, fill, fill, c], 3) == [[a.metrics, b.metrics], [], [c.metrics]]
    with pytest.raises(_ncu.NcuError, match="saw 1 of 2 calls"):
        _ncu.by_call([fill, a], 2)


@pytest.mark.parametrize(
    "text, reason",
    [
        ("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission", "does not have permission"),
        ("==PROF== Connected\n==WARNING== No kernels were profiled.\n", "No kernels were profiled"),
        ("Segmentation fault\n", "Segmentation fault"),
        ("", "ncu wrote no table"),
    ],
)
def test_why_there_are_no_counters(text, reason):
    with pytest.raises(_ncu.NcuError, match=reason):
        _ncu.parse(text)


def fake_ncu(folder, monkeypatch, body):
    file = folder / "ncu"
    file.write_text("#!/bin/sh\n" + body)
    file.chmod(file.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


FIND_LOG = 'while [ "$1" != --log-file ]; do shift; done\n'


def test_the_log_file_is_read(tmp_path, monkeypatch):
    (tmp_path / "table.csv").write_text(TEXT)
    fake_ncu(tmp_path, monkeypatch, f'{FIND_LOG}cp "{tmp_path}/table.csv" "$2"\necho noise\n')
    [kernels] = _ncu.profile(_ncu.TRAFFIC_METRICS, "torch", [{"name": "naive"}])
    assert _ncu.traffic(kernels)["l2_bytes"] == 5e6


def test_a_failing_or_missing_ncu_is_said(tmp_path, monkeypatch):
    fake_ncu(tmp_path, monkeypatch, "echo '==ERROR== no luck' >&2\nexit 9\n")
    with pytest.raises(_ncu.NcuError, match="no luck"):
        _ncu.profile(_ncu.TRAFFIC_METRICS, "torch", [])
    monkeypatch.setattr(_ncu, "TIMEOUT", 0.1)
    fake_ncu(tmp_path, monkeypatch, "exec sleep 5\n")
    with pytest.raises(_ncu.NcuError, match="longer than 0.1 s"):
        _ncu.profile(_ncu.TRAFFIC_METRICS, "torch", [])
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(_ncu.NcuError, match="not on PATH"):
        _ncu.profile(_ncu.TRAFFIC_METRICS, "torch", [])


@pytest.mark.skipif(CUDA_DEVICES > 0, reason="there is a GPU, which the process would use")
def test_the_process_under_ncu_starts(tmp_path, monkeypatch):
    fake_ncu(tmp_path, monkeypatch, f'{FIND_LOG}shift 2\nexec "$@"\n')
    with pytest.raises(_ncu.NcuError, match="the library sees no GPU"):
        _ncu.profile(_ncu.TRAFFIC_METRICS, "torch", [{"name": "naive"}])
