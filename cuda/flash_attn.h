/* flash_attn.h: exact attention as a C ABI. Plain C, no CUDA types; readable on its own. The other operations of a Transformer are in
 * flash_attn_transformer.h.
 *
 *     out = softmax(softmax_scale * q k^T + ...) v          exact attention, one call, no S in memory
 *
 * Layout       q   (batch, seqlen_q, nheads,   headdim)      out (batch, seqlen_q, nheads, headdim_v)
 *              k   (batch, seqlen_k, nheads_k, headdim)      lse (batch, nheads, seqlen_q) float32, natural log, contiguous
 *              v   (batch, seqlen_k, nheads_k, headdim_v)
 * Varlen       q, out (total_q, nheads, .), k, v (total_k, nheads_k, .), lse (nheads, total_q). Sequence b owns the rows
 *              cu_seqlens[b] .. cu_seqlens[b + 1] - 1. cu_seqlens is int32, has batch + 1 entries and is in the same memory as q.
 * Strides      in elements, 64-bit, free; they may be negative, and 0 (broadcast) for inputs. The last axis is contiguous.
 *
 * Rules that hold for every function
 *   - A call returns FA_OK or another status. After another status, fa_last_error() has this thread's text, and no output is touched.
 *   - The library allocates no device memory, never synchronises, prints nothing and never exits.
 *   - All GPU work goes to `stream` (a cudaStream_t; NULL = legacy default stream), on the device that owns q.
 *   - Structs start with struct_size = sizeof(the struct). Clear the rest with memset: zero always means the default.
 *   - The same arguments give the same bits on one machine: in the forward pass always, in the backward pass with `deterministic`.
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
    FA_BAD_ARGUMENT = 1,        /* an argument is wrong for every kernel: the text names the argument and quotes its value */
    FA_UNSUPPORTED = 2,         /* a legal call that no kernel of this build, or not the forced one, serves: the text says why */
    FA_WORKSPACE_TOO_SMALL = 3, /* the query of the function gives the size */
    FA_CUDA_ERROR = 4,          /* the CUDA runtime refused: no device, failed launch, an earlier asynchronous fault */
    FA_OUT_OF_MEMORY = 5,       /* the host has no memory left to start threads */
    FA_RANK_LOST = 6 /* flash_attn_distributed.h: another rank of the group is late, has ended, or broke off: the group is over */
} fa_status;

typedef enum fa_device { FA_CPU = 1, FA_CUDA = 2 } fa_device;
typedef enum fa_dtype { FA_FLOAT32 = 1, FA_FLOAT16 = 2, FA_BFLOAT16 = 3, FA_FLOAT8_E4M3 = 4, FA_INT8 = 5 } fa_dtype;

/* A 4-D array: element (b, row, head, d) is data[b * batch_stride + row * row_stride + head * head_stride + d]. Varlen calls ignore
 * batch_stride. */
typedef struct fa_tensor {
    void* data;
    int64_t batch_stride;
    int64_t row_stride;
    int64_t head_stride;
} fa_tensor;

/* A (batch, nheads, seqlen_q, seqlen_k) array that is added to the scores (bias) or selects them (mask). Stride 0 broadcasts an axis;
 * columns are contiguous. In a varlen call rows and columns count from the start of each sequence. */
typedef struct fa_score_tensor {
    const void* data;
    int64_t batch_stride;
    int64_t head_stride;
    int64_t row_stride;
} fa_score_tensor;

/* Factors of a tensor's 8-bit elements: the value of an element is the element times the factor of its head and batch entry (in a varlen
 * call: of its head and sequence). The factors are positive floats at data[b * batch_stride + head * head_stride]. Stride 0, the default,
 * broadcasts an axis. */
typedef struct fa_descale {
    const float* data;
    int64_t batch_stride;
    int64_t head_stride;
} fa_descale;

/* A sequence of a varlen call that is a part of a longer one: some of its rows and some of its keys. Causal, windows and the distances of
 * ALiBi follow from `shift`, so rows and keys may come from anywhere in the whole sequence, and a part may have none of either. */
