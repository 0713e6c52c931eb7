"""Every microsecond of a step is in one category, and they sum to the step."""

import pytest

from arriero.bench.measure import (
    CATEGORIES,
    LOSS,
    OPTIMIZER,
    Event,
    break_down,
    category_of,
    time_by_category,
)


@pytest.mark.parametrize(
    ("name", "annotation", "category"),
    [
        ("nvjet_hsh_256x128_64x4_1x2_h_bz_coopA_NNT", "", "GEMM"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", "", "GEMM"),
        ("void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<...>>", "", "GEMM"),
        ("ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_nn", "", "GEMM"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float>", "", "GEMM"),
        ("triton_tem_fused_mm_3", "", "GEMM"),
        ("nvjet_hsh_256x128_64x4", LOSS, "GEMM"),
        ("nvjet_hsh_256x128_64x4", OPTIMIZER, "optimizer"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7", "", "attention"),
        ("void pytorch_flash::flash_bwd_kernel<cutlass::bfloat16_t>", "", "attention"),
        ("fmha_cutlassF_bf16_aligned_64x128_rf_sm80", "", "attention"),
        ("triton_poi_fused__scaled_dot_product_cudnn_attention_transpose_4", "", "elementwise"),
        ("triton_red_fused_add_mul_mean_7", "", "elementwise"),
        ("void at::native::elementwise_kernel<direct_copy_kernel>", "", "elementwise"),
        ("void at::native::reduce_kernel<512, 1>", LOSS, "loss"),
        ("void at::native::multi_tensor_apply_kernel<FusedAdam>", OPTIMIZER, "optimizer"),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", OPTIMIZER, "communication"),
        ("Memcpy HtoD (Pinned -> Device)", "", "copies"),
        ("Memset (Device)", "", "copies"),
        ("aten::addmm", "", "GEMM"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu_backward", "", "attention"),
        ("aten::silu", "", "elementwise"),
        ("c10d::allreduce_", "", "communication"),
    ],
)  # fmt: skip
def test_a_kernel_is_known_by_its_name_and_the_code_it_was_launched_by(name, annotation, category):
    assert category_of(name, annotation) == category


def test_overlapping_streams_are_counted_once_and_computation_first():
    events = [
        Event("gemm", 10, 30, 7),
        Event("nccl", 20, 50, 13),
        Event("Memcpy DtoH", 45, 60, 20),
        Event("relu", 70, 80, 7),
        Event("flash", 25, 32, 9),
    ]
    found = time_by_category(events, 0, 100)
    assert found == dict.fromkeys(CATEGORIES, 0.0) | {
        "GEMM": 20,
        "attention": 2,
        "communication": 18,
        "copies": 10,
        "elementwise": 10,
        "idle": 40,
    }
    assert sum(found.values()) == 100


def test_only_what_lies_in_the_window_counts():
    found = time_by_category(
        [Event("gemm", -10, 5, 7), Event("gemm", 95, 400, 7), Event("gemm", 500, 600, 7)], 0, 100
    )
    assert found["GEMM"] == 10
    assert found["idle"] == 90


def on_gpu(name, ts, dur, correlation, kind="kernel", stream=7):
    arguments = {"stream": stream, "correlation": correlation, "device": 0}
    return {
        "ph": "X",
        "cat": kind,
        "name": name,
        "pid": 0,
        "tid": stream,
        "ts": ts,
        "dur": dur,
        "args": arguments,
    }


def on_host(name, ts, dur, kind, **arguments):
    return {
        "ph": "X",
        "cat": kind,
        "name": name,
        "pid": 99,
        "tid": 99,
        "ts": ts,
        "dur": dur,
        "args": arguments,
    }


GPU_TRACE = {
    "schemaVersion": 1,
    "traceEvents": [
        {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "python"}},
        on_host("ProfilerStep#6", 1000, 500, "user_annotation"),
        on_host("ProfilerStep#7", 1500, 500, "user_annotation"),
        on_host("arriero.loss", 1010, 30, "user_annotation"),
        on_host("cudaLaunchKernel", 1020, 5, "cuda_runtime", correlation=2),
        on_host("cudaLaunchKernel", 1005, 2, "cuda_runtime", correlation=1),
        # launched by a driver call that the trace does not have: known by the range over its stream
        on_gpu("arriero.optimizer", 1700, 200, 0, "gpu_user_annotation"),
        on_gpu("some_fused_kernel", 1700, 200, 4),
        on_gpu("nvjet_hsh_128", 1100, 100, 1),
        on_gpu("softmax_kernel", 1200, 50, 2),
        on_gpu("Memcpy HtoD", 1240, 60, 3, "gpu_memcpy", 20),
        {"ph": "s", "id": 1, "pid": 99, "tid": 99, "ts": 1005, "cat": "ac2g", "name": "ac2g"},
    ],
}  # fmt: skip


def test_a_gpus_trace_is_read_by_kernels_launches_and_ranges():
    found = break_down(GPU_TRACE, on_gpu=True)
    assert found.steps == 2
    assert found.step_ms == pytest.approx(0.5)
    assert found.parts == pytest.approx(
        dict.fromkeys(CATEGORIES, 0.0)
        | {"GEMM": 0.05, "loss": 0.025, "copies": 0.025, "optimizer": 0.1, "idle": 0.3}
    )


def test_on_a_cpu_an_operators_time_is_without_those_it_calls():
    trace = {
        "traceEvents": [
            on_host("ProfilerStep#6", 0, 100, "user_annotation"),
            on_host("aten::linear", 10, 40, "cpu_op"),
            on_host("aten::addmm", 12, 30, "cpu_op"),
            on_host("aten::copy_", 14, 8, "cpu_op"),
            on_host("arriero.optimizer", 60, 30, "user_annotation"),
            on_host("aten::mul", 65, 20, "cpu_op"),
            on_host("aten::mul", 20, 20, "cpu_op") | {"tid": 100},
        ]
    }
    parts = break_down(trace, on_gpu=False).parts
    assert {name: round(1e3 * time) for name, time in parts.items() if time} == {
        "GEMM": 32,
        "copies": 8,
        "optimizer": 20,
        "idle": 40,
    }


def test_a_profiler_that_saw_no_kernels_of_a_gpu_has_nothing_to_say():
    trace = {
        "traceEvents": [
            on_host("ProfilerStep#6", 0, 100, "user_annotation"),
            on_host("aten::mm", 5, 9, "cpu_op"),
        ]
    }
    assert break_down(trace, on_gpu=True) is None
