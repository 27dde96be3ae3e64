// test_w4.cu: the bits of packed 4-bit weights, and the plans of their products. On any machine it tests every code at every place of a
// word, every scale against its meaning, every plan against the GPU that the plan is for, and the conversion of every pair of e4m3 values
// as on GPUs before sm_89. On a GPU from sm_80 on it tests the operand registers that the kernels make from words, which must be exact.
// Exit status: 0 passed, 1 failed, 77 only the first part could run.
#include <cmath>
#include <cstdio>
#include <random>
#include <vector>

#include "device/widen.cuh"
#include "expect.h"
#include "transformer/w4/common/w4.cuh"
#include "transformer/w4/few_w4_sm90/plan.h"
#include "transformer/w4/mma_w4/plan.h"

namespace {

using namespace fa;
using namespace fa::w4;

double value_of(Format format, int code) {
    if (format == Format::kInt4) return code < 8 ? code : code - 16;
    const double magnitudes[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
    return code < 8 ? magnitudes[code] : -magnitudes[code - 8];
}
double scale_value(Format format, int byte) {
    if (format == Format::kMxfp4) return byte == 255 ? NAN : std::ldexp(1.0, byte - 127);
    const int exponent = byte >> 3 & 15, mantissa = byte & 7;
    const double magnitude = (byte & 127) == 127 ? NAN : exponent ? std::ldexp(8 + mantissa, exponent - 10) : std::ldexp(mantissa, -9);
    return byte & 128 ? -magnitude : magnitude;
}

void test_words(Format format, DType dtype) {
    std::mt19937 random(1);
    for (int trial = 0; trial < 4096; ++trial) {
        uint8_t codes[kWordCodes];
        for (uint8_t& code : codes) code = uint8_t(random() & 15);
        codes[trial % 8] = uint8_t(trial / 8 % 16);
        const uint32_t word = pack_word(format, dtype, codes);
        for (int at = 0; at < kWordCodes; ++at)
            EXPECT(unpack_code(format, dtype, word, at) == codes[at], "format %d code %d", int(format), at);
    }
    bool used[kTileRows][kTileColumns] = {};
    for (int lane = 0; lane < 32; ++lane)
        for (int j = 0; j < 4; ++j)
            for (int at = 0; at < kWordCodes; ++at) {
                const int i = at / 2, c = 2 * (lane % 4) + 8 * (i / 2) + at % 2;  // column in operand A
                used[code_row(lane, at)][code_column(lane, j, at)] = true;
                EXPECT(code_column(lane, j, at) == column_of(j, c), "lane %d word %d code %d", lane, j, at);
            }
    for (const auto& row : used)
        for (const bool one : row) EXPECT(one, "a place of the tile has no code");
}

#if CUDART_VERSION >= 12020  // older versions have no fp16 arithmetic on the host
void test_widening() {
    for (uint32_t pair = 0; pair < 65536; ++pair) {
        const uint32_t halves = widen_pair_e4m3_by_bits(pair);
        for (int i = 0; i < 2; ++i) {
            const double is = __half2float(__ushort_as_half(uint16_t(halves >> 16 * i))),
                         want = scale_value(Format::kNvfp4, pair >> 8 * i & 255);
            EXPECT(std::isnan(want) ? std::isnan(is) : is == want && std::signbit(is) == std::signbit(want), "byte %d of %04x", i, pair);
        }
    }
}
#else
void test_widening() {}
#endif

// Every plan of mma_w4 must fit the GPU, and blocks that share K must make one pass.
void test_plans() {
    const DeviceInfo gpus[] = {{0, 90, 132, 232448}, {0, 90, 114, 232448}, {0, 80, 108, 166912}, {0, 86, 84, 101376}};
    const MmaShape shapes[] = {mma_shape(1), mma_shape(16), mma_shape(17)};
    for (const DeviceInfo& gpu : gpus)
        for (const MmaShape& shape : shapes)
            for (const int n : {1, 7, 16, 65, 768, 2304, 4096, 8192, 14336, 128256})
                for (const int k : {16, 172, 288, 768, 1000, 4096, 8192, 14336})
                    for (const int rows : {1, 2, 8, 9, 16, 17, 33, 64, 128, 500, 4096})
                        for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
                            W4LinearParams p{};
                            p.rows = rows, p.in_features = k, p.out_features = n, p.format = Format::kNvfp4, p.x.row = k;
                            p.dtype = dtype, p.compute_dtype = DType::kBFloat16;
                            const MmaPlan plan = mma_plan(p, shape, gpu);
                            const MmaSizes sizes = mma_sizes(p, shape, plan);
                            const int tiles = int(ceil_div(used_row_tiles(p), plan.clusters));
                            EXPECT(sizes.bytes + kStaticShared <= int(gpu.shared_memory), "(%d, %d) rows %d: %d bytes", n, k, rows,
                                   sizes.bytes);
                            EXPECT(plan.row_groups * plan.column_groups == shape.warps && plan.tiles >= 1 && plan.tiles <= kWarpTiles,
                                   "(%d, %d) rows %d: %d x %d warps, %d tiles", n, k, rows, plan.row_groups, plan.column_groups,
                                   plan.tiles);
                            EXPECT(plan.stages >= 2 && plan.stages <= kMaxStages && plan.cluster <= column_tiles(k), "(%d, %d)", n, k);
                            EXPECT(plan.cluster == 1 || tiles <= plan.row_groups * plan.tiles, "(%d, %d) rows %d: %d tiles", n, k, rows,
                                   tiles);
                        }
}

// A plan of few_w4_sm90 must fit the GPU, or half of an SM. Its warps must have all tiles, and no ring may be longer than its barriers.
void test_few_plans() {
    for (const DeviceInfo& gpu : {DeviceInfo{0, 90, 132, 232448}, DeviceInfo{0, 90, 114, 232448}})
        for (const int n : {1, 65, 768, 4096, 14336, 128256})
            for (const int k : {16, 64, 172, 1000, 4096, 8192, 14336, 28672, 65536})
                for (const int rows : {1, 2, 3, 8, 9, 15, 16, 17, 24, 25, 32})
                    for (const Format format : {Format::kNvfp4, Format::kMxfp4, Format::kInt4}) {
                        W4LinearParams p{};
                        p.rows = rows, p.in_features = k, p.out_features = n, p.format = format, p.x.row = k;
                        const FewPlan plan = few_plan_of(p, gpu);
                        const bool tall = ceil_div(plan.row_tiles, gpu.multiprocessors / plan.cluster) > few_warps(few_tokens(p));
                        EXPECT(plan.blocks_per_sm == (tall || k % kTileColumns == 0 ? 2 : 1), "(%d, %d) rows %d: %d blocks", n, k, rows,
                               plan.blocks_per_sm);
                        const int room = int(gpu.shared_memory) / plan.blocks_per_sm;
                        EXPECT(plan.stages >= 2 && plan.stages <= kFewStages && plan.early >= 1 && plan.early <= plan.stages,
                               "(%d, %d) rows %d: %d stages, %d early", n, k, rows, plan.stages, plan.early);
                        EXPECT(plan.x_slots >= 1 && plan.x_slots <= kFewSlots && plan.ring_at % 1024 == 0, "(%d, %d) rows %d", n, k, rows);
                        EXPECT(plan.bytes + kFewStatic <= room, "(%d, %d) rows %d: %d bytes", n, k, rows, plan.bytes);
                        const int tiles = int(ceil_div(plan.row_tiles, plan.clusters)), stage = kFewChunk * tile_bytes(format);
                        EXPECT(plan.ring_at + plan.warps * plan.stages * stage <= plan.bytes, "(%d, %d) rows %d", n, k, rows);
                        EXPECT(plan.warps == tiles * plan.groups && plan.warps <= few_warps(few_tokens(p)), "(%d, %d) rows %d: %d warps", n,
                               k, rows, plan.warps);
                        const int columns = int(ceil_div(plan.column_tiles, plan.cluster));
                        EXPECT(plan.groups * plan.group_columns >= columns, "(%d, %d) rows %d", n, k, rows);
                    }
}

// One packed word, its stored scales, and the expected operands: code times scale as in a file, times 2^-factor_exponent.
struct Case {
    uint32_t word, stored;
    double expected[kWordCodes];
};

std::vector<Case> e2m1_cases(Format format, DType dtype, int largest) {
    std::vector<Case> cases;
    std::mt19937 random(2);
    for (int scale = 0; scale < 256; ++scale)
        for (int code = 0; code < 16; ++code) {
            if (format == Format::kMxfp4 && scale > largest && scale < 255) continue;
            const int other = format == Format::kMxfp4 ? largest : 0x38;  // row g + 8 has a scale of its own
            const StoredBlock block[2] = {stored_block(format, dtype, uint8_t(scale), largest),
                                          stored_block(format, dtype, uint8_t(other), largest)};
            Case one{};
            uint8_t codes[kWordCodes];
            for (int at = 0; at < kWordCodes; ++at) {
                const int mine = at == code % 8 ? code : int(random() & 15), row = at / 2 % 2;
                double expected = value_of(format, mine) * scale_value(format, row ? other : scale);
                expected = std::ldexp(expected, -factor_exponent(format, largest));
                if (format == Format::kMxfp4 && !row && dtype == DType::kFloat16 && largest - scale >= 30) expected = 0;
                one.expected[at] = expected;
                codes[at] = uint8_t((mine & block[row].keep) ^ block[row].flip);
                if (block[row].keep == 0) codes[at] = 0;
            }
            one.word = pack_word(format, dtype, codes);
            one.stored = block[0].scale | uint32_t(block[1].scale) << 8;
            cases.push_back(one);
        }
    return cases;
}

std::vector<Case> int4_cases(DType dtype) {
    std::vector<Case> cases;
    for (int code = 0; code < 256; ++code) {
        Case one{};
        uint8_t codes[kWordCodes];
        for (int at = 0; at < kWordCodes; ++at) {
            codes[at] = uint8_t((at % 2 ? code / 16 : code) + at / 2 & 15);
            one.expected[at] = value_of(Format::kInt4, codes[at]) * (at / 2 % 2 ? 0.125 : 3.0);
        }
        one.word = pack_word(Format::kInt4, dtype, codes);
        one.stored = 0x4200u | 0x3000u << 16;  // 3, 1/8
        cases.push_back(one);
    }
    return cases;
}

template <Format kFormat, typename T>
__global__ void dequantize_kernel(const Case* cases, float* out, int count) {
    const int n = blockIdx.x * blockDim.x + threadIdx.x;
    if (n >= count) return;
    uint32_t a[4], scale[2];
    widen_scales<kFormat, T>(scale, cases[n].stored);
    dequantize_word<kFormat, T>(a, cases[n].word, scale);
    for (int i = 0; i < 4; ++i) {
        float pair[2];
        unpack_16<T>(pair, a[i]);
        out[8 * n + 2 * i] = pair[0], out[8 * n + 2 * i + 1] = pair[1];
    }
}

template <Format kFormat, typename T>
void test_operands(const std::vector<Case>& cases, const char* name) {
    const int count = int(cases.size());
    Case* in = nullptr;
    float* out = nullptr;
    cudaMallocManaged(&in, sizeof(Case) * cases.size());
    cudaMallocManaged(&out, sizeof(float) * 8 * cases.size());
    for (int n = 0; n < count; ++n) in[n] = cases[n];
    dequantize_kernel<kFormat, T><<<(count + 127) / 128, 128>>>(in, out, count);
    const cudaError_t error = cudaDeviceSynchronize();
    EXPECT(!error, "%s: %s", name, cudaGetErrorString(error));
    // In float16, values under a scale 2^25 below the largest round to the smallest subnormal.
    for (int n = 0; n < count && !error; ++n)
        for (int at = 0; at < kWordCodes; ++at) {
            const double got = out[8 * n + at], want = cases[n].expected[at];
            const bool same = std::isnan(want) ? std::isnan(got) : std::fabs(got - want) <= (std::fabs(want) < 0x1p-23 ? 0x1p-25 : 0.0);
            EXPECT(same, "%s case %d code %d: got %g, want %g", name, n, at, got, want);
        }
    cudaFree(in), cudaFree(out);
}

template <typename T>
void test_formats(DType dtype, const char* name) {
    test_operands<Format::kNvfp4, T>(e2m1_cases(Format::kNvfp4, dtype, 0), name);
    for (const int largest : {0, 1, 100, 127, 254}) test_operands<Format::kMxfp4, T>(e2m1_cases(Format::kMxfp4, dtype, largest), name);
    test_operands<Format::kInt4, T>(int4_cases(dtype), name);
}

}  // namespace

