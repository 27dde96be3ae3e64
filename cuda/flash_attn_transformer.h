/* flash_attn_transformer.h: the C ABI of the operations around attention in a Transformer: norms, rotary embedding, activations,
 * sampling, products with few rows, and products with 4-bit weights. The rules at the top of flash_attn.h apply here too. */
#ifndef FLASH_ATTN_TRANSFORMER_H
#define FLASH_ATTN_TRANSFORMER_H

#include "flash_attn.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- the small operations around attention ----
 *
 * Matrices are data[row * row_stride + column], columns contiguous. Sums are float32 whatever the types; results are rounded once.
 * A dtype field of 0 means the type named beside it. Every dtype may be float32, float16 or bfloat16.
 *
 * programmatic = 1 uses programmatic dependent launch: on sm_90 and newer the kernel may start its preparations while earlier kernels of
 * the stream still run. Elsewhere, and on the CPU, it changes nothing. The kernel waits for the end of the earlier kernels before it reads
 * any array below, with one exception: fa_linear and fa_w4_linear read weight (packed) and norm_weight at once, so no kernel between the
 * last plain launch and this one may write them. Captured graphs keep this behaviour. */

typedef struct fa_matrix {
    void* data;
    int64_t row_stride; /* in elements */
} fa_matrix;

/* out = x / sqrt(mean(x^2) + eps) * weight, for each row. With a residual, x += residual comes first, and the sum is stored in x. */
typedef struct fa_rms_norm_args {
    size_t struct_size;
    int32_t device;
    int32_t dtype;          /* of x */
    int32_t weight_dtype;   /* 0 = dtype */
    int32_t residual_dtype; /* 0 = dtype */
    int32_t out_dtype;      /* 0 = dtype */
    int32_t dim;            /* 1 .. 2^24 */
    int64_t rows;
    fa_matrix x;        /* (rows, dim) */
    fa_matrix residual; /* (rows, dim); data NULL = none */
    fa_matrix out;      /* (rows, dim); may be x */
    const void* weight; /* (dim) */
    float eps;
    int32_t programmatic;
    int32_t num_threads; /* CPU: 0 = one per available core */
    int32_t reserved;
} fa_rms_norm_args;

FA_API fa_status fa_rms_norm(const fa_rms_norm_args* args, void* stream);

/* Rotary position embedding: rotates pairs of every head by angles that depend on the position, (a, b) to (a cos - b sin, a sin + b cos).
 * Pair j of rotary_dim / 2 is (j, j + rotary_dim / 2), or with interleaved (2 j, 2 j + 1). Elements from index rotary_dim on are copied. */
typedef struct fa_rope_args {
    size_t struct_size;
    int32_t device;
    int32_t dtype;       /* of x and out */
    int32_t table_dtype; /* of cos and sin; 0 = dtype */
    int32_t batch;
    int32_t nheads;
    int32_t headdim;
    int32_t rotary_dim; /* even; 0 = headdim */
    int32_t interleaved;
    int32_t inverse; /* rotate back, as the gradient does */
    int32_t programmatic;
    int64_t seqlen;
    fa_tensor x;           /* (batch, seqlen, nheads, headdim) */
    fa_tensor out;         /* like x; may be x itself */
    const void *cos, *sin; /* (table_rows, rotary_dim / 2) */
    int64_t table_row_stride;
    int64_t table_rows;
    /* NULL: token i of a sequence has position i. With per_token = 0 (batch): token i of sequence b has position positions[b] + i.
     * With per_token = 1 (batch, seqlen): one position per token. A position outside the tables is an error on the CPU; a GPU uses
     * the nearest row. */
    const int32_t* positions;
    int32_t per_token;
    int32_t num_threads;
} fa_rope_args;

FA_API fa_status fa_rope(const fa_rope_args* args, void* stream);

/* out = silu(gate) * up, silu(x) = x / (1 + e^-x). gate is columns 0 .. dim - 1 of gate_up, up is columns dim .. 2 dim - 1. */
typedef struct fa_swiglu_args {
    size_t struct_size;
    int32_t device;
    int32_t dtype;     /* of gate_up */
    int32_t out_dtype; /* 0 = dtype */
    int32_t dim;
    int64_t rows;
    fa_matrix gate_up; /* (rows, 2 dim) */
    fa_matrix out;     /* (rows, dim) */
    int32_t programmatic;
    int32_t num_threads;
} fa_swiglu_args;

FA_API fa_status fa_swiglu(const fa_swiglu_args* args, void* stream);

