// kernel_limits.cpp: fa_kernel_limits writes the limits of all kernels as text, from the rows that choose a kernel for a call.
#include <cstdarg>
#include <cstdio>

#include "api/attention/registry.h"
#include "api/transformer/registry.h"
#include "flash_attn_transformer.h"

namespace fa {
namespace {

// Counts all that is written, and keeps what fits.
class Text {
public:
    Text(char* to, size_t size) : to_(to), size_(size) {
        if (size_) *to_ = '\0';
    }
    [[gnu::format(printf, 2, 3)]] void add(const char* format, ...) {
        va_list values;
        va_start(values, format);
        const size_t at = length_ < size_ ? length_ : size_;
        length_ += size_t(std::vsnprintf(at < size_ ? to_ + at : nullptr, size_ - at, format, values));
        va_end(values);
    }
    // The names of the bits that are set, with commas between them.
    template <size_t kCount>
    void add_names(uint32_t bits, const char* const (&names)[kCount]) {
        const char* between = "";
        for (size_t i = 0; i < kCount; ++i)
            if (bits >> i & 1) add("%s%s", between, names[i]), between = ", ";
    }
    size_t length() const { return length_; }

private:
    char* to_;
    size_t size_, length_ = 0;
};

void add(Text& text, const Gpus& gpus, bool on_cpu) {
    if (on_cpu) text.add("\tCPU");
    else if (gpus.most == gpus.least) text.add("\tsm_%d", gpus.least);
    else if (gpus.most < kAnyGpu.most) text.add("\tsm_%d to sm_%d", gpus.least, gpus.most);
    else if (gpus.least > 0) text.add("\tsm_%d and newer", gpus.least);
    else text.add("\tany GPU");
}

void add(Text& text, const HeadDims& dims) {
    if (dims.least == dims.most) text.add("\t%d and %d", dims.most, dims.most_v);
    else if (dims.most == kAnyHeadDim.most) text.add("\tany");
    else if (dims.step > 1) text.add("\tmultiples of %d to %d", dims.step, dims.most);
    else text.add("\tto %d", dims.most);
}

constexpr const char* kDtypeNames[] = {"", "float32", "float16", "bfloat16", "float8_e4m3"};

void add(Text& text, const Limits& limits, uint32_t asked_of_table) {
    text.add("\t"), text.add_names(limits.dtypes, kDtypeNames);
    add(text, limits.head_dims);
    uint32_t refused = asked_of_table & ~limits.takes;
    if (refused & kCache) refused &= ~kOnlyOfCaches;
    const char* names[sizeof kFeatureTexts / sizeof kFeatureTexts[0]];
    for (size_t i = 0; i < sizeof names / sizeof names[0]; ++i) names[i] = kFeatureTexts[i].name;
    text.add("\t"), text.add_names(refused, names);
    text.add("\t"), text.add_names(limits.needs, names);
    text.add("\t%d\t%s", limits.page_step, limits.memory == Memory::kAny ? "" : limits.memory == Memory::kWideRows ? "rows" : "TMA");
}
void add(Text&, const OnGpus&, uint32_t) {}

const Gpus& gpus_of(const Limits& limits) { return limits.gpus; }
const Gpus& gpus_of(const OnGpus& limits) { return limits.gpus; }

template <typename Row>
void add(Text& text, const char* name, const Table<Row>& table, uint32_t asked) {
    for (int i = 0; const Row* const kernel = table.row(i); ++i) {
        text.add("%s\t%s\t%d", name, kernel->name, kernel->built());
        add(text, gpus_of(kernel->limits), kernel->device == FA_CPU);
        add(text, kernel->limits, asked);
        text.add("\n");
    }
}

}  // namespace
}  // namespace fa

extern "C" size_t fa_kernel_limits(char* text, size_t size) {
    fa::Text all(text, size);
    fa::add(all, "forward", fa::forward_kernels(), fa::kAllFeatures);
    fa::add(all, "backward", fa::backward_kernels(), fa::kAllFeatures & ~(fa::kOnlyOfCaches | fa::kCache | fa::kMaxScore | fa::kKeySums));
    fa::add(all, "linear", fa::dense_linear_kernels(), 0);
    fa::add(all, "w4_linear", fa::linear_kernels(), 0);
    fa::add(all, "w4_linear_chain", fa::chain_kernels(), 0);
    return all.length();
}