typedef struct fa_part {
    int32_t key_begin; /* the row of k and v that holds its first key; 0 <= key_begin <= total_k */
    int32_t seqlen_k;  /* its keys are rows key_begin .. key_begin + seqlen_k - 1. In the forward pass parts may share keys */
    int32_t shift;     /* i_aligned = i + shift, in place of the alignment at a corner; -2^30 .. 2^30 */
    int32_t first_row; /* for dropout: row i of the part is row first_row + i of the whole sequence, */
    int32_t first_key; /*   key j is its key first_key + j (first_key is a multiple of 8), */
    int32_t sequence;  /*   and this is the number of the sequence in the whole batch */
    int32_t seqlen_q;  /* its rows are cu_seqlens_q[b] .. + seqlen_q - 1, and those up to cu_seqlens_q[b + 1] belong to no part; 0 = all */
    int32_t reserved;
} fa_part;

typedef struct fa_attention_args {
    size_t struct_size;
    int32_t device;    /* fa_device: the memory that every pointer below points to */
    int32_t dtype;     /* fa_dtype of q, k, v */
    int32_t out_dtype; /* fa_dtype of out; 0 = dtype. For float8_e4m3 it is bfloat16 (0 means this) or float16 */

    int32_t batch;
    int32_t nheads;
    int32_t nheads_k;  /* nheads % nheads_k == 0; query head h reads key head h / (nheads / nheads_k) */
    int32_t headdim;   /* 1 .. 512 */
    int32_t headdim_v; /* 1 .. 512; 0 = headdim */
    int64_t seqlen_q;  /* varlen: the length of the longest sequence, or more. On a GPU cu_seqlens cannot be read before the */
    int64_t seqlen_k;  /*   launch; nothing past these lengths, or past total_q and total_k, is touched */

    fa_tensor q, k, v, out;
    float* lse; /* log of the sum of the exponentials of each row, -inf for an empty row; NULL = not wanted */

    const int32_t* cu_seqlens_q; /* both or neither (but see parts); not decreasing, from 0 to at most total_q (total_k) */
    const int32_t* cu_seqlens_k;
    int64_t total_q;
    int64_t total_k;

    /* Scores, in this order: scale, softcap, ALiBi, bias, mask, causal and window, sinks, dropout. */
    float softmax_scale; /* read when has_softmax_scale is 1; otherwise the scale is 1 / sqrt(headdim) */
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
    int64_t window_left; /* with causal the right edge is i_aligned, whatever window_right says */
    int64_t window_right;
    const float* sinks;    /* (nheads) one more logit in the denominator of every row; lse includes it. NULL = none */
    float dropout_p;       /* 0 <= p < 1; used as round(65536 p) / 65536, on the normalised probabilities */
    int32_t deterministic; /* read by the backward pass; the forward pass is always reproducible */
    uint64_t dropout_seed; /* of Philox4x32-10; attention/common/dropout.h says which bits decide which element */
    uint64_t dropout_offset;

    int32_t allow_tf32;  /* float32 inputs may use tf32 tensor cores; otherwise they get real float32 arithmetic */
    int32_t num_threads; /* CPU: 0 = one per available core */
    const char* kernel;  /* forces a kernel by name; NULL = the environment variable FLASH_ATTN_KERNEL, else the best kernel */
    void* workspace;     /* any alignment; the contents are scratch */
    size_t workspace_bytes;

    fa_descale q_descale; /* (batch, nheads); float8_e4m3 requires the three factors, every other dtype has none (NULL) */
    fa_descale k_descale; /* (batch, nheads_k) */
    fa_descale v_descale; /* (batch, nheads_k) */
    /* float8_e4m3 only. 1: P v is summed over all keys in the tensor cores, whose sums of 8-bit products keep 14 bits, so a mean of v
     * shrinks as keys are added. 0, the default: the sum of every 1024 keys is added up in float, so the mean does not shrink; this is
     * slower for more than 1024 keys. */
    int32_t fast_accum;
    int32_t first_head; /* for dropout: head h of this call counts as head first_head + h */
    /* (batch), in the memory of q: the sequences of this varlen call are parts of longer ones. cu_seqlens_q gives their rows as always,
     * but may begin above 0; cu_seqlens_k is NULL and top_left 0. Bias, mask and everything that has an entry for each sequence go by the
     * part: its rows, its keys and its number b. In the backward pass the keys of each part, also of one without keys, begin where those of
     * the part before it end, or later; rows of dk and dv that belong to no part are not written. NULL = whole sequences. */
    const fa_part* parts;
    /* (batch, nheads) float32, contiguous: of each sequence and query head the greatest score that the softmax gets, after scale, softcap,
     * ALiBi, bias, mask, causal and window; sinks are no scores, and dropout comes later. -inf where no row sees a key. A head with a NaN
     * among its scores gets NaN or the greatest of some others. Part of the forward pass alone; NULL = not wanted. */
    float* max_score;
    /* (batch, nheads, seqlen_k), varlen (nheads, total_k), float32, contiguous: for each key and query head the sum over the rows of the
     * sequence of the key's probability, exp(score - lse), before dropout. Keys of no sequence are not written. A second pass over q and k;
     * its workspace is part of the call's. Not with parts, which may share keys. Part of the forward pass alone; NULL = not wanted. */
    float* key_sums;
    /* Keys come in chunks of this many, and row i sees those of the chunk that i_aligned lies in: j with floor(j / attention_chunk) =
     * floor(i_aligned / attention_chunk), beside causal and window. Not with parts, whose keys may begin inside a chunk. 0 = off */
    int32_t attention_chunk;
    int32_t reserved2;
} fa_attention_args;