/* Draws a token for every row from softmax(logits / temperature), restricted first to the top_k most likely tokens and then to
 * the smallest set of most likely tokens whose probabilities reach the fraction top_p of the remaining sum. Among equal logits
 * the lower index comes first. temperature = 0 takes the first of the largest logits. A row with a NaN, or with nothing above
 * -infinity, gives -1. CPU and GPU draw the same tokens from the same arguments: weights are integers, and the random numbers
 * are Philox4x32-10 (transformer/ops/sampling.h). */
typedef struct fa_sample_args {
    size_t struct_size;
    int32_t device;
    int32_t dtype; /* of logits */
    int32_t batch;
    int32_t vocab;    /* 1 .. 2^20 */
    fa_matrix logits; /* (batch, vocab) */
    int32_t* out;     /* (batch) */
    float temperature;
    float top_p;   /* 0 < top_p <= 1; 0 = 1 */
    int32_t top_k; /* 0 = all */
    int32_t programmatic;
    uint64_t seed;
    uint64_t offset;      /* different offsets, or different steps, make draws with the same seed independent */
    const int64_t* seeds; /* (batch) one seed per row: so a row's draws do not depend on its place in the batch. NULL = `seed` */
    const int32_t* step;  /* step[b * step_stride], read when the kernel runs, so that a replayed graph draws new tokens; NULL = 0 */
    int64_t step_stride;  /* 0 = one step for all rows */
    int32_t num_threads;
    int32_t reserved;
} fa_sample_args;

FA_API fa_status fa_sample(const fa_sample_args* args, void* stream);

/* out = residual + act(norm(x) weight^T + bias) for a few rows of x; reading the weights bounds the speed. norm(x) is x, or with
 * norm_weight the RMSNorm of fa_rms_norm. act is the identity, or with swiglu silu(y[n]) * y[n + out_features / 2]. Any number of rows
 * works; for large weights on a GPU a matrix library is faster from two rows on. */
typedef struct fa_linear_args {
    size_t struct_size;
    int32_t device;
    int32_t dtype;          /* of x */
    int32_t weight_dtype;   /* 0 = dtype */
    int32_t bias_dtype;     /* 0 = weight_dtype */
    int32_t norm_dtype;     /* of norm_weight; 0 = dtype */
    int32_t residual_dtype; /* 0 = out_dtype */
    int32_t out_dtype;      /* 0 = dtype */
    int32_t in_features;
    int32_t out_features; /* rows of weight; with swiglu the rows of gate, then those of up */
    int32_t swiglu;
    int64_t rows;
    fa_matrix x;             /* (rows, in_features) */
    fa_matrix weight;        /* (out_features, in_features) */
    fa_matrix residual;      /* (rows, columns of out); data NULL = none; may be out */
    fa_matrix out;           /* (rows, out_features), with swiglu (rows, out_features / 2); must not be x */
    const void* bias;        /* (out_features); NULL = none */
    const void* norm_weight; /* (in_features); NULL = no norm */
    float eps;               /* of the norm */
    int32_t programmatic;
    int32_t num_threads;
    int32_t reserved;
    const char* kernel; /* name of the kernel to use; NULL = environment variable FLASH_ATTN_DENSE_LINEAR_KERNEL, else the best kernel */
} fa_linear_args;

FA_API fa_status fa_linear(const fa_linear_args* args, void* stream);

/* Like fa_attention_query, for fa_linear. No kernel needs a workspace. */
FA_API fa_status fa_linear_query(const fa_linear_args* args, fa_attention_plan* plan);

/* ---- 4-bit weights ----
 *
 *     weight[n][k] = code[n][k] * scale[n][k / block] * tensor_scale
 *
 *     FA_NVFP4   code E2M1 (0, 0.5, 1, 1.5, 2, 3, 4, 6 and negatives)   block  16   scale float8_e4m3   tensor_scale float32
 *     FA_MXFP4   code E2M1                                              block  32   scale E8M0, 2^(byte - 127); 255 = NaN
 *     FA_INT4    code two's complement, -8 .. 7                         block 128   scale float16
 * A weight is first quantised to its plain form (codes and scales as in files), then packed once for the products.
 * cuda/transformer/w4/common/w4.h defines both forms. */

typedef enum fa_w4_format { FA_NVFP4 = 1, FA_MXFP4 = 2, FA_INT4 = 3 } fa_w4_format;

