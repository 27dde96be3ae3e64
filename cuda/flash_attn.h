/* flash_attn.h: exact attention as a C ABI. Plain C without CUDA types; this header needs no other. The other operations of a Transformer
 * are in flash_attn_transformer.h.
 *
 *     out = softmax(softmax_scale * q k^T + ...) v          exact attention, one call, no S in memory
 *
 * Layout       q   (batch, seqlen_q, nheads,   headdim)      out (batch, seqlen_q, nheads, headdim_v)
 *              k   (batch, seqlen_k, nheads_k, headdim)      lse (batch, nheads, seqlen_q) float32, natural log, contiguous
 *              v   (batch, seqlen_k, nheads_k, headdim_v)
 * Varlen       q and out (total_q, nheads, .), k and v (total_k, nheads_k, .), lse (nheads, total_q). Sequence b owns the rows
 *              cu_seqlens[b] .. cu_seqlens[b + 1] - 1. cu_seqlens is int32 with batch + 1 entries, in the same memory (CPU or GPU) as q.
 * Strides      in elements, 64-bit. Any stride may be negative; those of inputs may be 0 (broadcast). The last axis is contiguous.
 *
 * Rules that hold for every function
 *   - A call returns FA_OK or an error status. On an error no output is touched, and fa_last_error() returns this thread's error text.
 *   - The library allocates no device memory, never synchronises, prints nothing and never exits.
 *   - All GPU work goes to `stream` (a cudaStream_t; NULL = legacy default stream), on the device that owns q.
 *   - Structs start with struct_size = sizeof(the struct). Clear the other fields with memset: zero always means the default.
 *   - Equal arguments give equal bits on one machine: always in the forward pass, and with `deterministic` in the backward pass.
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
    FA_UNSUPPORTED = 2,         /* a valid call that no kernel of this build (or not the forced kernel) supports: the text says why */
    FA_WORKSPACE_TOO_SMALL = 3, /* the matching query function returns the size */
    FA_CUDA_ERROR = 4,          /* an error of the CUDA runtime: no device, a failed launch, an earlier asynchronous fault */
    FA_OUT_OF_MEMORY = 5,       /* no host memory left, for threads for instance; fa_group_reserve: no memory of either kind */
    FA_RANK_LOST = 6 /* flash_attn_distributed.h: another rank is late, has ended or aborted; the group is unusable from then on */
} fa_status;

typedef enum fa_device { FA_CPU = 1, FA_CUDA = 2 } fa_device;
typedef enum fa_dtype { FA_FLOAT32 = 1, FA_FLOAT16 = 2, FA_BFLOAT16 = 3, FA_FLOAT8_E4M3 = 4, FA_INT8 = 5 } fa_dtype;

/* A 4-D array: element (b, row, head, d) is data[b * batch_stride + row * row_stride + head * head_stride + d].
 * Varlen calls ignore batch_stride. */
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

/* A mask by intervals: for each key, the rows that do not see it. Key j of a sequence has `numbers` int32_t, contiguous, at
 *     data[b * batch_stride + h * head_stride + j * key_stride]
 * Row i does not see the key if
 *     causal,     1 number:   i >= n[0]
 *     causal,     2 numbers:  n[0] <= i < n[1]
 *     not causal, 2 numbers:  i >= n[0]  or  i < n[1]
 *     not causal, 4 numbers:  n[0] <= i < n[1]  or  n[2] <= i < n[3]
 * Rows count from the start of their sequence. In a varlen call keys count through all sequences, as rows of k do, and batch_stride is
 * ignored; but with parts b is the part, and its rows and keys count from its first. Numbers below 0 act as 0, and those above seqlen_q as
 * seqlen_q. They are read on the device. */
typedef struct fa_row_indices {
    const int32_t* data; /* NULL = none */
    int64_t batch_stride;
    int64_t head_stride;
    int64_t key_stride;
    int32_t heads;   /* extent of the head axis: 1, nheads_k or nheads */
    int32_t numbers; /* 1, 2 or 4 */
} fa_row_indices;

