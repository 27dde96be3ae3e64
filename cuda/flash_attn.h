/* flash_attn.h: the whole C ABI of flash-attn-minimal. Plain C, no CUDA types; readable on its own.
 *
 *     out = softmax(softmax_scale * q k^T + ...) v          exact attention, one call, no S in memory
 *
 * Layout       q   (batch, seqlen_q, nheads,   headdim)      out (batch, seqlen_q, nheads, headdim_v)
 *              k   (batch, seqlen_k, nheads_k, headdim)      lse (batch, nheads, seqlen_q) float32, natural log, contiguous
 *              v   (batch, seqlen_k, nheads_k, headdim_v)
 * Varlen       q, out (total_q, nheads, .), k, v (total_k, nheads_k, .), lse (nheads, total_q); sequence b owns the rows
 *              cu_seqlens[b] .. cu_seqlens[b + 1] - 1 (int32, batch + 1 entries, in the same memory as q).
 * Strides      in elements, 64-bit, free (negative and 0 = broadcast allowed for inputs); the last axis is contiguous.
 *
 * Rules that hold for every function
 *   - A call returns FA_OK or a status; fa_last_error() then has this thread's text. On an error no output is touched.
 *   - The library allocates no device memory, never synchronises, prints nothing and never exits.
 *   - All GPU work goes to `stream` (a cudaStream_t, NULL = legacy default stream); the device is the one that owns q.
 *   - Structs start with struct_size = sizeof(the struct); clear the rest with memset: zero always means the default.
 *   - Same arguments, same bits: the forward pass is reproducible on one machine, the backward pass with `deterministic`.
 */
#ifndef FLASH_ATTN_H
#define FLASH_ATTN_H

#include <stddef.h>
#include <stdint.h>

#define FA_VERSION_MAJOR 0
#define FA_VERSION_MINOR 1
#define FA_VERSION_PATCH 0

#if defined(__GNUC__)
#define FA_API __attribute__((visibility("default")))
#else
#define FA_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

typedef enum fa_status {
    FA_OK = 0,
    FA_BAD_ARGUMENT = 1,        /* an argument is wrong for every kernel: the text names it and quotes its value */
    FA_UNSUPPORTED = 2,         /* legal, but no kernel here (or not the forced one) serves it: the text says why */
    FA_WORKSPACE_TOO_SMALL = 3, /* ask fa_attention_query for the size */
    FA_CUDA_ERROR = 4,          /* the CUDA runtime refused: no device, failed launch, an earlier asynchronous fault */
    FA_OUT_OF_MEMORY = 5        /* the host has no memory left to start threads */
} fa_status;

typedef enum fa_device { FA_CPU = 1, FA_CUDA = 2 } fa_device;
typedef enum fa_dtype { FA_FLOAT32 = 1, FA_FLOAT16 = 2, FA_BFLOAT16 = 3, FA_FLOAT8_E4M3 = 4, FA_INT8 = 5 } fa_dtype;

/* A 4-D array seen as data[b * batch_stride + row * row_stride + head * head_stride + d]; varlen ignores batch_stride. */
typedef struct fa_tensor {
    void* data;
    int64_t batch_stride;
    int64_t row_stride;
    int64_t head_stride;
} fa_tensor;

/* A (batch, nheads, seqlen_q, seqlen_k) array added to or selecting scores; stride 0 broadcasts an axis, columns are contiguous.
 * In a varlen call rows and columns count from the start of each sequence. */
typedef struct fa_score_tensor {
    const void* data;
    int64_t batch_stride;
    int64_t head_stride;
    int64_t row_stride;
} fa_score_tensor;

/* Factors by which the 8-bit values of a tensor count, one for each head of each batch entry (of each sequence in a varlen call):
 * positive floats at data[b * batch_stride + head * head_stride]; stride 0, the default, broadcasts an axis. */
typedef struct fa_descale {
    const float* data;
    int64_t batch_stride;
    int64_t head_stride;
} fa_descale;

