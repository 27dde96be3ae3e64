// regions.cpp: arithmetic on addresses, in 128 bits so that no stride can overflow it.
#include "api/common/regions.h"

#include <algorithm>
#include <cinttypes>
#include <utility>

#include "api/common/status.h"

namespace fa {
namespace {

__extension__ typedef __int128 Wide;

// The bytes [first, end), either as addresses or relative to an address.
struct Span {
    Wide first, end;
    void extend(const Axis& axis, int64_t element) {
        const Wide far = Wide(axis.extent - 1) * axis.stride * element;
        (far < 0 ? first : end) += far;
    }
};

Span span_of(const Region& r) {
    Span span{Wide(reinterpret_cast<uintptr_t>(r.data)), Wide(reinterpret_cast<uintptr_t>(r.data)) + Wide(r.columns) * r.element};
    for (const Axis& axis : r.axes) span.extend(axis, r.element);
    return span;
}

// span_of in 64 bits, in a third of the time; false on overflow. Every call checks dozens of pairs of arrays, which are
// nearly always apart.
bool short_span(const Region& r, int64_t* first, int64_t* end) {
    int64_t low = 0, high = 0;
    bool overflows = __builtin_mul_overflow(r.columns, r.element, &high);
    for (const Axis& axis : r.axes) {
        int64_t elements, far;
        overflows |= __builtin_mul_overflow(axis.extent - 1, axis.stride, &elements);
        overflows |= __builtin_mul_overflow(elements, r.element, &far);
        overflows |= far < 0 ? __builtin_add_overflow(low, far, &low) : __builtin_add_overflow(high, far, &high);
    }
    const int64_t data = int64_t(reinterpret_cast<uintptr_t>(r.data));
    overflows |= data < 0 || __builtin_add_overflow(data, low, first) || __builtin_add_overflow(data, high, end);
    return !overflows;
}

Wide magnitude(Wide x) { return x < 0 ? -x : x; }

// For one axis: an element of array a may lie m * step bytes after an element of array b, for m in least .. most.
struct Lead {
    Wide step, least, most;
};

// Whether some choice of the m_i, each in least_i .. most_i, puts the sum of m_i * step_i strictly between low and high. Returns true
// without searching further where the search would take long.
bool reaches(const Lead* lead, int count, Wide low, Wide high) {
    if (count == 0) return low < 0 && 0 < high;
    Wide first = 0, last = 0;  // the least and the most that the axes after the first can add
    for (int i = 1; i < count; ++i) first += lead[i].least * lead[i].step, last += lead[i].most * lead[i].step;
    // So m * step must lie strictly between low - last and high - first.
    const auto floor_of = [&](Wide x) {
        const Wide towards_zero = x / lead->step;  // without %: GCC 12 combines / and % into a call of __divmodti4, which older runtimes
                                                   // (before GCC 7) lack
        return towards_zero - (towards_zero * lead->step > x);
    };
    const Wide begin = std::max(lead->least, floor_of(low - last) + 1), end = std::min(lead->most, -floor_of(first - high) - 1);
    if (end - begin > 8) return true;
    for (Wide m = begin; m <= end; ++m)
        if (reaches(lead + 1, count - 1, low - m * lead->step, high - m * lead->step)) return true;
    return false;
}

// Sorts by decreasing size.
template <typename Item, typename Size>
void sort_by(Item* items, int count, const Size& size) {
    for (int i = 1; i < count; ++i)
        for (int j = i; j > 0 && size(items[j - 1]) < size(items[j]); --j) std::swap(items[j - 1], items[j]);
}

}  // namespace

fa_status check_output(const Region& r) {
    if (r.empty()) return FA_OK;
    Axis axes[3] = {r.axes[0], r.axes[1], r.axes[2]};
    sort_by(axes, 3, [](const Axis& axis) { return -magnitude(axis.stride); });
    Wide reach = r.columns - 1;
    for (const Axis& axis : axes) {
        if (axis.extent == 1) continue;
        if (magnitude(axis.stride) <= reach && (r.data || axis.stride == 0)) {
            if (axis.stride == 0 || magnitude(axis.stride) >= r.columns || axis.name != r.axes[1].name)
                return fail(FA_BAD_ARGUMENT, "%s.%s_stride=%" PRId64 " with %s=%" PRId64 ": elements of an output cannot overlap", r.name,
                            axis.name, axis.stride, axis.count, axis.extent);
            return fail(FA_BAD_ARGUMENT, "%s.%s_stride=%" PRId64 " with %" PRId64 " columns: the rows of an output cannot overlap", r.name,
                        axis.name, axis.stride, r.columns);
        }
        reach += Wide(axis.extent - 1) * magnitude(axis.stride);
    }
    return FA_OK;
}

bool overlap(const Region& a, const Region& b) {
    if (!a.data || !b.data || a.empty() || b.empty()) return false;
    int64_t first_a, end_a, first_b, end_b;
    if (short_span(a, &first_a, &end_a) && short_span(b, &first_b, &end_b) && (end_a <= first_b || end_b <= first_a)) return false;
    const Span all_a = span_of(a), all_b = span_of(b);
    if (all_a.end <= all_b.first || all_b.end <= all_a.first) return false;
    const Wide apart = Wide(reinterpret_cast<uintptr_t>(b.data)) - Wide(reinterpret_cast<uintptr_t>(a.data));
    Span own_a{0, Wide(a.columns) * a.element}, own_b{apart, apart + Wide(b.columns) * b.element};
    Lead lead[3];
    int count = 0;
    for (int i = 0; i < 3; ++i) {
        const Axis &x = a.axes[i], &y = b.axes[i];
        const Wide step_x = Wide(x.stride) * a.element, step_y = Wide(y.stride) * b.element;
        const bool moves_x = x.extent > 1 && step_x != 0, moves_y = y.extent > 1 && step_y != 0;  // otherwise all indices of the axis are
                                                                                                  // at one address
        if (moves_x && moves_y && step_x != step_y) {
            own_a.extend(x, a.element), own_b.extend(y, b.element);
            continue;
        }
        if (!moves_x && !moves_y) continue;
        // offset_a - offset_b = m * step, m = i - j
        const Wide step = moves_x ? step_x : step_y;
        Lead& one = lead[count++];
        one = {step, moves_y ? -Wide(y.extent - 1) : Wide(0), moves_x ? Wide(x.extent - 1) : Wide(0)};
        if (step < 0) one = {-step, -one.most, -one.least};
    }
    sort_by(lead, count, [](const Lead& one) { return one.step; });
    return reaches(lead, count, own_b.first - own_a.end, own_b.end - own_a.first);
}

fa_status check_apart(const Region& output, const Region& other, bool in_place) {
    if (!overlap(output, other) || (in_place && output.same_layout(other))) return FA_OK;
    return fail(FA_BAD_ARGUMENT, "%s.data=%p overlaps %s.data=%p: it would be overwritten while it is used", output.name, output.data,
                other.name, other.data);
}

}  // namespace fa