/* A mask by blocks: row i sees key j only if the uint8_t
 *     data[b * batch_stride + h * head_stride + (i / row_block) * row_stride + j / key_block]
 * is not zero. Rows and keys count from the start of their sequence, in a varlen call too. */
typedef struct fa_block_mask {
    const void* data; /* NULL = none */
    int64_t batch_stride;
    int64_t head_stride;
    int64_t row_stride; /* from one block of rows to the next */
    int32_t heads;      /* extent of the head axis: 1, nheads_k or nheads */
    int32_t row_block;  /* rows of a block: 64 or 128 */
    int32_t key_block;  /* keys of a block: 64 or 128 */
    int32_t reserved;
} fa_block_mask;

/* Scale factors of a tensor with 8-bit elements: value = element * factor. Each head of each batch entry (varlen: of each sequence) has
 * one factor, a positive float at data[b * batch_stride + head * head_stride]. Stride 0, the default, broadcasts an axis. */
typedef struct fa_descale {
    const float* data;
    int64_t batch_stride;
    int64_t head_stride;
} fa_descale;

/* One sequence of a varlen call that is only a part of a longer sequence: some of its rows and some of its keys. Causal masks, windows
 * and ALiBi distances follow from `shift`, so the rows and the keys may come from different places of the whole sequence. A part may
 * have no rows or no keys. */
typedef struct fa_part {
    int32_t key_begin; /* row of k and v that holds the part's first key; 0 <= key_begin <= total_k */
    int32_t seqlen_k;  /* the part's keys are rows key_begin .. key_begin + seqlen_k - 1. Parts may share keys in the forward pass */
    int32_t shift;     /* i_aligned = i + shift, instead of alignment to a corner; -2^30 .. 2^30 */
    int32_t first_row; /* for dropout: row i of the part is row first_row + i of the whole sequence */
    int32_t first_key; /* for dropout: key j of the part is key first_key + j of the whole sequence; a multiple of 64 */
    int32_t sequence;  /* for dropout: index of the whole sequence in its batch */
    int32_t seqlen_q;  /* rows are cu_seqlens_q[b] .. + seqlen_q - 1; rows from there to cu_seqlens_q[b + 1] are in no part. 0 = all */
    int32_t reserved;
} fa_part;