typedef struct fa_attention_args {
    size_t struct_size;
    int32_t device;    /* fa_device: where every pointer below lives */
    int32_t dtype;     /* fa_dtype of q, k, v */
    int32_t out_dtype; /* fa_dtype of out; 0 = dtype, bfloat16 for float8_e4m3, which may also ask for float16 */

    int32_t batch;
    int32_t nheads;
    int32_t nheads_k;  /* nheads % nheads_k == 0; query head h reads key head h / (nheads / nheads_k) */
    int32_t headdim;   /* 1 .. 512 */
    int32_t headdim_v; /* 1 .. 512; 0 = headdim */
    int64_t seqlen_q;  /* varlen: the longest sequence or more. On the GPU, where cu_seqlens cannot be read before the */
    int64_t seqlen_k;  /*   launch, nothing past these lengths or past total_q, total_k is touched */

    fa_tensor q, k, v, out;
    float* lse; /* log of the sum of exponentials of each row, -inf for an empty row; NULL = not wanted */

    const int32_t* cu_seqlens_q; /* both or neither; non-decreasing, starting at 0, at most total_q (total_k) */
    const int32_t* cu_seqlens_k;
    int64_t total_q;
    int64_t total_k;

    /* Scores, in this order: scale, softcap, ALiBi, bias, mask, causal and window, sinks, dropout. */
    float softmax_scale; /* read when has_softmax_scale, else 1 / sqrt(headdim) */
    int32_t has_softmax_scale;
    float softcap;             /* s = softcap * tanh(s / softcap); 0 = off */
    const float* alibi_slopes; /* (nheads), or (batch, nheads) with alibi_batch_stride; s -= slope * |i_aligned - j| */
    int64_t alibi_batch_stride;
    fa_score_tensor bias; /* data NULL = none */
    int32_t bias_dtype;   /* fa_dtype; 0 = dtype */
    int32_t reserved0;
    fa_score_tensor mask; /* uint8, non-zero = attend; data NULL = none */
    int32_t top_left;     /* i_aligned = i + seqlen_k - seqlen_q (0, the default: bottom-right corner) or i (1: top-left) */
    int32_t causal;       /* row i sees j <= i_aligned */
    int32_t has_window;   /* row i sees i_aligned - window_left <= j <= i_aligned + window_right, -1 = open */
    int32_t reserved1;
    int64_t window_left; /* with causal the right edge is i_aligned whatever window_right says */
    int64_t window_right;
    const float* sinks;    /* (nheads) one more logit in every row's denominator; NULL = none. lse includes it. */
    float dropout_p;       /* 0 <= p < 1, used as round(65536 p) / 65536 on the normalised probabilities */
    int32_t deterministic; /* forward is always reproducible; the backward pass reads it */
    uint64_t dropout_seed; /* Philox4x32-10, see attention/philox.h for which bits decide which element */
    uint64_t dropout_offset;

    int32_t allow_tf32;  /* fp32 inputs may use tf32 tensor cores; otherwise real fp32 arithmetic */
    int32_t num_threads; /* CPU: 0 = one per available core */
    const char* kernel;  /* force a kernel by name; NULL = environment FLASH_ATTN_KERNEL, else the best one */
    void* workspace;     /* any alignment; contents are scratch */
    size_t workspace_bytes;

    fa_descale q_descale; /* (batch, nheads): required by float8_e4m3, NULL for every other dtype */
    fa_descale k_descale; /* (batch, nheads_k) */
    fa_descale v_descale; /* (batch, nheads_k) */
    /* float8_e4m3: P v is summed over all keys in the tensor cores, whose sums of 8-bit products keep 14 bits. The default, 0,
     * promotes every 1024 keys' sum to float: slower on more keys than that, and a mean of v does not fade. */
    int32_t fast_accum;
    int32_t reserved2;
} fa_attention_args;

/* What a call with these arguments would do. */
typedef struct fa_attention_plan {
    size_t struct_size;
    int32_t status; /* the status a launch would return, workspace aside */
    int32_t reserved;
    size_t workspace_bytes;
    char kernel[32];    /* the kernel that would run; empty when status is not FA_OK */
    char why_not[1472]; /* one line for each kernel preferred to it: "name: reason" */
} fa_attention_plan;

/* out = attention of q over k and v. Errors: every fa_status. */
FA_API fa_status fa_attention_forward(const fa_attention_args* args, void* stream);

/* Fills *plan without launching; NULL data pointers are allowed. Returns plan->status. */
FA_API fa_status fa_attention_query(const fa_attention_args* args, fa_attention_plan* plan);

/* ---- gradients ---- */

