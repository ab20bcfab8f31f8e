// Part of an instruction set's kernels: the table of all of them.
namespace prl::ops::cpu::PRL_SIMD {

constexpr Kernels kKernels = {
    .name = PRL_SIMD_NAME,
    .gemm_f32 = &kGemmF32,
    .gemm_bf16 = &kGemmBf16,
    .attention_scratch_bytes = attention_scratch_bytes,
    .attention = attention,
    .attention_merge = attention_merge,
    .attention_finish = attention_finish,
    .attention_backward_scratch_bytes = attention_backward_scratch_bytes,
    .attention_backward = attention_backward,
    .rms_norm = rms_norm,
    .rms_norm_backward = rms_norm_backward,
    .add = add,
    .swiglu = swiglu,
    .swiglu_backward = swiglu_backward,
    .rope = rope,
    .cast = cast,
    .accumulate = accumulate,
    .scale_row = scale_row,
    .dot_row = dot_row,
    .store_row = store_row,
    .sum_squares = sum_squares,
    .scale = scale,
    .chunk_stats = chunk_stats,
    .exponentials = exponentials_row,
    .softmax_gradient = softmax_gradient,
    .adamw = adamw,
    .sgd = sgd,
    .sign_sgd = sign_sgd,
    .axpby = axpby,
    .read_sum = read_sum,
};

}  // namespace prl::ops::cpu::PRL_SIMD
