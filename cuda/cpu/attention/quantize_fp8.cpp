// quantize_fp8.cpp: rounds fp32, fp16 or bf16 to e4m3, with one factor per head. Gives the same bits as quantize_fp8.cu.
#include "attention/common/quantize_fp8.h"

#include <algorithm>
#include <cmath>

#include "common/float8.h"
#include "common/half.h"
#include "cpu/attention/kernels.h"
#include "cpu/common/parallel.h"

namespace fa::cpu {
namespace {

void read_row(const QuantizeParams& p, int64_t at, const uint32_t* signs, float* row) {
    for (int d = 0; d < p.headdim; ++d) {
        const float value = load(p.x.data, at + d, p.dtype);
        row[d] = p.hadamard && (signs[d / 32] >> d % 32 & 1) ? -value : value;
    }
    if (!p.hadamard) return;
    for (int step = 1; step < p.headdim; step *= 2)
        for (int block = 0; block < p.headdim; block += 2 * step)
            for (int i = block; i < block + step; ++i) {
                const float a = row[i], c = row[i + step];
                row[i] = a + c, row[i + step] = a - c;
            }
    for (int d = 0; d < p.headdim; ++d) row[d] *= p.norm;
}

}  // namespace

void quantize_fp8(const QuantizeParams& p) {
    uint32_t signs[kMaxQuantizedHeadDim / 32];
    for (int block = 0; block < kMaxQuantizedHeadDim / 128; ++block) {
        const Philox4 words = sign_words(p, block);
        std::copy(words.word, words.word + 4, signs + 4 * block);
    }
    const int64_t heads = int64_t(p.batch) * p.nheads;
    const int threads = worthwhile_threads(10.0 * double(heads) * p.seqlen * p.headdim, p.num_threads);
    parallel_for(heads, threads, [&](int64_t task, int) {
        const int64_t b = task / p.nheads, head = task % p.nheads;
        float row[kMaxQuantizedHeadDim], amax = 0;
        for (int64_t i = 0; i < p.seqlen; ++i) {
            read_row(p, b * p.x.batch + i * p.x.row + head * p.x.head, signs, row);
            for (int d = 0; d < p.headdim; ++d) amax = std::fmax(amax, std::fabs(row[d]));  // ignores NaN
        }
        const float scale = quantize_scale(amax);
        for (int64_t i = 0; i < p.seqlen; ++i) {
            read_row(p, b * p.x.batch + i * p.x.row + head * p.x.head, signs, row);
            uint8_t* out = static_cast<uint8_t*>(p.out.data) + b * p.out.batch + i * p.out.row + head * p.out.head;
            for (int d = 0; d < p.headdim; ++d) out[d] = float_to_e4m3_saturating(row[d] * scale);
        }
        p.descale[task] = quantize_descale(amax);
    });
}

}  // namespace fa::cpu