/* A gradient of a score tensor, float32: an axis of stride 0 is summed over; columns are contiguous. In a varlen call rows and columns
 * count from the start of each sequence. */
typedef struct fa_score_gradient {
    float* data;
    int64_t batch_stride;
    int64_t head_stride;
    int64_t row_stride;
} fa_score_gradient;

/* The gradients of sum(out * dout), out as fa_attention_forward returns it. S is computed again from lse, tile by tile.
 *     P = exp(S - lse),  dP = dout v^T,  dS = P (dP - rowsum(dout * out)),  dq = scale dS k,  dk = scale dS^T q,  dv = P^T dout */
typedef struct fa_attention_backward_args {
    size_t struct_size;
    /* The forward call's arguments: its inputs, its out and its lse (required here) and every option, unchanged. Five of its fields
     * mean the backward call: kernel (NULL = environment FLASH_ATTN_BACKWARD_KERNEL, else the best one), num_threads, workspace,
     * workspace_bytes, and deterministic: 1 = bitwise equal results from equal arguments. float8_e4m3 has no backward pass. */
    const fa_attention_args* forward;
    fa_tensor dout;          /* like out */
    fa_tensor dq, dk, dv;    /* like q, k, v; their dtype */
    fa_score_gradient dbias; /* data NULL = not wanted; wants a bias. Elements no pair belongs to are zero */
    float* dsinks;           /* (nheads); NULL = not wanted; wants sinks */
    int32_t accumulate;      /* add to what every gradient holds, rounded once */
    int32_t reserved;
} fa_attention_backward_args;

FA_API fa_status fa_attention_backward(const fa_attention_backward_args* args, void* stream);

/* As fa_attention_query, for the backward pass. */
FA_API fa_status fa_attention_backward_query(const fa_attention_backward_args* args, fa_attention_plan* plan);

/* ---- attention over a cache of keys and values ---- */

/* Factors by which the 8-bit elements of a cache count: positive floats at
 * data[b * batch_stride + row * row_stride + head * head_stride], with b and row as in the cache itself (entry and key, or page and
 * row of the page). row_stride 0: one for each head, read only. Otherwise one for each token: appending a token writes its own. */
typedef struct fa_cache_scale {
    float* data;
    int64_t batch_stride;
    int64_t row_stride;
    int64_t head_stride;
} fa_cache_scale;

/* One step of inference: the new keys and values are rotated and join the cache, then q, rotated, attends to all of it.
 * Lengths and tables are read on the device, so a captured call may be replayed after they have changed. The host can check them
 * on the CPU alone; on a GPU an entry out of range is clamped: wrong keys, never a wild address, and nothing is written for it. */
typedef struct fa_kvcache_args {
    size_t struct_size;
    /* The forward call: its q, out, lse and every option but cu_seqlens, bias, mask and dropout. Its k and v are the cache, any strides:
     *   contiguous  (cache_batch, seqlen_k, nheads_k, dim): seqlen_k is what an entry can hold
     *   paged       (cache_batch, page_size, nheads_k, dim): key j of sequence b is row j % page_size of page
     *               block_table[b * block_table_stride + j / page_size]; seqlen_k is what a row of the table can hold
     * headdim may be 576 with headdim_v = 512. v may be the first columns of k: then v_new has to be those of k_new, and neither the
     * rotary embedding nor an 8-bit cache goes with appending. The workspace is the whole call's. */
    const fa_attention_args* attention;
    int32_t cache_dtype;            /* fa_dtype of the cache: 0 = dtype, FA_FLOAT8_E4M3 or FA_INT8 */
    int32_t cache_batch;            /* entries of the cache, or pages */
    const int32_t* cache_seqlens;   /* (batch) keys in the cache before this call, at most seqlen_k - seqlen_new; below 0: an idle
                                       sequence, which appends nothing and whose rows are empty. NULL = seqlen_k - seqlen_new */
    const int32_t* cache_batch_idx; /* (batch) entry of each sequence; NULL = 0, 1, ...; contiguous only */
    const int32_t* block_table;     /* (batch, pages of a sequence); NULL = contiguous. Entries past a sequence's keys are not read */
    int64_t block_table_stride;
    int32_t page_size; /* any from 1; 0 = contiguous */
    int32_t seqlen_new;
    fa_tensor k_new, v_new; /* (batch, seqlen_new, nheads_k, dim) of dtype, rows cache_seqlens[b] .. of the cache */

    /* Rotary embedding: cosines and sines (rotary_rows, rotary_dim / 2), contiguous, row t for position t. Key t of the new ones
     * stands at position cache_seqlens[b] + t; so does row t of q when causal or a window is set, else all rows at cache_seqlens[b]. */
    const void *rotary_cos, *rotary_sin; /* NULL = off; they want seqlen_new >= 1 */
    int32_t rotary_dtype;                /* fa_dtype: 0 = dtype, or FA_FLOAT32 */
    int32_t rotary_rows;                 /* positions from here on turn by the last row */
    int32_t rotary_dim;                  /* even, 2 .. headdim */
    int32_t rotary_interleaved;          /* pairs (2i, 2i + 1) instead of (i, i + rotary_dim / 2) */

    fa_cache_scale k_scale, v_scale; /* both, with an 8-bit cache; else NULL */
    int32_t batch_invariant;         /* 1 = a sequence's result does not depend on what else is in the batch */
    int32_t num_splits;              /* pieces that a sequence's keys are cut into, 1 .. 256; 0 = chosen */
    /* As in the small operations below; this call may read the cache (but for the rows that it appends itself), its factors, lengths and
     * tables and the rotary embedding's at once, so no kernel between the last plain launch and this call may write them. */
    int32_t programmatic;
    int32_t reserved;
} fa_kvcache_args;

