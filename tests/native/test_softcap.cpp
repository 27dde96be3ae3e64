// test_softcap.cpp: the error of softcap's tanh in the Hopper forward pass, in the float32 arithmetic of the GPU. The two approximate
// instructions are the exact functions, rounded and then moved by the most that PTX allows. Every 61st float; with an argument, e.g. 1,
// every float of that stride, in half a minute for 1. Exit status: 0 passed, 1 failed.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "attention/common/softcap.h"
#include "expect.h"

namespace {

using namespace fa;

float float_of(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}
uint32_t bits_of(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
}

void check_polynomial(uint32_t stride) {
    double most = 0, sum = 0;
    float where = 0;
    int64_t count = 0;
    const uint32_t last = bits_of(kTanhLimit);
    for (uint32_t bits = bits_of(0x1p-40f); bits <= last; bits += stride) {
        const float x = float_of(bits);
        const double exact = std::tanh(double(x)), error = tanh_polynomial(x) / exact - 1;
        if (x >= 0.3f) sum += error, ++count;
        if (std::fabs(error) > most) most = std::fabs(error), where = x;
    }
    std::printf("tanh_polynomial: at most %.3g of itself, at %.9g; mean from 0.3 on %.3g\n", most, where, sum / double(count));
    EXPECT(most <= 1.6e-7, "tanh_polynomial(%.9g) is wrong by %.3g of itself", where, most);
    EXPECT(std::fabs(sum / double(count)) <= 3e-8, "mean relative error %.3g", sum / double(count));
    for (uint32_t bits = 0; bits <= bits_of(0x1p-40f); bits += 101 * stride)  // down to denormal numbers and 0
        EXPECT(std::fabs(tanh_polynomial(float_of(bits)) - float_of(bits)) <= 0x1p-149f, "%.9g", float_of(bits));
    EXPECT(tanh_polynomial(-0.25f) == -tanh_polynomial(0.25f), "sign");
    EXPECT(std::isnan(tanh_polynomial(NAN)), "NaN is lost");
}

// Products up to the limit, in the units of several scales and caps.
void check_exponent(uint32_t stride) {
    const float scales[] = {0.125f, 0.08838835f, 0.0625f, 1.0f, 3e-3f}, caps[] = {1.0f, 15.0f, 30.0f, 50.0f, 1000.0f};
    double most = 0;
    for (float scale : scales)
        for (float cap : caps) {
            const CappedExponent exponent = capped_exponent(scale, cap);
            EXPECT(exponent.is_exact() || scale / cap < 1e-4f, "scale %g, softcap %g", double(scale), double(cap));
            if (!exponent.is_exact()) continue;
            const float last = kTanhLimit * cap / scale;
            for (uint32_t bits = bits_of(last * 0x1p-12f); bits <= bits_of(last); bits += 16 * stride) {
                const float s = float_of(bits);
                const double exact = cap * double(kLog2e) * std::tanh(double(s) * scale / cap), got = double(s) * exponent.of(s * s);
                const double error = std::fabs(got / exact - 1);
                EXPECT(error <= 2e-7, "product %.9g, scale %g, softcap %g: wrong by %.3g of itself", s, scale, cap, error);
                if (error > most) most = error;
            }
        }
    std::printf("CappedExponent: at most %.3g of itself\n", most);
    EXPECT(!capped_exponent(1e-6f, 30).is_exact(), "factors that vanish");
    EXPECT(!capped_exponent(0.125f, 1e6f).is_exact(), "factors that vanish");
    EXPECT(!capped_exponent(1, 5e-6f).is_exact(), "factors that are infinite");
    EXPECT(!capped_exponent(100, 1e-3f).is_exact(), "factors that are infinite");
}

void check_any(uint32_t stride) {
    for (int way = 0; way < 4; ++way) {
        const auto moved = [](double x, bool up, double by) { return float(x * (up ? 1 + by : 1 - by)); };
        const auto exp2 = [&](float x) { return moved(std::exp2(double(x)), way & 1, 0x1p-22); };
        const auto reciprocal = [&](float x) { return moved(1 / double(x), way & 2, 0x1p-23); };
        double most = 0;
        float where = 0;
        for (uint32_t bits = bits_of(0x1p-30f); bits <= bits_of(64.0f); bits += stride) {
            const float x = float_of(bits);
            const double error = std::fabs(tanh_any(x, exp2, reciprocal) - std::tanh(double(x)));
            if (error > most) most = error, where = x;
        }
        std::printf("tanh_any, way %d: at most %.3g, at %.9g\n", way, most, where);
        EXPECT(most <= 2.5e-7, "tanh_any(%.9g) is wrong by %.3g", where, most);
        EXPECT(tanh_any(INFINITY, exp2, reciprocal) == 1 && tanh_any(-INFINITY, exp2, reciprocal) == -1, "infinities");
        EXPECT(tanh_any(-2.0f, exp2, reciprocal) == -tanh_any(2.0f, exp2, reciprocal), "sign");
        EXPECT(std::isnan(tanh_any(NAN, exp2, reciprocal)), "NaN is lost");
    }
}

}  // namespace

int main(int argc, char** argv) {
    const int stride = argc > 1 ? std::atoi(argv[1]) : 61;
    if (stride < 1) return std::fprintf(stderr, "the stride must be at least 1, not %s\n", argv[1]), 1;
    check_polynomial(uint32_t(stride)), check_exponent(uint32_t(stride)), check_any(uint32_t(stride));
    std::printf("%d failures\n", failures);
    return failures != 0;
}