/* What a call with these arguments would do. */
typedef struct fa_attention_plan {
    size_t struct_size;
    int32_t status; /* the status that a launch with enough workspace would return */
    int32_t reserved;
    size_t workspace_bytes;
    char kernel[32];    /* the kernel that would run; empty when status is not FA_OK */
    char why_not[1472]; /* one line for each kernel that is preferred to that one: "name: reason" */
} fa_attention_plan;

/* out = attention of q over k and v. Errors: every fa_status. */
FA_API fa_status fa_attention_forward(const fa_attention_args* args, void* stream);

/* Fills *plan and launches nothing. NULL data pointers are allowed. Returns plan->status. */
FA_API fa_status fa_attention_query(const fa_attention_args* args, fa_attention_plan* plan);

/* ---- gradients ---- */

/* The gradient of a score tensor, float32. An axis of stride 0 is summed over; columns are contiguous. In a varlen call rows and columns
 * count from the start of each sequence. */
typedef struct fa_score_gradient {
    float* data;
    int64_t batch_stride;
    int64_t head_stride;
    int64_t row_stride;
} fa_score_gradient;

/* The gradients of sum(out * dout) + sum(lse * dlse), where out and lse are what fa_attention_forward returns. S is computed again, tile by
 * tile, and P from lse:
 *     P = exp(S - lse),  dP = dout v^T,  dS = P (dP - rowsum(dout * out) + dlse),  dq = scale dS k,  dk = scale dS^T q,  dv = P^T dout */
typedef struct fa_attention_backward_args {
    size_t struct_size;
    /* The arguments of the forward call, unchanged: its inputs, its out, its lse (required here) and every option. Five fields belong to
     * the backward call instead: kernel (NULL = the environment variable FLASH_ATTN_BACKWARD_KERNEL, else the best kernel), num_threads,
     * workspace, workspace_bytes, and deterministic (1 = equal arguments give bitwise equal results). float8_e4m3 has no backward pass. */
    const fa_attention_args* forward;
    fa_tensor dout;          /* like out */
    fa_tensor dq, dk, dv;    /* like q, k, v, of their dtype */
    fa_score_gradient dbias; /* data NULL = not wanted; requires a bias. Elements that belong to no pair are zero */
    float* dsinks;           /* (nheads); NULL = not wanted; requires sinks */
    int32_t accumulate;      /* 1 = every gradient is added to what its destination holds, and the sum is rounded once */
    int32_t reserved;
    const float* dlse; /* the gradient of lse, like lse; NULL = zero. Where lse is -inf, it does not matter */
} fa_attention_backward_args;