FA_API fa_status fa_kvcache_attention(const fa_kvcache_args* args, void* stream);

/* As fa_attention_query. */
FA_API fa_status fa_kvcache_query(const fa_kvcache_args* args, fa_attention_plan* plan);

/* Merges two attention results over disjoint keys into the result over their union (out may be out_a, lse may be lse_a):
 *     lse = log(exp(lse_a) + exp(lse_b)),   out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b
 * out_* (batch, seqlen, nheads, headdim_v) of `dtype`, lse_* (batch, nheads, seqlen) float32 contiguous.
 * lse = -inf marks a side with nothing in it: the identity, whatever its out holds. */
typedef struct fa_merge_args {
    size_t struct_size;
    int32_t device;
    int32_t dtype;
    int32_t batch;
    int32_t nheads;
    int32_t headdim_v;
    int32_t reserved;
    int64_t seqlen;
    fa_tensor out_a, out_b, out;
    const float *lse_a, *lse_b;
    float* lse;
} fa_merge_args;

FA_API fa_status fa_attention_merge(const fa_merge_args* args, void* stream);

/* Rounds x, of `dtype` float32, float16 or bfloat16, to float8_e4m3 with a factor for every head of every batch entry:
 *     out = round(x / descale),   descale = max |x| / 448 over the head's rows (1 for a head of zeros)
 * x and out (batch, seqlen, nheads, headdim), finite; descale (batch, nheads) float32, contiguous.
 * With hadamard every row is first multiplied by random signs, a function of the seed, and by the orthonormal Hadamard matrix,
 * headdim a power of two: outliers spread over the row, and q k^T stays as it is when q and k are rotated with one seed. */
typedef struct fa_quantize_args {
    size_t struct_size;
    int32_t device;
    int32_t dtype;
    int32_t batch;
    int32_t nheads;
    int32_t headdim; /* 1 .. 512 */
    int32_t hadamard;
    int64_t seqlen;
    uint64_t seed;
    fa_tensor x, out;
    float* descale;
} fa_quantize_args;

FA_API fa_status fa_quantize_fp8(const fa_quantize_args* args, void* stream);

/* ---- the small operations around attention ----
 *
 * Matrices are data[row * row_stride + column], columns contiguous. Sums are float32 whatever the types; results are rounded once.
 * A dtype field of 0 means the type named beside it; all of them may be float32, float16 or bfloat16.
 *
 * programmatic = 1 launches programmatically: on sm_90 and newer the kernel may start, and prepare, while the kernels before it in the
 * stream still run; elsewhere, and on the CPU, it changes nothing. What it reads of the arrays below waits for the end of those kernels,
 * with one exception: fa_linear reads weight and norm_weight at once, so no kernel between the last plain launch and this one may write
 * them. Captured graphs keep the property. */