typedef struct fa_w4_weight {
    int32_t format;       /* fa_w4_format */
    int32_t out_features; /* 1 .. 2^24 rows */
    int32_t in_features;  /* 1 .. 2^24 columns */
    int32_t reserved;
    uint8_t* codes;      /* (out_features, ceil(in_features / 2)): an even column in the low 4 bits, the next one in the high 4 bits */
    void* scales;        /* (out_features, ceil(in_features / block)) bytes; FA_INT4: float16 */
    float* tensor_scale; /* one number, required by FA_NVFP4; NULL = 1 */
} fa_w4_weight;

/* Quantises a matrix. Codes are rounded to nearest, ties to even. A block's scale maps its largest magnitude to the largest code
 * (FA_MXFP4: to 4 .. 8). With search = 1 the scale is the one with the least squared error among several near it. The tensor_scale of
 * FA_NVFP4 maps the largest magnitude of the matrix to 6 * 448; other formats get 1. A block that contains a NaN or an infinity gets the
 * scale NaN. Limits: the scale of FA_INT4 is a float16, so magnitudes above 4.5e5 are clipped, and a block of magnitudes below 2e-7
 * becomes 0. In FA_NVFP4 a block more than 4e5 times smaller than the largest magnitude of the matrix may become 0. FA_MXFP4 holds
 * magnitudes up to 2^127. Every operation is rounded once, so CPU and GPU write the same bytes. */
typedef struct fa_w4_quantize_args {
    size_t struct_size;
    int32_t device;
    int32_t dtype; /* of w: float32, float16 or bfloat16 */
    int32_t search;
    int32_t num_threads; /* CPU: 0 = one per available core */
    fa_matrix w;         /* (out_features, in_features) */
    fa_w4_weight out;
} fa_w4_quantize_args;

FA_API fa_status fa_w4_quantize(const fa_w4_quantize_args* args, void* stream);

/* out = code * scale * tensor_scale. The first product is exact in float32, the second is rounded to float32, and the result is
 * rounded to out_dtype. */
typedef struct fa_w4_dequantize_args {
    size_t struct_size;
    int32_t device;
    int32_t out_dtype;
    int32_t num_threads;
    int32_t reserved;
    fa_w4_weight weight;
    fa_matrix out; /* (out_features, in_features) */
} fa_w4_dequantize_args;

FA_API fa_status fa_w4_dequantize(const fa_w4_dequantize_args* args, void* stream);

/* Stores in *bytes the number of bytes that fa_w4_pack writes. */
FA_API fa_status fa_w4_packed_bytes(int32_t format, int32_t out_features, int32_t in_features, int32_t pair, int64_t* bytes);

/* Reorders a weight for fa_w4_linear. CPU and GPU write the same bytes. */
typedef struct fa_w4_pack_args {
    size_t struct_size;
    int32_t device;
    int32_t dtype; /* of the products: float16 or bfloat16 */
    int32_t pair;  /* 1 = for SwiGLU: the first half of the rows is the gate, the second half up */
    int32_t num_threads;
    fa_w4_weight weight;
    void* packed; /* aligned to 128 bytes */
    int64_t packed_bytes;
} fa_w4_pack_args;

FA_API fa_status fa_w4_pack(const fa_w4_pack_args* args, void* stream);

/* fa_linear with a packed weight: out = residual + act(norm(x) weight^T + bias), for any number of rows. norm(x) is rounded to
 * compute_dtype before the product; sums are float32. */
typedef struct fa_w4_linear_args {
    size_t struct_size;
    int32_t device;
    int32_t dtype;         /* of x */
    int32_t compute_dtype; /* float16 or bfloat16: the dtype that the weight was packed for */
    int32_t format;        /* fa_w4_format of the weight */
    int32_t out_features;  /* with swiglu the rows of gate and up together */
    int32_t in_features;
    int32_t swiglu;         /* 1 if and only if the weight was packed as a pair */
    int32_t bias_dtype;     /* 0 = compute_dtype */
    int32_t norm_dtype;     /* 0 = dtype */
    int32_t residual_dtype; /* 0 = out_dtype */
    int32_t out_dtype;      /* 0 = dtype */
    float eps;              /* of the norm */
    int64_t rows;
    fa_matrix x;             /* (rows, in_features) */
    fa_matrix residual;      /* (rows, columns of out); data NULL = none; may be out */
    fa_matrix out;           /* (rows, out_features), with swiglu (rows, out_features / 2); must not be x */
    const void* packed;      /* from fa_w4_pack, in memory of `device`. On the CPU its header is compared with the fields above */
    const void* bias;        /* (out_features); NULL = none */
    const void* norm_weight; /* (in_features); NULL = no norm */
    int32_t programmatic;
    int32_t num_threads;
    const char* kernel; /* name of the kernel to use; NULL = the environment variable FLASH_ATTN_LINEAR_KERNEL, else the best kernel */
    void* workspace;    /* any alignment; contents are scratch */
    size_t workspace_bytes;
} fa_w4_linear_args;