FA_API fa_status fa_attention_backward(const fa_attention_backward_args* args, void* stream);

/* The same as fa_attention_query, for the backward pass. */
FA_API fa_status fa_attention_backward_query(const fa_attention_backward_args* args, fa_attention_plan* plan);

/* ---- attention over a cache of keys and values ---- */

/* Factors of the 8-bit elements of a cache: the value of an element is the element times its factor. The factors are positive floats at
 * data[b * batch_stride + row * row_stride + head * head_stride]. b and row are those of the cache: entry and key, or page and row of the
 * page. With row_stride 0 there is one factor for each head, which is only read. Otherwise there is one for each token and head, and an
 * appended token writes its own. */
typedef struct fa_cache_scale {
    float* data;
    int64_t batch_stride;
    int64_t row_stride;
    int64_t head_stride;
} fa_cache_scale;

/* One step of inference: the new keys and values are rotated and appended to the cache, then q, rotated, attends to all of the cache.
 * Lengths and tables are read on the device, so a captured call may be replayed after they have changed. Only on the CPU can the host
 * check them. On a GPU an entry out of range is clamped: the call then reads wrong keys, but no wild address, and writes nothing there. */
typedef struct fa_kvcache_args {
    size_t struct_size;
    /* The forward call: q, out, lse and every option except cu_seqlens, bias, mask and dropout. Its k and v are the cache, of any strides:
     *   contiguous  (cache_batch, seqlen_k, nheads_k, dim): seqlen_k is the number of keys that an entry can hold
     *   paged       (cache_batch, page_size, nheads_k, dim): key j of sequence b is row j % page_size of page
     *               block_table[b * block_table_stride + j / page_size]; seqlen_k is the number of keys that a row of the table can hold
     * headdim may be 576 with headdim_v = 512. v may be the first columns of k. Then v_new has to be the first columns of k_new, and a
     * call that appends has neither a rotary embedding nor an 8-bit cache. The workspace is that of the whole call. */
    const fa_attention_args* attention;
    int32_t cache_dtype;            /* fa_dtype of the cache: 0 = dtype, FA_FLOAT8_E4M3 or FA_INT8 */
    int32_t cache_batch;            /* entries of the cache, or pages; with 0 every sequence is empty */
    const int32_t* cache_seqlens;   /* (batch) keys in the cache before this call, at most seqlen_k - seqlen_new. Below 0: an idle
                                       sequence, which appends nothing and whose rows are empty. NULL = seqlen_k - seqlen_new */
    const int32_t* cache_batch_idx; /* (batch) entry of each sequence, for a contiguous cache; NULL = 0, 1, ... */
    const int32_t* block_table;     /* (batch, pages of a sequence); NULL = contiguous. Entries past a sequence's keys are not read */
    int64_t block_table_stride;
    int32_t page_size; /* any from 1; 0 = contiguous */
    int32_t seqlen_new;
    fa_tensor k_new, v_new; /* (batch, seqlen_new, nheads_k, dim) of dtype; they become keys cache_seqlens[b] .. of the cache */

    /* Rotary embedding: cosines and sines (rotary_rows, rotary_dim / 2), contiguous, row t for position t. New key t stands at position
     * cache_seqlens[b] + t. So does row t of q when causal, a window or chunks are set; otherwise all rows of q stand at cache_seqlens[b].
     * Without new keys q alone turns. */
    const void *rotary_cos, *rotary_sin; /* NULL = off */
    int32_t rotary_dtype;                /* fa_dtype: 0 = dtype, or FA_FLOAT32 */
    int32_t rotary_rows;                 /* more than every position: the CPU refuses others, a GPU turns them by the last row */
    int32_t rotary_dim;                  /* even, 2 .. headdim */
    int32_t rotary_interleaved;          /* pairs (2i, 2i + 1) instead of (i, i + rotary_dim / 2) */

    fa_cache_scale k_scale, v_scale; /* both with an 8-bit cache, otherwise NULL */
    int32_t batch_invariant;         /* 1 = the bits of a sequence follow from its own keys, not from the batch or the capacity */
    int32_t num_splits;              /* pieces that the keys of a sequence are cut into, 1 .. 256; 0 = the kernel chooses */
    /* As in flash_attn_transformer.h. This call may read the cache (except the rows that it appends itself), the factors, lengths and
     * tables of the cache, and the tables of the rotary embedding at once. So no kernel between the last plain launch and this call may
     * write them. */
    int32_t programmatic;
    int32_t tree_keys; /* draft tokens at the end of every sequence, 1 .. 64; 0 = no tree */
    /* A tree of draft tokens (speculative decoding), in place of causal and window. With L keys in sequence b, appended ones included, row
     * i of q sees every key before L - tree_keys, and key L - tree_keys + j if and only if bit j (1 << j) of tree_mask[b *
     * tree_batch_stride + i * tree_row_stride] is set. Other bits, and those of keys before the first, do not matter. Neither causal,
     * window, ALiBi nor a rotary embedding: they count positions, and the positions of a tree are not those of its rows. Read on the device
     * by the call, not before the kernels in front of it have ended. */
    const uint64_t* tree_mask;
    int64_t tree_batch_stride; /* 0 = one tree for all sequences */
    int64_t tree_row_stride;
    /* (batch) how many keys at the beginning of a sequence's entry, or of its pages, are padding: 0 .. cache_seqlens[b]. No row sees them,
     * and alignment, ALiBi and chunks count the keys behind them. cache_seqlens and the positions of the rotary embedding count them. NULL
     * = none */
    const int32_t* cache_leftpad;
} fa_kvcache_args;