typedef struct fa_matrix {
    void* data;
    int64_t row_stride; /* in elements */
} fa_matrix;

/* out = x / sqrt(mean(x^2) + eps) * weight, row by row. With a residual x += residual comes first, and x keeps the sum. */
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

/* Turns pairs of every head by the angles of its position: (a, b) becomes (a cos - b sin, a sin + b cos). Pair j of rotary_dim / 2 is
 * (j, j + rotary_dim / 2), or with interleaved (2 j, 2 j + 1); what lies beyond rotary_dim is copied. */
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
    int32_t inverse; /* turn back: the gradient */
    int32_t programmatic;
    int64_t seqlen;
    fa_tensor x;           /* (batch, seqlen, nheads, headdim) */
    fa_tensor out;         /* the same; may be x */
    const void *cos, *sin; /* (table_rows, rotary_dim / 2) */
    int64_t table_row_stride;
    int64_t table_rows;
    /* NULL: token i of a sequence has position i. Else (batch): it has positions[b] + i; or, with per_token, (batch, seqlen): its own.
     * Positions outside the tables are refused on the CPU and take the nearest row on the GPU. */
    const int32_t* positions;
    int32_t per_token;
    int32_t num_threads;
} fa_rope_args;

FA_API fa_status fa_rope(const fa_rope_args* args, void* stream);

/* out = silu(gate) * up, silu(x) = x / (1 + e^-x): gate is columns 0 .. dim - 1 of gate_up, up is dim .. 2 dim - 1. */
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

/* Draws a token of every row from softmax(logits / temperature), cut to the top_k likeliest tokens and then to the fewest likeliest that
 * hold top_p of what is left. Equal logits count in the order of their indices; temperature = 0 takes the first of the largest.
 * A row that holds a NaN, or nothing above -inf, gives -1. The same arguments draw the same tokens on every device: the weights are
 * integers and the random numbers Philox4x32-10 (ops/sampling.h). */
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
    uint64_t offset;      /* draws of one seed with different offsets are independent, and so are those of different steps */
    const int64_t* seeds; /* (batch) a seed of its own for each row, whose draws then do not depend on its place; NULL = seed for all */
    const int32_t* step;  /* read when the kernel runs, so that a replayed graph draws anew: step[b * step_stride]; NULL = 0 */
    int64_t step_stride;  /* 0 = one step for all rows */
    int32_t num_threads;
    int32_t reserved;
} fa_sample_args;

FA_API fa_status fa_sample(const fa_sample_args* args, void* stream);

/* out = residual + act(norm(x) weight^T + bias) for a few rows of x, at the speed the weights come from memory.
 * norm(x) is x, or with norm_weight the RMSNorm of fa_rms_norm; act is nothing, or with swiglu silu(y[n]) * y[n + out_features / 2].
 * Any number of rows is served; on a GPU, with large weights, a library of matrix products is faster from two rows on. */
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
    int32_t out_features; /* rows of weight */
    int32_t swiglu;
    int64_t rows;
    fa_matrix x;             /* (rows, in_features) */
    fa_matrix weight;        /* (out_features, in_features) */
    fa_matrix residual;      /* (rows, columns of out); data NULL = none; may be out */
    fa_matrix out;           /* (rows, out_features), with swiglu half as many columns; not x */
    const void* bias;        /* (out_features); NULL = none */
    const void* norm_weight; /* (in_features); NULL = no norm */
    float eps;               /* of the norm */
    int32_t programmatic;
    int32_t num_threads;
    int32_t reserved;
    const char* kernel; /* force a kernel by name; NULL = environment FLASH_ATTN_DENSE_LINEAR_KERNEL, else the best one */
} fa_linear_args;

FA_API fa_status fa_linear(const fa_linear_args* args, void* stream);

/* As fa_attention_query; no kernel needs a workspace. */
FA_API fa_status fa_linear_query(const fa_linear_args* args, fa_attention_plan* plan);

/* ---- weights of 4 bits ----
 *
 *     weight[n][k] = code[n][k] * scale[n][k / block] * tensor_scale
 *
 *     FA_NVFP4   code E2M1 (0, 0.5, 1, 1.5, 2, 3, 4, 6 and negatives)   block  16   scale float8_e4m3   tensor_scale float32
 *     FA_MXFP4   code E2M1                                              block  32   scale E8M0, 2^(byte - 127); 255 = NaN
 *     FA_INT4    code two's complement, -8 .. 7                         block 128   scale float16
 *
 * A weight is quantised to its plain form, which files hold, and packed once for the products. cuda/linear/w4.h is the whole story. */