int main() {
    for (const Format format : {Format::kNvfp4, Format::kMxfp4, Format::kInt4})
        for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) test_words(format, dtype);
    for (const int largest : {0, 1, 100, 127, 254})
        for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
            const int bias = dtype == DType::kFloat16 ? 15 : 127, shift = dtype == DType::kFloat16 ? 14 : 126;
            for (int scale = 0; scale <= largest; ++scale) {
                const StoredBlock block = stored_block(Format::kMxfp4, dtype, uint8_t(scale), largest);
                if (block.keep)
                    EXPECT(block.scale - bias - shift + factor_exponent(Format::kMxfp4, largest) == scale - 127, "scale %d", scale);
            }
        }
    for (int scale = 0; scale < 127; ++scale) {
        const StoredBlock block = stored_block(Format::kNvfp4, DType::kFloat16, uint8_t(scale));
        const double value = std::ldexp(8 + (block.scale & 7), (block.scale >> 3) - 18);
        EXPECT(block.keep == 0 ? scale == 0 : value == std::ldexp(scale_value(Format::kNvfp4, scale), 7), "scale %d", scale);
    }
    test_widening();
    test_plans();
    test_few_plans();
    std::printf("words, scales and plans: %s\n", failures ? "FAILED" : "passed");
    int major = 0;
    if (cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0) != cudaSuccess || major < 8) {
        std::printf("no GPU from sm_80 on: operands not tested\n");
        return failures ? 1 : 77;
    }
    test_formats<__half>(DType::kFloat16, "float16");
    test_formats<__nv_bfloat16>(DType::kBFloat16, "bfloat16");
    std::printf("%d failures\n", failures);
    return failures ? 1 : 0;
}