FA_API fa_status fa_kvcache_attention(const fa_kvcache_args* args, void* stream);

/* The same as fa_attention_query, for fa_kvcache_attention. */
FA_API fa_status fa_kvcache_query(const fa_kvcache_args* args, fa_attention_plan* plan);

/* Merges two attention results over disjoint keys into the result over their union (out may be out_a, lse may be lse_a):
 *     lse = log(exp(lse_a) + exp(lse_b)),   out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b
 * out_* (batch, seqlen, nheads, headdim_v) of `dtype`, lse_* (batch, nheads, seqlen) float32 contiguous.
 * A side with lse = -inf has no keys and changes nothing, whatever its out holds. */
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

/* Rounds x, of `dtype` float32, float16 or bfloat16, to float8_e4m3, with a factor for every head of every batch entry:
 *     out = round(x / descale),   descale = max |x| / 448 over the rows of the head (1 for a head of zeros)
 * x and out are (batch, seqlen, nheads, headdim), x is finite; descale is (batch, nheads), float32, contiguous.
 * With hadamard every row is first multiplied by random signs, which follow from the seed, and by the orthonormal Hadamard matrix; headdim
 * is then a power of two. This spreads outliers over the row. q k^T does not change when q and k are rotated with the same seed. */
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

/* The kernels of the forward pass in this build, best first on each device: index 0 .. fa_kernel_count() - 1. Beyond, name and summary are
 * NULL and the device is 0. */
FA_API int32_t fa_kernel_count(void);
FA_API const char* fa_kernel_name(int32_t index);
FA_API const char* fa_kernel_summary(int32_t index);
FA_API int32_t fa_kernel_device(int32_t index); /* fa_device */

/* The kernels of the backward pass. */
FA_API int32_t fa_backward_kernel_count(void);
FA_API const char* fa_backward_kernel_name(int32_t index);
FA_API const char* fa_backward_kernel_summary(int32_t index);
FA_API int32_t fa_backward_kernel_device(int32_t index);

FA_API const char* fa_status_name(fa_status status); /* "FA_BAD_ARGUMENT" */
FA_API const char* fa_last_error(void);              /* text of this thread's last failure, never NULL */
FA_API const char* fa_version(void);                 /* "0.1.0" */
FA_API const char* fa_build_info(void);              /* compiler, CUDA version and GPU targets of this build */
FA_API int32_t fa_cuda_device_count(void);           /* 0 without a GPU, a driver, or CUDA in the build; never fails */

#ifdef __cplusplus
}
#endif
#endif /* FLASH_ATTN_H */