typedef enum fa_w4_format { FA_NVFP4 = 1, FA_MXFP4 = 2, FA_INT4 = 3 } fa_w4_format;

typedef struct fa_w4_weight {
    int32_t format;       /* fa_w4_format */
    int32_t out_features; /* 1 .. 2^24 rows */
    int32_t in_features;  /* 1 .. 2^24 columns */
    int32_t reserved;
    uint8_t* codes;      /* (out_features, ceil(in_features / 2)): an even column in the low 4 bits, its right neighbour in the high ones */
    void* scales;        /* (out_features, ceil(in_features / block)) bytes, of FA_INT4 float16 */
    float* tensor_scale; /* one number, required by FA_NVFP4; NULL = 1 */
} fa_w4_weight;

/* Rounds a matrix: codes to the nearest, half way to even. A block's scale takes its largest number to the largest code (of FA_MXFP4
 * the power of two below it to 4); with search it is the scale of least squared error among those near it. The tensor_scale of FA_NVFP4
 * takes the largest number of all to 6 * 448; of other formats it becomes 1. A block with a NaN or an infinity gets the scale NaN.
 * Every step is a single rounding: CPU and GPU write the same bytes. */
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

/* out = code * scale (exact in float32) * tensor_scale (rounded), rounded to out_dtype. */
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

/* What fa_w4_pack writes: *bytes. */
FA_API fa_status fa_w4_packed_bytes(int32_t format, int32_t out_features, int32_t in_features, int32_t pair, int64_t* bytes);

/* Reorders a weight for fa_w4_linear, on either device to the same bytes. */
typedef struct fa_w4_pack_args {
    size_t struct_size;
    int32_t device;
    int32_t dtype; /* that products are made in: float16 or bfloat16 */
    int32_t pair;  /* SwiGLU: the first half of the rows is the gate, the second goes up; they will share tiles */
    int32_t num_threads;
    fa_w4_weight weight;
    void* packed; /* aligned to 128 bytes */
    int64_t packed_bytes;
} fa_w4_pack_args;

FA_API fa_status fa_w4_pack(const fa_w4_pack_args* args, void* stream);

/* fa_linear with a packed weight: out = residual + act(norm(x) weight^T + bias), for any number of rows. norm(x) is rounded to
 * compute_dtype before the product; sums are float32. programmatic: packed and norm_weight are read at once. */
typedef struct fa_w4_linear_args {
    size_t struct_size;
    int32_t device;
    int32_t dtype;         /* of x: float32, float16 or bfloat16, as all below */
    int32_t compute_dtype; /* what the weight was packed for: float16 or bfloat16 */
    int32_t format;        /* the weight's, as are these three */
    int32_t out_features;  /* with swiglu gate and up together */
    int32_t in_features;
    int32_t swiglu;         /* 1 if and only if it was packed as a pair */
    int32_t bias_dtype;     /* 0 = compute_dtype */
    int32_t norm_dtype;     /* 0 = dtype */
    int32_t residual_dtype; /* 0 = out_dtype */
    int32_t out_dtype;      /* 0 = dtype */
    float eps;              /* of the norm */
    int64_t rows;
    fa_matrix x;             /* (rows, in_features) */
    fa_matrix residual;      /* (rows, columns of out); data NULL = none; may be out */
    fa_matrix out;           /* (rows, out_features), with swiglu half as many columns; not x */
    const void* packed;      /* of fa_w4_pack, in `device` memory. The host compares its header with the fields above on the CPU alone */
    const void* bias;        /* (out_features); NULL = none */
    const void* norm_weight; /* (in_features); NULL = no norm */
    int32_t programmatic;
    int32_t num_threads;
    const char* kernel; /* force a kernel by name; NULL = environment FLASH_ATTN_LINEAR_KERNEL, else the best one */
    void* workspace;    /* any alignment; contents are scratch */
    size_t workspace_bytes;
} fa_w4_linear_args;

FA_API fa_status fa_w4_linear(const fa_w4_linear_args* args, void* stream);