typedef struct fa_attention_args {
    size_t struct_size;

    /* ---- shapes ---- */
    int32_t device;    /* fa_device: the memory that holds everything the pointers below point to */
    int32_t dtype;     /* fa_dtype of q, k, v */
    int32_t out_dtype; /* fa_dtype of out; 0 = dtype. With float8_e4m3 inputs: FA_BFLOAT16 (also 0) or FA_FLOAT16 */
    int32_t batch;
    int32_t nheads;
    int32_t nheads_k;  /* nheads % nheads_k == 0; query head h reads key head h / (nheads / nheads_k) */
    int32_t headdim;   /* 1 .. 512 */
    int32_t headdim_v; /* 1 .. 512; 0 = headdim */
    int64_t seqlen_q;  /* varlen: at least the length of the longest sequence (on a GPU the host cannot read cu_seqlens). */
    int64_t seqlen_k;  /*   Nothing past these lengths, or past total_q and total_k, is touched */
    int64_t total_q;   /* varlen: rows of q */
    int64_t total_k;   /* varlen: rows of k and v */

    /* ---- inputs ---- */
    fa_tensor q, k, v;
    fa_descale q_descale;        /* (batch, nheads). float8_e4m3 requires all three factors; with other dtypes data is NULL */
    fa_descale k_descale;        /* (batch, nheads_k) */
    fa_descale v_descale;        /* (batch, nheads_k) */
    const int32_t* cu_seqlens_q; /* both or neither (except with parts); non-decreasing, from 0 to at most total_q (total_k) */
    const int32_t* cu_seqlens_k;
    /* (batch), in the memory of q: the sequences of this varlen call are parts of longer sequences. cu_seqlens_q gives the rows of each
     * part as usual, but may begin above 0; cu_seqlens_k is NULL and top_left is 0. Bias, mask and every array with an entry per
     * sequence use the part's rows, keys and index b. In the backward pass the keys of a part begin at or after the end of the previous
     * part's keys, even for a part without keys; rows of dk and dv that belong to no part are not written. NULL = whole sequences. */
    const fa_part* parts;

    /* ---- scores, changed in this order: scale, softcap, ALiBi, bias; then the masks; then sinks and dropout ---- */
    float softmax_scale; /* read when has_softmax_scale is 1; otherwise the scale is 1 / sqrt(headdim) */
    int32_t has_softmax_scale;
    float softcap;             /* s = softcap * tanh(s / softcap); 0 = off */
    int32_t bias_dtype;        /* fa_dtype; 0 = dtype */
    const float* alibi_slopes; /* (nheads), or (batch, nheads) with alibi_batch_stride; s -= slope * |i_aligned - j| */
    int64_t alibi_batch_stride;
    fa_score_tensor bias; /* data NULL = none */
    const float* sinks;   /* (nheads) one extra logit in the softmax denominator of every row; lse includes it. NULL = none */

    /* ---- masks: which keys a row sees ---- */
    fa_score_tensor mask;                /* uint8, non-zero = attend; data NULL = none */
    fa_row_indices startend_row_indices; /* beside causal, window, chunks and mask */
    fa_block_mask block_mask;            /* beside all others. Not with parts */
    int32_t causal;                      /* row i sees j <= i_aligned */
    int32_t top_left;                    /* i_aligned = i + seqlen_k - seqlen_q (0, the default: bottom-right corner) or i (1: top-left) */
    /* Chunked attention: row i sees only keys of the chunk that contains i_aligned, that is those with
     *     floor(j / attention_chunk) = floor(i_aligned / attention_chunk)
     * Causal and window apply too. Not with parts, whose keys may begin inside a chunk. 0 = off */
    int32_t attention_chunk;
    int32_t has_window;  /* row i sees i_aligned - window_left <= j <= i_aligned + window_right; -1 = no limit on that side */
    int64_t window_left; /* with causal the right edge is i_aligned, whatever the value of window_right */
    int64_t window_right;

    /* ---- dropout ---- */
    float dropout_p;       /* 0 = off; 0 < p < 1: rounded to n / 256, 1 <= n <= 255. Applies to the normalised probabilities */
    int32_t first_head;    /* head h of this call is head first_head + h of the whole */
    uint64_t dropout_seed; /* of Philox4x32-10; attention/common/dropout.h defines which random bits decide which element */
    uint64_t dropout_offset;

    /* ---- outputs ---- */
    fa_tensor out;
    float* lse; /* log of the row's sum of exponentials (natural log), -inf for a row that sees no key; NULL = not wanted */
    /* (batch, nheads) float32, contiguous; forward pass only; NULL = not wanted. The greatest score of each sequence and query head as the
     * softmax sees it, after scale, softcap, ALiBi, bias, mask, causal and window. Sinks do not count as scores, and dropout comes later.
     * -inf where no row sees a key. With a NaN among the scores of a head the result is NaN or the greatest of some of its other scores. */
    float* max_score;
    /* (batch, nheads, seqlen_k), varlen (nheads, total_k), float32, contiguous; forward pass only; NULL = not wanted. For each key and
     * query head, the sum over the sequence's rows of the key's probability exp(score - lse), before dropout. Keys of no sequence are not
     * written. Costs a second pass over q and k, whose workspace is part of the size that the query returns. Not with parts, because they
     * may share keys. */
    float* key_sums;

    /* ---- how it is computed ---- */
    int32_t allow_tf32; /* 1 = float32 inputs may use tf32 tensor cores; 0 = full float32 arithmetic */
    /* float8_e4m3 only. 1: the tensor cores sum P v over all keys. Their sums of 8-bit products keep 14 bits, so a mean of v shrinks as
     * keys are added. 0, the default: partial sums over 1024 keys are added up in float, so the mean does not shrink; this is slower
     * with more than 1024 keys. */
    int32_t fast_accum;
    int32_t deterministic; /* read by the backward pass; the forward pass is always reproducible */
    int32_t num_threads;   /* CPU: 0 = one per available core */
    const char* kernel;    /* name of the kernel to use; NULL = the environment variable FLASH_ATTN_KERNEL, else the best kernel */
    void* workspace;       /* any alignment; the contents are scratch */
    size_t workspace_bytes;
} fa_attention_args;

