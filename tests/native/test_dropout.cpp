// test_dropout.cpp: which random bits decide which element, on the host. Every kernel that draws for many elements at once walks over them
// in its own order: here each walk is compared with the definition, element by element. Exit status: 0 passed, 1 failed.
#include <algorithm>
#include <vector>

#include "attention/backward/wgmma_sm90/kept_bits.h"
#include "attention/common/dropout.h"
#include "expect.h"
#include "numbers.h"

namespace {

using namespace fa;

constexpr uint64_t kSeed = 0x123456789ABCDEFu, kOffset = 77;
constexpr int kRows = 32, kColumns = 256;

AttentionParams params(uint32_t threshold) {
    AttentionParams p{};
    p.dropout_threshold = threshold;
    dropout_key(kSeed, kOffset, p.dropout_key);
    return p;
}
// What one instruction of the GPU gives for a half: whether |half| >= bound as fp16 numbers, or a NaN is among them.
bool half_reaches(uint32_t half, uint32_t bound) {
    const float x = decode16(FA_FLOAT16, uint16_t(half & 0x7FFF)), y = decode16(FA_FLOAT16, uint16_t(bound));
    return !(x < y);
}
uint32_t halves_reach(uint32_t word, uint32_t bound) {
    return (half_reaches(word & 0xFFFF, bound) ? 0xFFFFu : 0) | (half_reaches(word >> 16, bound) ? 0xFFFF0000u : 0);
}
Philox4 call(const AttentionParams& p, int32_t row, uint32_t number) {
    return philox<kDropoutRounds>(number, uint32_t(row), 3, 5, p.dropout_key[0], p.dropout_key[1]);
}

// The definition of attention/common/dropout.h is that of the tests' reference, also with parts.
void definition() {
    for (const double chance : {1e-9, 0.1, 0.5, 0.97, 0.99999}) {
        const Dropout reference(chance, kSeed, kOffset);
        AttentionParams p = params(uint32_t(std::clamp(std::lround(chance * kDropoutChances), 1L, kDropoutChances - 1L)));
        Part part{};
        part.first_row = 13, part.first_key = 7 * kDropoutColumns, part.sequence = 5;
        for (const bool parts : {false, true}) {
            std::vector<Part> of_sequence(6, part);
            p.parts = parts ? of_sequence.data() : nullptr;
            for (int row = 0; row < kRows; ++row)
                for (int column = 0; column < kColumns; ++column)
                    EXPECT(dropped(p, dropout_block(p, 5, 3, row, column), column) ==
                               reference.drops(5, 3, row + (parts ? 13 : 0), column + (parts ? 7 * kDropoutColumns : 0)),
                           "p=%g, row %d, column %d", chance, row, column);
        }
    }
}

// The 128 bits of a block are 16 numbers of 8 bits: each bit is in one number.
void bits_of_numbers() {
    std::vector<int> uses(128);
    for (int column = 0; column < kDropoutColumns; column += column % 2 ? 7 : 1)  // those of call 0
        for (int bit = 0; bit < 128; ++bit) {
            Philox4 block{};
            block.word[bit / 32] = 1u << bit % 32;
            AttentionParams p = params(1);
            if (!dropped(p, block, column)) ++uses[size_t(bit)];  // the number is not 0
        }
    for (int bit = 0; bit < 128; ++bit) EXPECT(uses[size_t(bit)] == 1, "bit %d is in %d numbers", bit, uses[size_t(bit)]);
}

// One comparison of fp16 numbers decides as the definition does, for every half and threshold of plans with dropout.
void pairs() {
    for (uint32_t threshold = 1; threshold <= kDropoutPairsThreshold; ++threshold) {
        const AttentionParams p = params(threshold);
        for (uint32_t half = 0; half < 0x10000; ++half) {
            const bool kept = half_reaches(half, threshold << kDropoutShift);
            if (kept == drops(p, half, false) || kept == drops(p, half << 16, true))
                EXPECT(false, "threshold %u, half %04x", threshold, half);
        }
    }
}

// The accumulator of a tile: element i of lane l is row l / 4 + 8 (i / 2 % 2), key 8 (i / 4) + l % 4 * 2 + i % 2.
// wgmma_sm90/dropout.cuh: pair x of the call for keys 64 s .. and row g + 8 r, in the tile that begins at `key0`.
void forward_plans() {
    const AttentionParams p = params(100);
    for (const int block_n : {64, 128})
        for (int key0 = 0; key0 < kColumns; key0 += block_n)
            for (int lane = 0; lane < 32; ++lane)
                for (int s = 0; s < block_n / kDropoutColumns; ++s)
                    for (int r = 0; r < 2; ++r) {
                        const int tile = key0 / block_n, calls = block_n / kDropoutColumns * 2, row = lane / 4 + 8 * r;
                        const Philox4 block = call(p, row, uint32_t(tile * 2 * calls + 4 * s + lane % 4));
                        for (int x = 0; x < 8; ++x) {
                            const uint32_t word = x % 2 ? swapped_halves(block.word[x / 2]) : block.word[x / 2];
                            const uint32_t kept = halves_reach(word, 100u << kDropoutShift);
                            const int group = 8 * s + x, i = 4 * group + 2 * r;  // of S: elements i and i + 1
                            for (int e = 0; e < 2; ++e) {
                                const int key = key0 + 8 * ((i + e) / 4) + lane % 4 * 2 + (i + e) % 2;
                                EXPECT((kept >> (16 * e) & 1) != uint32_t(dropped(p, dropout_block(p, 5, 3, row, key), key)),
                                       "tiles of %d keys: row %d, key %d", block_n, row, key);
                            }
                        }
                    }
}

// general_scores.cuh, drop_fragment: fragments of 16 keys and more.
void fragments() {
    const AttentionParams p = params(30);
    for (const int count : {8, 16, 32, 48, 64})  // elements of a lane: two rows of half as many keys each
        for (int key0 = 0; key0 < kColumns; key0 += 2 * count)
            for (int lane = 0; lane < 32; ++lane)
                for (int r = 0; r < 2; ++r) {
                    const int words = count % 32 == 0 ? 4 : count % 16 == 0 ? 2 : 1, row = lane / 4 + 8 * r;
                    for (int first = 0; first < count / 8; first += words) {
                        const int key = key0 + lane % 4 * 2 + 16 * first;
                        const Philox4 block = dropout_block(p, 5, 3, row, key);
                        for (int x = 0; x < words; ++x)
                            for (int e = 0; e < 4; ++e) {
                                const int i = 8 * (first + x) + 2 * r + e / 2 * 4 + e % 2;
                                const int own = key0 + 8 * (i / 4) + lane % 4 * 2 + i % 2;
                                const uint32_t word = words == 4 ? block.word[x] : word_of(block, uint32_t(key + 16 * x));
                                EXPECT(drops(p, e / 2 ? swapped_halves(word) : word, e % 2) ==
                                           dropped(p, dropout_block(p, 5, 3, row, own), own),
                                       "fragments of %d elements: row %d, key %d", count, row, own);
                            }
                    }
                }
}

// backward/wgmma_sm90/dropout.cuh: 128 threads write the bits of 64 keys, and lanes of four warps read those of the transposed S: element i
// of a lane is key 16 warp + l / 4 + 8 (i / 2 % 2), query 8 (i / 4) + l % 4 * 2 + i % 2.
template <int kBlockM>
void backward_plans() {
    const AttentionParams p = params(200);
    const int key0 = 128, query0 = 64;
    std::vector<uint32_t> kept(kKeptCalls * kBlockM), writes(kept.size());
    for (int i = 0; i < kKeptCalls * kBlockM; ++i) {
        const int query = i % kBlockM, number = i / kBlockM;
        const Philox4 block = call(p, query0 + query, dropout_call(key0) + uint32_t(number));
        uint32_t bits = 0;
        for (int w = 0; w < 4; ++w) {
            bits |= halves_reach(block.word[w], 200u << kDropoutShift) & kept_mask(w, false);
            bits |= halves_reach(swapped_halves(block.word[w]), 200u << kDropoutShift) & kept_mask(w, true);
        }
        kept[size_t(kept_place(query, number))] = (bits | bits >> 16) & 0xFFFF, ++writes[size_t(kept_place(query, number))];
    }
    for (size_t i = 0; i < writes.size(); ++i) EXPECT(writes[i] == 1, "%d queries: place %zu is written %u times", kBlockM, i, writes[i]);
    for (int warp = 0; warp < 4; ++warp)
        for (int lane = 0; lane < 32; ++lane)
            for (int i = 0; i < kBlockM / 2; ++i) {
                const int query = 8 * (i / 4) + lane % 4 * 2 + i % 2, key = 16 * warp + lane / 4 + 8 * (i / 2 % 2);
                // kept_signs: 16 bits of each of four queries. The shift makes the bit the sign of byte n.
                const int first = kept_place(i / 8 * 16 + lane % 4 * 2, lane / 8), shift = 7 - kept_bit(16 * warp + lane / 4 % 2);
                const uint32_t shifted = kept[size_t(first + i % 8 / 4 * 2 + i % 2)] << shift;
                const bool sign = shifted >> (i / 2 % 2 * 8 + 7) & 1;
                // drop_pair, of the general plans
                const bool bit = kept[size_t(kept_place(query, key % 8 / 2))] >> kept_bit(key) & 1;
                const bool keeps = !dropped(p, dropout_block(p, 5, 3, query0 + query, key0 + key), key0 + key);
                EXPECT(sign == keeps && bit == keeps, "%d queries: query %d, key %d: %d, %d, not %d", kBlockM, query, key, sign, bit,
                       keeps);
            }
}

}  // namespace

int main() {
    definition();
    bits_of_numbers();
    pairs();
    forward_plans();
    fragments();
    backward_plans<64>();
    backward_plans<128>();
    std::printf("%d failures\n", failures);
    return failures != 0;
}