/* As fa_attention_query. */
FA_API fa_status fa_w4_linear_query(const fa_w4_linear_args* args, fa_attention_plan* plan);

/* Products one behind the other: each as fa_w4_linear, and it may read what those before it have written. On Hopper chains of few rows are
 * one launch, whose weights come from memory without a pause between the products; programmatic is then that of products[0]. */
typedef struct fa_w4_linear_chain_args {
    size_t struct_size;
    const fa_w4_linear_args* products; /* (count), of one struct_size and device; kernel and workspace NULL */
    int32_t count;                     /* 1 .. 8 */
    int32_t ahead_count;               /* 0 .. 4 of the following */
    const void* ahead[4];              /* What later calls read first, such as weights, aligned to 16: a hint to bring it to the L2 cache */
    int64_t ahead_bytes[4];
    const char* kernel; /* force one by name: chain_w4_sm90 or one_by_one, on the CPU cpu; NULL = environment FLASH_ATTN_CHAIN_KERNEL,
                         * else the best one */
    void* workspace;    /* any alignment; contents are scratch */
    size_t workspace_bytes;
} fa_w4_linear_chain_args;

FA_API fa_status fa_w4_linear_chain(const fa_w4_linear_chain_args* args, void* stream);

/* As fa_attention_query. */
FA_API fa_status fa_w4_linear_chain_query(const fa_w4_linear_chain_args* args, fa_attention_plan* plan);

/* ---- XLA ---- */

/* Both passes as handlers of XLA's foreign function interface (openxla.org/xla/custom_call), to be registered for the platforms cpu and
 * CUDA: an XLA_FFI_CallFrame* in, NULL or an XLA_FFI_Error* with fa_last_error's text out. On a GPU they may be captured into a command
 * buffer. How a call is described is written at the top of api/xla_ffi.cpp. */
FA_API void* fa_xla_forward_cpu(void* call_frame);
FA_API void* fa_xla_forward_cuda(void* call_frame);
FA_API void* fa_xla_backward_cpu(void* call_frame);
FA_API void* fa_xla_backward_cuda(void* call_frame);

/* The kernels in this build, best first on each device: index 0 .. fa_kernel_count() - 1, NULL beyond. */
FA_API int32_t fa_kernel_count(void);
FA_API const char* fa_kernel_name(int32_t index);
FA_API const char* fa_kernel_summary(int32_t index);
FA_API int32_t fa_kernel_device(int32_t index); /* fa_device */

/* The same of the backward pass. */
FA_API int32_t fa_backward_kernel_count(void);
FA_API const char* fa_backward_kernel_name(int32_t index);
FA_API const char* fa_backward_kernel_summary(int32_t index);
FA_API int32_t fa_backward_kernel_device(int32_t index);

/* The same of fa_w4_linear. */
FA_API int32_t fa_linear_kernel_count(void);
FA_API const char* fa_linear_kernel_name(int32_t index);
FA_API const char* fa_linear_kernel_summary(int32_t index);
FA_API int32_t fa_linear_kernel_device(int32_t index);

/* The same of fa_w4_linear_chain. */
FA_API int32_t fa_chain_kernel_count(void);
FA_API const char* fa_chain_kernel_name(int32_t index);
FA_API const char* fa_chain_kernel_summary(int32_t index);
FA_API int32_t fa_chain_kernel_device(int32_t index);

/* The same of fa_linear. */
FA_API int32_t fa_dense_linear_kernel_count(void);
FA_API const char* fa_dense_linear_kernel_name(int32_t index);
FA_API const char* fa_dense_linear_kernel_summary(int32_t index);
FA_API int32_t fa_dense_linear_kernel_device(int32_t index);

FA_API const char* fa_status_name(fa_status status); /* "FA_BAD_ARGUMENT" */
FA_API const char* fa_last_error(void);              /* this thread's last failure, never NULL */
FA_API const char* fa_version(void);                 /* "0.1.0" */
FA_API const char* fa_build_info(void);              /* compiler, CUDA version and GPU targets of this build */
FA_API int32_t fa_cuda_device_count(void);           /* 0 without a GPU, a driver, or CUDA in the build; never fails */

#ifdef __cplusplus
}
#endif
#endif /* FLASH_ATTN_H */