/* The answer of a query: what a call with these arguments would do. */
typedef struct fa_attention_plan {
    size_t struct_size;
    int32_t status; /* the status that a launch with enough workspace would return */
    int32_t reserved;
    size_t workspace_bytes;
    char kernel[32];    /* the kernel that would run; empty when status is not FA_OK */
    char variant[32];   /* which of the kernel's plans, of tiles and options, it would follow; empty where it does not name them */
    char why_not[1472]; /* "name: reason", one line for each kernel that was passed over before the chosen one */
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

/* The gradients of sum(out * dout) + sum(lse * dlse), where out and lse are the results of fa_attention_forward. S is recomputed tile by
 * tile, and P follows from S and lse:
 *     P = exp(S - lse),  dP = dout v^T,  dS = P (dP - rowsum(dout * out) + dlse),  dq = scale dS k,  dk = scale dS^T q,  dv = P^T dout */
typedef struct fa_attention_backward_args {
    size_t struct_size;
    /* The arguments of the forward call, unchanged: its inputs, its out, its lse (required here) and every option. Five fields hold
     * values for the backward call instead: kernel (NULL = the environment variable FLASH_ATTN_BACKWARD_KERNEL, else the best
     * kernel), num_threads, workspace, workspace_bytes, and deterministic (1 = equal arguments give bitwise equal results).
     * float8_e4m3 has no backward pass. */
    const fa_attention_args* forward;
    fa_tensor dout;          /* like out */
    const float* dlse;       /* the gradient of lse, shaped like lse; NULL = zero. Ignored where lse is -inf */
    fa_tensor dq, dk, dv;    /* shapes and dtype of q, k, v */
    fa_score_gradient dbias; /* data NULL = not wanted; requires a bias. Elements of hidden pairs are zero */
    float* dsinks;           /* (nheads); NULL = not wanted; requires sinks */
    int32_t accumulate;      /* 1 = each gradient is added to the present contents of its destination, and the sum is rounded once */
    int32_t reserved;
} fa_attention_backward_args;

FA_API fa_status fa_attention_backward(const fa_attention_backward_args* args, void* stream);

/* Like fa_attention_query, for fa_attention_backward. */
FA_API fa_status fa_attention_backward_query(const fa_attention_backward_args* args, fa_attention_plan* plan);

/* ---- attention over a cache of keys and values ---- */

/* Scale factors of a cache with 8-bit elements: value = element * factor. The factors are positive floats at
 *     data[b * batch_stride + row * row_stride + head * head_stride]
 * where b and row count as in the cache: entry and key, or page and row of the page. With row_stride 0 there is one factor per head, which
 * is only read. Otherwise there is one factor per token and head, and a call writes the factors of the tokens that it appends. */
typedef struct fa_cache_scale {
    float* data;
    int64_t batch_stride;
    int64_t row_stride;
    int64_t head_stride;
} fa_cache_scale;

/* One step of inference: rotates the new keys and values and appends them to the cache, then rotates q and lets it attend to the whole
 * cache. Lengths and tables are read on the device, so a captured call may be replayed after they have changed. Only on the CPU can the
 * host check them. On a GPU an entry out of range is clamped: the call then reads wrong keys, but never outside the cache. New keys
 * without a valid place are not written. */
typedef struct fa_kvcache_args {
    size_t struct_size;
    /* The forward call: q, out, lse and every option except cu_seqlens, bias, mask and dropout. k and v are the cache, with any strides:
     *   contiguous  (cache_batch, seqlen_k, nheads_k, dim): seqlen_k is the number of keys that an entry can hold
     *   paged       (cache_batch, page_size, nheads_k, dim): key j of sequence b is row j % page_size of page
     *               block_table[b * block_table_stride + j / page_size]; seqlen_k is the number of keys that a row of the table can hold
     * headdim may be 576 with headdim_v = 512. v may be the first columns of k. In that case v_new must be the first columns
     * of k_new, and a call that appends can use neither a rotary embedding nor an 8-bit cache. workspace serves the whole
     * call, appending included. */
    const fa_attention_args* attention;

    /* ---- the cache ---- */
    int32_t cache_dtype;            /* fa_dtype of the cache: 0 = dtype, FA_FLOAT8_E4M3 or FA_INT8 */
    int32_t cache_batch;            /* entries of the cache, or pages; 0 = every sequence is empty */
    const int32_t* cache_seqlens;   /* (batch) keys in the cache before this call, at most seqlen_k - seqlen_new. Below 0: an idle
                                     * sequence, which appends nothing and whose rows see no key. NULL = seqlen_k - seqlen_new */
    const int32_t* cache_batch_idx; /* (batch) cache entry of each sequence, for a contiguous cache; NULL = 0, 1, ... */
    /* (batch) how many keys at the start of a sequence's cache entry (or of its pages) are padding: 0 .. cache_seqlens[b]. No row sees
     * padding. Alignment, ALiBi and chunks count from the first key after the padding, while cache_seqlens and rotary positions count
     * the padding too. NULL = no padding */
    const int32_t* cache_leftpad;
    const int32_t* block_table; /* (batch, pages of a sequence); NULL = contiguous. Entries past a sequence's keys are not read */
    int64_t block_table_stride;
    fa_cache_scale k_scale, v_scale; /* required for an 8-bit cache, otherwise NULL */
    int32_t page_size;               /* any number from 1 on; 0 = contiguous */

    /* ---- new keys and values ---- */
    int32_t seqlen_new;
    fa_tensor k_new, v_new; /* (batch, seqlen_new, nheads_k, dim) of dtype; stored as keys cache_seqlens[b] .. of the cache */

    /* ---- rotary embedding ----
     * Cosines and sines (rotary_rows, rotary_dim / 2), contiguous, row t for position t. New key t has position cache_seqlens[b] + t. Row
     * t of q has that position too when causal, a window or chunks are set; otherwise all rows of q have position cache_seqlens[b].
     * Without new keys only q is rotated. */
    const void *rotary_cos, *rotary_sin; /* NULL = off */
    int32_t rotary_dtype;                /* fa_dtype: 0 = dtype, or FA_FLOAT32 */
    int32_t rotary_rows;                 /* greater than every position. Otherwise: an error on the CPU; a GPU uses the last row */
    int32_t rotary_dim;                  /* even, 2 .. headdim */
    int32_t rotary_interleaved;          /* pairs (2i, 2i + 1) instead of (i, i + rotary_dim / 2) */

    /* ---- a tree of draft tokens (speculative decoding), which replaces causal and window ----
     * With L keys in sequence b, appended keys included, row i of q sees every key before L - tree_keys. It sees key L - tree_keys + j if
     * and only if bit j (1 << j) is set in
     *     tree_mask[b * tree_batch_stride + i * tree_row_stride]
     * Bits from tree_keys on, and bits of keys before key 0, are ignored. Causal, window, chunks, ALiBi and the rotary embedding are
     * refused: they count positions, and the rows of a tree are not in order of position. tree_mask is read on the device, after the
     * kernels in front of this call have ended. */
    const uint64_t* tree_mask;
    int64_t tree_batch_stride; /* 0 = one tree for all sequences */
    int64_t tree_row_stride;
    int32_t tree_keys; /* number of draft tokens at the end of every sequence, 1 .. 64; 0 = no tree */

    /* ---- how it is computed ---- */
    int32_t batch_invariant; /* 1 = the result bits of a sequence depend only on its own keys, not on the batch or the capacity */
    int32_t num_splits;      /* number of pieces that the keys of a sequence are split into, 1 .. 256; 0 = the kernel chooses */
    /* As in flash_attn_transformer.h. This call may read the cache (except the rows that it appends), the cache's factors, lengths
     * and tables, and the rotary tables before earlier kernels have ended. So no kernel between the last plain launch and this call
     * may write them. */
    int32_t programmatic;
    /* 1 = a GPU looks for sequences whose rows of block_table begin with the same pages, and reads these pages once for all of them. Only
     * the device reads tables and lengths, so a captured call may be replayed after both have changed. A hint: kernels that cannot share
     * give the same result up to rounding. Needs a block_table. Not with batch_invariant: which keys are read together depends on the
     * batch. */
    int32_t shared_prefix;
    int32_t reserved; /* 0 */
} fa_kvcache_args;

FA_API fa_status fa_kvcache_attention(const fa_kvcache_args* args, void* stream);

/* Like fa_attention_query, for fa_kvcache_attention. */
FA_API fa_status fa_kvcache_query(const fa_kvcache_args* args, fa_attention_plan* plan);

/* Merges the results of attention over two disjoint sets of keys into the result over all of them (out may be out_a, lse may be lse_a):
 *     lse = log(exp(lse_a) + exp(lse_b)),   out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b
 * out_* are (batch, seqlen, nheads, headdim_v) of `dtype`; lse_* are (batch, nheads, seqlen), float32, contiguous.
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

/* Rounds x (float32, float16 or bfloat16, as `dtype` says) to float8_e4m3, with one factor for each head of each batch entry:
 *     out = round(x / descale),   descale = max |x| / 448 over the rows of the head (1 for a head of zeros)
 * x and out are (batch, seqlen, nheads, headdim), x is finite; descale is (batch, nheads), float32, contiguous.
 * With hadamard = 1 every row is first multiplied by random signs, which follow from the seed, and by the orthonormal Hadamard matrix;
 * headdim must then be a power of two. This spreads outliers over the row. q k^T is unchanged if q and k use the same seed. */
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

/* ---- calls as data ----
 *
 * A call whose structs are filled once, and which is made any number of times: at other addresses, through its holes, or on the same
 * arrays with other contents. Several such calls are a recording: a program makes a whole step of a model by one fa_run_calls. */

/* The function of a call. Each takes one struct and a stream. */
typedef enum fa_operation {
    FA_OP_ATTENTION_FORWARD = 1,     /* const fa_attention_args*, as fa_attention_forward */
    FA_OP_ATTENTION_BACKWARD = 2,    /* const fa_attention_backward_args* */
    FA_OP_KVCACHE_ATTENTION = 3,     /* const fa_kvcache_args* */
    FA_OP_ATTENTION_MERGE = 4,       /* const fa_merge_args* */
    FA_OP_QUANTIZE_FP8 = 5,          /* const fa_quantize_args* */
    FA_OP_RMS_NORM = 6,              /* from here on, of flash_attn_transformer.h: const fa_rms_norm_args* */
    FA_OP_ROPE = 7,                  /* const fa_rope_args* */
    FA_OP_SWIGLU = 8,                /* const fa_swiglu_args* */
    FA_OP_SAMPLE = 9,                /* const fa_sample_args* */
    FA_OP_LINEAR = 10,               /* const fa_linear_args* */
    FA_OP_W4_QUANTIZE = 11,          /* const fa_w4_quantize_args* */
    FA_OP_W4_DEQUANTIZE = 12,        /* const fa_w4_dequantize_args* */
    FA_OP_W4_PACK = 13,              /* const fa_w4_pack_args* */
    FA_OP_W4_LINEAR = 14,            /* const fa_w4_linear_args* */
    FA_OP_W4_LINEAR_CHAIN = 15,      /* const fa_w4_linear_chain_args* */
    FA_OP_DISTRIBUTED_FORWARD = 16,  /* from here on, of flash_attn_distributed.h: const fa_group_call* */
    FA_OP_DISTRIBUTED_BACKWARD = 17, /* const fa_group_call* */
    FA_OP_DISTRIBUTED_DECODE = 18,   /* const fa_group_call* */
    FA_OP_DISTRIBUTED_MERGE = 19     /* const fa_group_call* */
} fa_operation;

/* A field that gets its value when the call is made. */
typedef struct fa_hole {
    int32_t byte;  /* where the field begins in the image */
    int32_t bytes; /* its size: 8 (an address, a 64-bit number) or 4 (an int32_t, from the low half of its value) */
    int32_t value; /* n >= 0: values[n]. Below 0: the address of byte -1 - n of the image, for a struct that points to another one */
} fa_hole;

typedef struct fa_call {
    int32_t operation; /* fa_operation */
    int32_t reserved;
    /* The operation's struct, followed by the structs and strings that its holes point to. A call with holes works on a copy, so threads
     * may make one call at the same time. A call without holes reads the struct where it is; the fields below are then 0. */
    const void* image;
    size_t image_bytes;
    const fa_hole* holes;
    int32_t hole_count;
    int32_t value_count; /* the length of `values`: holes name no others */
} fa_call;

/* Makes a call, as its own function would: the same checks, kernels, results, errors and, on a GPU, launches on `stream`. values may be
 * NULL when no hole has one. */
FA_API fa_status fa_run_call(const fa_call* call, const uint64_t* values, void* stream);

/* The query of the operation for this very call: `plan` is what its query function fills, an fa_attention_plan or fa_distributed_plan.
 * The size of a workspace may follow from addresses (by their alignment) and from the environment, so an earlier call's size is no
 * answer. An operation without a query needs no workspace, and is refused here. */
FA_API fa_status fa_query_call(const fa_call* call, const uint64_t* values, void* plan);

/* Makes calls in order; all have the same values. They may be on different devices; nothing waits for a GPU between them. The first call
 * that fails ends the list: the calls before it have been made, and neither it nor any later call has touched anything. Its status is
 * returned, its index is in *failed_index, and fa_last_error says "calls[index] (its function): the reason". *failed_index is -1 when no
 * call failed, or when the list itself is invalid. On the CPU all calls use one set of threads. calls may be NULL when count is 0;
 * failed_index may be NULL. */
FA_API fa_status fa_run_calls(const fa_call* calls, int32_t count, const uint64_t* values, int32_t* failed_index, void* stream);

/* ---- threads on the CPU ---- */

/* The loops of this process's calls on the CPU run on the threads of an OpenMP runtime that the program has loaded, instead of on threads
 * of the library. These share the processors with the runtime's threads, which spin for milliseconds after each of the program's own
 * loops. `library` is the name or path of a loaded library: the runtime, or one that is linked to it, such as "libtorch_cpu.so". NULL goes
 * back to own threads. FA_UNSUPPORTED, with own threads, if it is not loaded, has no OpenMP runtime, or the process was forked. A process
 * that is forked later has own threads. Results are the same bits. */
FA_API fa_status fa_use_openmp(const char* library);

/* ---- the library ---- */

/* The forward kernels in this build, best first for each device: index 0 .. fa_kernel_count() - 1. For any other index, name and summary
 * are NULL and device is 0. */
FA_API int32_t fa_kernel_count(void);
FA_API const char* fa_kernel_name(int32_t index);
FA_API const char* fa_kernel_summary(int32_t index);
FA_API int32_t fa_kernel_device(int32_t index); /* fa_device */

/* The same list for the kernels of the backward pass. */
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