FA_API fa_status fa_w4_linear(const fa_w4_linear_args* args, void* stream);

/* Like fa_attention_query, for fa_w4_linear. */
FA_API fa_status fa_w4_linear_query(const fa_w4_linear_args* args, fa_attention_plan* plan);

/* A chain of products, computed in order: each as by fa_w4_linear, and each may read the results of earlier ones. On Hopper a chain with
 * few rows is one launch, in which loads of weights continue across the products. That launch is programmatic if products[0] is. */
typedef struct fa_w4_linear_chain_args {
    size_t struct_size;
    const fa_w4_linear_args* products; /* (count), all with the same struct_size and device; kernel and workspace are NULL */
    int32_t count;                     /* 1 .. 8 */
    int32_t ahead_count;               /* entries of ahead and ahead_bytes: 0 .. 4 */
    const void* ahead[4];              /* hint: what later calls read first, such as weights, to prefetch into L2; aligned to 16 bytes */
    int64_t ahead_bytes[4];
    const char* kernel; /* name of the kernel to use: chain_w4_sm90 or one_by_one, on the CPU cpu; NULL = the environment variable
                         * FLASH_ATTN_CHAIN_KERNEL, else the best kernel */
    void* workspace;    /* any alignment; contents are scratch */
    size_t workspace_bytes;
} fa_w4_linear_chain_args;

FA_API fa_status fa_w4_linear_chain(const fa_w4_linear_chain_args* args, void* stream);

/* Like fa_attention_query, for fa_w4_linear_chain. */
FA_API fa_status fa_w4_linear_chain_query(const fa_w4_linear_chain_args* args, fa_attention_plan* plan);

/* The kernels of fa_w4_linear in this build, best first for each device, listed like those of fa_kernel_count in flash_attn.h. */
FA_API int32_t fa_linear_kernel_count(void);
FA_API const char* fa_linear_kernel_name(int32_t index);
FA_API const char* fa_linear_kernel_summary(int32_t index);
FA_API int32_t fa_linear_kernel_device(int32_t index);

/* The kernels of fa_w4_linear_chain, in the same way. */
FA_API int32_t fa_chain_kernel_count(void);
FA_API const char* fa_chain_kernel_name(int32_t index);
FA_API const char* fa_chain_kernel_summary(int32_t index);
FA_API int32_t fa_chain_kernel_device(int32_t index);

/* The kernels of fa_linear, in the same way. */
FA_API int32_t fa_dense_linear_kernel_count(void);
FA_API const char* fa_dense_linear_kernel_name(int32_t index);
FA_API const char* fa_dense_linear_kernel_summary(int32_t index);
FA_API int32_t fa_dense_linear_kernel_device(int32_t index);

/* What each kernel can serve, as text: a line for every kernel of all tables, also for those that this build lacks, with tabs between its
 * fields:
 *     table (forward, backward, linear, w4_linear, w4_linear_chain), name, 1 if this build has it, else 0, device
 * and for kernels of attention
 *     dtypes, head dims, what it refuses, what a call must have, pages of a multiple of how many keys, how rows must lie: empty, "rows"
 *     (starts and lengths of whole 16 bytes) or "TMA" (also strides that the copy engine takes)
 * Conditions on sizes are not listed: a query gives the reason against a call. Writes at most size bytes, the last a NUL, and returns the
 * length of the whole text without the NUL. */
FA_API size_t fa_kernel_limits(char* text, size_t size);

/* ---- XLA ---- */

/* An fa_call of flash_attn.h as a handler of XLA's foreign function interface (openxla.org/xla/custom_call), to be registered for the
 * platforms cpu and CUDA. A handler takes an XLA_FFI_CallFrame* and returns NULL, or an XLA_FFI_Error* with the text of fa_last_error.
 * On a GPU it may be captured into a command buffer. The top of api/xla_ffi.cpp describes the attributes. */
FA_API void* fa_xla_call_cpu(void* call_frame);
FA_API void* fa_xla_call_cuda(void* call_frame);

#ifdef __cplusplus
}
#endif
#endif /* FLASH_ATTN_TRANSFORMER_H */
