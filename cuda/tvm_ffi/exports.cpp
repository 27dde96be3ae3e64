// exports.cpp: the library as a module of tvm-ffi, which tvm_ffi.load_module and its counterparts in other languages load. It is a small
// shared library of its own beside libflash_attn_minimal.so: the C ABI over DLTensors, with no Python of this project in between.
//
// Each function takes the names of its arguments, then the arguments in that order. None means that an argument is not given, and the name
// _ skips one:
//     forward("q k v out causal softmax_scale", q, k, v, out, True, 0.125)
// bind reads the names once and gives a function of the arguments alone:
//     attend = bind("forward", "q k v out causal softmax_scale");  attend(q, k, v, out, True, 0.125)
// Outputs are arrays of the caller. Work goes to the stream that tvm-ffi holds for the device. The doc strings at the end list the
// arguments; their meanings are those of flash_attn.h. An error is raised in tvm-ffi's thread-local state and names the argument.
#include <tvm/ffi/c_api.h>
#include <tvm/ffi/extra/c_env_api.h>

#include <algorithm>
#include <climits>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <iterator>
#include <memory>
#include <new>
#include <string>
#include <string_view>

#include "flash_attn.h"

namespace {

constexpr int kMostArguments = 64;
constexpr int kMostAxes = 4;
constexpr int64_t kAny = -1;  // an extent that the argument decides

// ---- refusals ----

struct Refusal {
    const char* kind;  // of the error; the loader for Python makes an exception of this name
    char text[1200];
};
struct AlreadyRaised {};  // by a function of tvm-ffi

[[noreturn]] __attribute__((format(printf, 2, 3))) void refuse(const char* kind, const char* format, ...) {
    Refusal refusal{kind, {}};
    va_list values;
    va_start(values, format);
    std::vsnprintf(refusal.text, sizeof refusal.text, format, values);
    va_end(values);
    throw refusal;
}

void check(fa_status status) {
    if (status == FA_OK) return;
    const char* kind = "RuntimeError";
    if (status == FA_BAD_ARGUMENT || status == FA_WORKSPACE_TOO_SMALL) kind = "ValueError";
    if (status == FA_UNSUPPORTED) kind = "NotImplementedError";
    if (status == FA_OUT_OF_MEMORY) kind = "MemoryError";
    refuse(kind, "%s", fa_last_error());
}

// ---- arguments ----

class Text {  // a short text that grows
public:
    __attribute__((format(printf, 2, 3))) Text& add(const char* format, ...) {
        va_list values;
        va_start(values, format);
        const int wanted = std::vsnprintf(text_ + size_, sizeof text_ - size_, format, values);
        va_end(values);
        size_ = std::min(size_ + size_t(std::max(wanted, 0)), sizeof text_ - 1);
        return *this;
    }
    const char* get() const { return text_; }

private:
    char text_[400] = "";
    size_t size_ = 0;
};

struct Tensor {
    const char* name;
    bool given = false;
    char* data = nullptr;
    DLDataType type{};
    int rank = 0;
    int64_t shape[kMostAxes] = {}, strides[kMostAxes] = {};  // in elements

    explicit operator bool() const { return given; }
    int64_t size() const {
        int64_t product = 1;
        for (int i = 0; i < rank; ++i) product *= shape[i];
        return product;
    }
};

Text list(const Tensor& t, const int64_t* values) {
    Text text;
    text.add("(");
    for (int i = 0; i < t.rank; ++i) text.add("%s%lld", i ? ", " : "", static_cast<long long>(values[i]));
    text.add(t.rank == 1 ? ",)" : ")");
    return text;
}

constexpr DLDataType kFloat32{kDLFloat, 32, 1}, kFloat16{kDLFloat, 16, 1}, kBfloat16{kDLBfloat, 16, 1};
constexpr DLDataType kFloat8{kDLFloat8_e4m3fn, 8, 1}, kInt8{kDLInt, 8, 1}, kUint8{kDLUInt, 8, 1}, kBool{kDLBool, 8, 1};
constexpr DLDataType kInt32{kDLInt, 32, 1}, kInt64{kDLInt, 64, 1}, kUint64{kDLUInt, 64, 1};

bool same(DLDataType a, DLDataType b) { return a.code == b.code && a.bits == b.bits && a.lanes == b.lanes; }

Text name_of(DLDataType type) {
    static constexpr const char* kNames[] = {"int", "uint", "float", "handle", "bfloat", "complex", "bool"};
    Text text;
    if (same(type, kFloat8)) text.add("float8_e4m3fn");
    else if (same(type, kBool)) text.add("bool");
    else if (type.code < sizeof kNames / sizeof *kNames) text.add("%s%d", kNames[type.code], type.bits);
    else text.add("a type of code %d and %d bits", type.code, type.bits);
    if (type.lanes != 1) text.add("x%d", type.lanes);
    return text;
}

void expect_type(const Tensor& t, std::initializer_list<DLDataType> allowed) {
    Text text;
    for (const DLDataType& type : allowed) {
        if (!t || same(t.type, type)) return;
        text.add("%s%s", &type == allowed.begin() ? "" : " or ", name_of(type).get());
    }
    refuse("ValueError", "%s is %s: expected %s", t.name, name_of(t.type).get(), text.get());
}

struct Axis {
    const char* name;
    int64_t size;  // or kAny
};

void expect_shape(const Tensor& t, std::initializer_list<Axis> axes) {
    if (!t) return;
    bool fits = t.rank == int(axes.size());
    Text text;
    for (const Axis& axis : axes) {
        const int i = int(&axis - axes.begin());
        fits = fits && (axis.size == kAny || t.shape[i] == axis.size);
        text.add("%s%s", i ? ", " : "", axis.name);
        if (axis.size != kAny) text.add("=%lld", static_cast<long long>(axis.size));
    }
    if (!fits) refuse("ValueError", "%s has shape %s: expected (%s)", t.name, list(t, t.shape).get(), text.get());
}

void expect_last_axis_contiguous(const Tensor& t) {
    if (t && t.rank && t.shape[t.rank - 1] > 1 && t.strides[t.rank - 1] != 1 && t.size())  // the strides of an empty array mean nothing
        refuse("ValueError", "%s has strides %s: the last axis must be contiguous", t.name, list(t, t.strides).get());
}

void expect_contiguous(const Tensor& t) {
    int64_t step = 1;
    bool dense = true;
    for (int i = t.rank - 1; i >= 0; step *= t.shape[i--]) dense = dense && (t.shape[i] == 1 || t.strides[i] == step);
    if (t && !dense && t.size())
        refuse("ValueError", "%s has shape %s and strides %s: it must be contiguous", t.name, list(t, t.shape).get(),
               list(t, t.strides).get());
}

// A text of tvm-ffi in one of its three forms.
bool read_text(const TVMFFIAny& value, std::string_view* text) {
    if (value.type_index == kTVMFFIRawStr) *text = value.v_c_str;
    else if (value.type_index == kTVMFFISmallStr) *text = {value.v_bytes, value.small_str_len};
    else if (value.type_index == kTVMFFIStr) {
        const TVMFFIByteArray* const bytes = TVMFFIBytesGetByteArrayPtr(value.v_obj);
        *text = {bytes->data, bytes->size};
    } else return false;
    return true;
}

// The names of a call's arguments, separated by spaces. The text must outlive the object.
struct Names {
    std::string_view items[kMostArguments];
    int count = 0;

    Names(const char* function, std::string_view text) {
        for (size_t begin = 0; (begin = text.find_first_not_of(' ', begin)) != text.npos;) {
            const size_t end = std::min(text.find(' ', begin), text.size());
            if (count == kMostArguments) refuse("TypeError", "%s takes at most %d arguments", function, kMostArguments);
            const std::string_view name = text.substr(begin, end - begin);
            if (name != "_" && std::find(items, items + count, name) != items + count)
                refuse("TypeError", "%s is named twice: %.*s", function, int(name.size()), name.data());
            items[count++] = name, begin = end;
        }
    }
};

// The named arguments of a call. Reading one that is not given gives the default.
class Arguments {
public:
    Arguments(const char* function, const Names& names, const TVMFFIAny* values, int32_t count)
        : function_(function), names_(names), values_(values) {
        if (names.count != count) refuse("TypeError", "%s has %d names for %d arguments", function, names.count, count);
    }

    const TVMFFIAny* find(std::string_view name) {
        for (int i = 0; i < names_.count; ++i)
            if (names_.items[i] == name) {
                read_[i] = true;
                return values_[i].type_index == kTVMFFINone ? nullptr : values_ + i;
            }
        return nullptr;
    }

    // After all arguments have been read: refuses names that the function does not have.
    void finish() const {
        for (int i = 0; i < names_.count; ++i)
            if (const std::string_view name = names_.items[i]; !read_[i] && name != "_")
                refuse("TypeError", "%s has no argument %.*s", function_, int(name.size()), name.data());
    }

    Tensor tensor(const char* name) {
        Tensor t{name};
        const TVMFFIAny* const value = find(name);
        if (!value) return t;
        const DLTensor* array = nullptr;
        if (value->type_index == kTVMFFIDLTensorPtr) array = static_cast<const DLTensor*>(value->v_ptr);
        else if (value->type_index == kTVMFFITensor) array = TVMFFITensorGetDLTensorPtr(value->v_obj);
        else refuse("TypeError", "%s is not an array (type index %d)", name, value->type_index);
        t.given = true, t.type = array->dtype, t.rank = array->ndim;
        if (t.rank > kMostAxes) refuse("ValueError", "%s has %d axes: expected at most %d", name, t.rank, kMostAxes);
        t.data = static_cast<char*>(array->data);
        if (t.data) t.data += array->byte_offset;
        for (int64_t i = t.rank - 1, step = 1; i >= 0; step *= t.shape[i--])
            t.shape[i] = array->shape[i], t.strides[i] = array->strides ? array->strides[i] : step;
        place(name, array->device);
        return t;
    }
    Tensor required(const char* name) {
        const Tensor t = tensor(name);
        if (!t) refuse("TypeError", "%s needs the argument %s", function_, name);
        return t;
    }

    int64_t integer(const char* name, int64_t otherwise, int64_t least = INT64_MIN, int64_t most = INT64_MAX) {
        const TVMFFIAny* const value = find(name);
        if (!value) return otherwise;
        if (value->type_index != kTVMFFIInt) refuse("TypeError", "%s is not an integer (type index %d)", name, value->type_index);
        if (value->v_int64 < least || value->v_int64 > most)
            refuse("ValueError", "%s=%lld is outside %lld .. %lld", name, static_cast<long long>(value->v_int64),
                   static_cast<long long>(least), static_cast<long long>(most));
        return value->v_int64;
    }
    int32_t integer32(const char* name, int32_t otherwise) { return int32_t(integer(name, otherwise, INT32_MIN, INT32_MAX)); }
    double number(const char* name, double otherwise) {
        const TVMFFIAny* const value = find(name);
        if (!value) return otherwise;
        if (value->type_index == kTVMFFIInt) return double(value->v_int64);
        if (value->type_index != kTVMFFIFloat) refuse("TypeError", "%s is not a number (type index %d)", name, value->type_index);
        return value->v_float64;
    }
    int32_t flag(const char* name) {
        const TVMFFIAny* const value = find(name);
        if (!value) return 0;
        if (value->type_index != kTVMFFIBool && value->type_index != kTVMFFIInt)
            refuse("TypeError", "%s is neither true nor false (type index %d)", name, value->type_index);
        if (value->v_int64 != 0 && value->v_int64 != 1)
            refuse("ValueError", "%s=%lld is neither 0 nor 1", name, static_cast<long long>(value->v_int64));
        return int32_t(value->v_int64);
    }
    template <size_t kSize>
    bool text(const char* name, char (&copy)[kSize]) {
        const TVMFFIAny* const value = find(name);
        if (!value) return false;
        std::string_view found;
        if (!read_text(*value, &found)) refuse("TypeError", "%s is not a text (type index %d)", name, value->type_index);
        if (found.find('\0') != found.npos) refuse("ValueError", "%s has a letter with the code 0", name);
        if (found.size() >= kSize) refuse("ValueError", "%s=%.*s is longer than %zu letters", name, 60, found.data(), kSize - 1);
        copy[found.copy(copy, kSize - 1)] = '\0';
        return true;
    }

    DLDevice device() const { return device_; }
    int32_t fa_device_of_call() const { return device_.device_type == kDLCUDA ? FA_CUDA : FA_CPU; }
    void* stream() const { return device_.device_type == kDLCUDA ? TVMFFIEnvGetStream(kDLCUDA, device_.device_id) : nullptr; }

private:
    // All arrays lie on one device: that of the first.
    void place(const char* name, DLDevice device) {
        if (device.device_type == kDLCUDAHost) device = {kDLCPU, 0};
        if (device.device_type == kDLCUDAManaged) device.device_type = kDLCUDA;
        if (device.device_type != kDLCPU && device.device_type != kDLCUDA)
            refuse("ValueError", "%s is on a device of DLPack type %d: expected the CPU (1) or CUDA (2)", name, int(device.device_type));
        if (device.device_type == kDLCPU) device.device_id = 0;
        if (!placed_) placed_ = name, device_ = device;
        if (device.device_type != device_.device_type || device.device_id != device_.device_id)
            refuse("ValueError", "%s is on %s %d, but %s is on %s %d: all arrays of a call lie on one device", name, kind(device),
                   device.device_id, placed_, kind(device_), device_.device_id);
    }
    static const char* kind(DLDevice device) { return device.device_type == kDLCUDA ? "CUDA device" : "CPU"; }

    const char* const function_;
    const Names& names_;
    const TVMFFIAny* const values_;
    bool read_[kMostArguments] = {};
    const char* placed_ = nullptr;
    DLDevice device_{kDLCPU, 0};
};

// ---- from arrays to the structs of flash_attn.h ----

int32_t dtype_of(const Tensor& t) {
    if (same(t.type, kFloat32)) return FA_FLOAT32;
    if (same(t.type, kFloat16)) return FA_FLOAT16;
    if (same(t.type, kBfloat16)) return FA_BFLOAT16;
    if (same(t.type, kFloat8)) return FA_FLOAT8_E4M3;
    if (same(t.type, kInt8)) return FA_INT8;
    refuse("ValueError", "%s is %s: expected float32, float16, bfloat16, float8_e4m3fn or int8", t.name, name_of(t.type).get());
}

int32_t narrow(const Tensor& t, int axis) {
    if (t.shape[axis] > INT32_MAX) refuse("ValueError", "%s has shape %s: an axis is too long", t.name, list(t, t.shape).get());
    return int32_t(t.shape[axis]);
}

// (batch, rows, heads, columns), or (rows, heads, columns) of packed sequences.
fa_tensor rows_of(const Tensor& t) {
    expect_last_axis_contiguous(t);
    const int64_t* const last = t.strides + t.rank - 2;
    return {t.data, t.rank == 4 ? t.strides[0] : 0, last[-1], last[0]};
}

float* statistics(const Tensor& t) {
    expect_type(t, {kFloat32});
    expect_contiguous(t);
    return reinterpret_cast<float*>(t.data);
}

const int32_t* integers(const Tensor& t) {
    expect_type(t, {kInt32});
    expect_contiguous(t);
    return reinterpret_cast<const int32_t*>(t.data);
}

// Strides of an array that broadcasts to `full` as in NumPy: 0 for an axis that repeats. Its last axis repeats only with `columns_repeat`.
void broadcast(const Tensor& t, std::initializer_list<Axis> full, bool columns_repeat, int64_t* strides) {
    const int missing = int(full.size()) - t.rank;
    bool fits = missing >= 0;
    Text text;
    for (const Axis& axis : full) {
        const int i = int(&axis - full.begin());
        text.add("%s%s=%lld", i ? ", " : "", axis.name, static_cast<long long>(axis.size));
        strides[i] = 0;
        if (!fits || i < missing) continue;
        const int64_t have = t.shape[i - missing];
        fits = have == axis.size || (have == 1 && (columns_repeat || i + 1 < int(full.size())));
        if (have != 1) strides[i] = t.strides[i - missing];
    }
    fits = fits && (columns_repeat || t.rank >= 1);
    if (!fits) refuse("ValueError", "%s has shape %s, which does not broadcast to (%s)", t.name, list(t, t.shape).get(), text.get());
}

fa_descale factors(Arguments& call, const char* name, int32_t batch, const char* heads_name, int32_t heads) {
    const Tensor t = call.tensor(name);
    if (!t) return {};
    expect_type(t, {kFloat32});
    int64_t strides[2];
    broadcast(t, {{"batch", batch}, {heads_name, heads}}, true, strides);
    return {reinterpret_cast<const float*>(t.data), strides[0], strides[1]};
}

// What every call of attention has: q, k, v, out and the options.
struct Attention {
    fa_attention_args args{};
    Tensor q, k, v, out, bias;
    char kernel[64];

    bool varlen() const { return args.cu_seqlens_q; }
    Axis rows() const { return varlen() ? Axis{"total_q", args.total_q} : Axis{"seqlen_q", args.seqlen_q}; }
    Axis keys() const { return varlen() ? Axis{"total_k", args.total_k} : Axis{"seqlen_k", args.seqlen_k}; }

    void expect_rows(const Tensor& t, Axis rows, const char* heads_name, int32_t heads, const char* dim_name, int32_t dim) const {
        if (varlen()) expect_shape(t, {rows, {heads_name, heads}, {dim_name, dim}});
        else expect_shape(t, {{"batch", args.batch}, rows, {heads_name, heads}, {dim_name, dim}});
    }
    float* per_row(Arguments& call, const char* name, Axis rows) const {
        const Tensor t = call.tensor(name);
        if (varlen()) expect_shape(t, {{"nheads", args.nheads}, rows});
        else expect_shape(t, {{"batch", args.batch}, {"nheads", args.nheads}, rows});
        return statistics(t);
    }

    void read_lengths(Arguments& call) {
        const Tensor lengths_q = call.tensor("cu_seqlens_q"), lengths_k = call.tensor("cu_seqlens_k");
        args.seqlen_q = call.integer("max_seqlen_q", kAny, 0), args.seqlen_k = call.integer("max_seqlen_k", kAny, 0);
        if (!lengths_q && !lengths_k && args.seqlen_q == kAny && args.seqlen_k == kAny) return;
        if (!lengths_q || !lengths_k || args.seqlen_q == kAny || args.seqlen_k == kAny)
            refuse("TypeError", "packed sequences need all of cu_seqlens_q, cu_seqlens_k, max_seqlen_q and max_seqlen_k");
        expect_shape(lengths_q, {{"batch + 1", kAny}});
        if (!lengths_q.size()) refuse("ValueError", "cu_seqlens_q has no entry: expected batch + 1");
        expect_shape(lengths_k, {{"batch + 1", lengths_q.shape[0]}});
        args.cu_seqlens_q = integers(lengths_q), args.cu_seqlens_k = integers(lengths_k);
        args.batch = narrow(lengths_q, 0) - 1;
        if (!args.cu_seqlens_q || !args.cu_seqlens_k) refuse("ValueError", "cu_seqlens_q or cu_seqlens_k has no address");
    }

    // q, k, v and out of a call without a cache.
    void read_arrays(Arguments& call) {
        args.struct_size = sizeof args;
        q = call.required("q"), k = call.required("k"), v = call.required("v"), out = call.required("out");
        read_lengths(call);
        if (varlen()) {
            expect_shape(q, {{"total_q", kAny}, {"nheads", kAny}, {"headdim", kAny}});
            expect_shape(k, {{"total_k", kAny}, {"nheads_k", kAny}, {"headdim", q.shape[2]}});
            expect_shape(v, {{"total_k", k.shape[0]}, {"nheads_k", k.shape[1]}, {"headdim_v", kAny}});
            args.total_q = q.shape[0], args.total_k = k.shape[0];
        } else {
            expect_shape(q, {{"batch", kAny}, {"seqlen_q", kAny}, {"nheads", kAny}, {"headdim", kAny}});
            expect_shape(k, {{"batch", q.shape[0]}, {"seqlen_k", kAny}, {"nheads_k", kAny}, {"headdim", q.shape[3]}});
            expect_shape(v, {{"batch", q.shape[0]}, {"seqlen_k", k.shape[1]}, {"nheads_k", k.shape[2]}, {"headdim_v", kAny}});
            args.batch = narrow(q, 0), args.seqlen_q = q.shape[1], args.seqlen_k = k.shape[1];
        }
        read_sizes(call);
        expect_type(k, {q.type}), expect_type(v, {q.type});
        expect_rows(out, rows(), "nheads", args.nheads, "headdim_v", args.headdim_v);
        expect_type(out, {same(q.type, kFloat8) && same(out.type, kFloat16) ? kFloat16 : same(q.type, kFloat8) ? kBfloat16 : q.type});
        args.out = rows_of(out), args.out_dtype = dtype_of(out);
        args.lse = per_row(call, "lse", rows());
    }

    // The sizes that follow from the shapes of q, k, and v, which have been checked.
    void read_sizes(Arguments& call) {
        args.device = call.fa_device_of_call(), args.dtype = dtype_of(q);
        args.nheads = narrow(q, q.rank - 2), args.headdim = narrow(q, q.rank - 1);
        args.nheads_k = narrow(k, k.rank - 2), args.headdim_v = narrow(v, v.rank - 1);
        if (args.headdim_v < 1) refuse("ValueError", "%s has shape %s: headdim_v=0 is below 1", v.name, list(v, v.shape).get());
        args.q = rows_of(q), args.k = rows_of(k), args.v = rows_of(v);
    }

    // The options that calls with and without a cache share.
    void read_options(Arguments& call) {
        args.softmax_scale = float(call.number("softmax_scale", 0)), args.has_softmax_scale = call.find("softmax_scale") != nullptr;
        args.softcap = float(call.number("softcap", 0));
        args.causal = call.flag("causal"), args.top_left = call.flag("top_left");
        args.has_window = call.find("window_left") || call.find("window_right");
        const int64_t open = args.has_window ? -1 : 0;
        args.window_left = call.integer("window_left", open), args.window_right = call.integer("window_right", open);
        args.attention_chunk = call.integer32("attention_chunk", 0);
        args.allow_tf32 = call.flag("allow_tf32"), args.num_threads = call.integer32("num_threads", 0);
        if (call.text("kernel", kernel)) args.kernel = kernel;
        if (const Tensor slopes = call.tensor("alibi_slopes")) {
            if (slopes.rank == 2) expect_shape(slopes, {{"batch", args.batch}, {"nheads", args.nheads}});
            else expect_shape(slopes, {{"nheads", args.nheads}});
            expect_type(slopes, {kFloat32});
            expect_last_axis_contiguous(slopes);
            args.alibi_slopes = reinterpret_cast<const float*>(slopes.data);
            args.alibi_batch_stride = slopes.rank == 2 ? slopes.strides[0] : 0;
        }
        const Tensor sinks = call.tensor("sinks");
        expect_shape(sinks, {{"nheads", args.nheads}});
        args.sinks = statistics(sinks);
    }

    // The options that only calls without a cache have.
    void read_more_options(Arguments& call) {
        args.dropout_p = float(call.number("dropout_p", 0));
        args.dropout_seed = uint64_t(call.integer("dropout_seed", 0)), args.dropout_offset = uint64_t(call.integer("dropout_offset", 0));
        if (args.dropout_p > 0 && !call.find("dropout_seed"))
            refuse("TypeError", "dropout_p=%g needs a dropout_seed", double(args.dropout_p));
        args.deterministic = call.flag("deterministic"), args.fast_accum = call.flag("fast_accum");
        args.q_descale = factors(call, "q_descale", args.batch, "nheads", args.nheads);
        args.k_descale = factors(call, "k_descale", args.batch, "nheads_k", args.nheads_k);
        args.v_descale = factors(call, "v_descale", args.batch, "nheads_k", args.nheads_k);
        bias = call.tensor("bias");
        if (bias) {
            expect_type(bias, {q.type, kFloat32});
            args.bias = scores(bias), args.bias_dtype = dtype_of(bias);
        }
        if (const Tensor mask = call.tensor("mask")) {
            expect_type(mask, {kBool, kUint8});
            args.mask = scores(mask);
        }
        read_row_indices(call.tensor("startend_row_indices"));
        read_block_mask(call.tensor("block_mask"));
    }

    // (batch or 1, heads, seqlen_k, numbers), or (heads, total_k, numbers) of packed sequences.
    void read_row_indices(const Tensor& t) {
        if (!t) return;
        expect_type(t, {kInt32});
        const Axis heads{"1, nheads_k or nheads", kAny}, numbers{"1, 2 or 4", kAny};
        if (varlen()) expect_shape(t, {heads, keys(), numbers});
        else expect_shape(t, {{"batch", t.rank == 4 && t.shape[0] == 1 ? 1 : args.batch}, heads, keys(), numbers});
        expect_last_axis_contiguous(t);
        const int64_t* const last = t.strides + t.rank - 3;
        args.startend_row_indices = {
            reinterpret_cast<const int32_t*>(t.data), batch_stride(t), last[0], last[1], narrow(t, t.rank - 3), narrow(t, t.rank - 1)};
    }

    // (batch or 1, heads, blocks of rows, blocks of keys), with as many blocks of 128 or of 64 as the longest sequence needs.
    void read_block_mask(const Tensor& t) {
        if (!t) return;
        expect_type(t, {kBool, kUint8});
        const Axis heads{"1, nheads_k or nheads", kAny};
        const auto blocks = [&](int axis, int64_t length) {  // 0 where the extent fits neither size
            for (const int32_t size : {128, 64})
                if (t.rank == 4 && t.shape[axis] == (length + size - 1) / size) return size;
            return 0;
        };
        const int32_t row_block = blocks(2, args.seqlen_q), key_block = blocks(3, args.seqlen_k);
        const auto fewest = [](int64_t length) { return (length + 127) / 128; };
        expect_shape(t, {{"batch", t.rank == 4 && t.shape[0] == 1 ? 1 : args.batch},
                         heads,
                         {"blocks of rows", row_block ? kAny : fewest(args.seqlen_q)},
                         {"blocks of keys", key_block ? kAny : fewest(args.seqlen_k)}});
        expect_last_axis_contiguous(t);
        args.block_mask = {t.data, batch_stride(t), t.strides[1], t.strides[2], narrow(t, 1), row_block, key_block, 0};
    }
    // The stride of a batch axis that may have one entry for all sequences.
    static int64_t batch_stride(const Tensor& t) { return t.rank == 4 && t.shape[0] > 1 ? t.strides[0] : 0; }

    fa_score_tensor scores(const Tensor& t) const {
        int64_t strides[4];
        broadcast(t, {{"batch", args.batch}, {"nheads", args.nheads}, {"seqlen_q", args.seqlen_q}, {"seqlen_k", args.seqlen_k}}, false,
                  strides);
        expect_last_axis_contiguous(t);
        return {t.data, strides[0], strides[1], strides[2]};
    }
};

// ---- running a call ----

enum class Wanted { kResult, kWorkspaceBytes };

// Scratch memory for a call that brings none. On a GPU it comes from the framework's allocator, which reuses it in the order of the stream.
class Scratch {
public:
    Scratch() = default;
    Scratch(const Scratch&) = delete;
    ~Scratch() {
        std::free(host_);
        if (tensor_) TVMFFIObjectDecRef(tensor_);
    }
    void* get(size_t bytes, DLDevice device) {
        if (!bytes) return nullptr;
        if (device.device_type == kDLCPU) {
            host_ = std::malloc(bytes);
            if (!host_) refuse("MemoryError", "no host memory left for a workspace of %zu bytes", bytes);
            return host_;
        }
        int64_t shape[] = {int64_t(bytes)};
        DLTensor prototype{nullptr, device, 1, kUint8, shape, nullptr, 0};
        if (TVMFFIEnvTensorAlloc(&prototype, &tensor_) != 0) throw AlreadyRaised{};
        const DLTensor* const memory = TVMFFITensorGetDLTensorPtr(tensor_);
        return static_cast<char*>(memory->data) + memory->byte_offset;
    }

private:
    void* host_ = nullptr;
    TVMFFIObjectHandle tensor_ = nullptr;
};

template <typename Args>
void serve(Arguments& call, Wanted wanted, TVMFFIAny* result, const Args& args, fa_attention_args* attention,
           fa_status (*query)(const Args*, fa_attention_plan*), fa_status (*launch)(const Args*, void*)) {
    const Tensor workspace = call.tensor("workspace");
    call.finish();
    expect_contiguous(workspace);
    fa_attention_plan plan;
    plan.struct_size = sizeof plan;
    if (!workspace || wanted == Wanted::kWorkspaceBytes) check(query(&args, &plan));
    if (wanted == Wanted::kWorkspaceBytes) {
        result->type_index = kTVMFFIInt, result->zero_padding = 0, result->v_int64 = int64_t(plan.workspace_bytes);
        return;
    }
    Scratch scratch;
    attention->workspace = workspace ? workspace.data : scratch.get(plan.workspace_bytes, call.device());
    attention->workspace_bytes = workspace ? size_t(workspace.size()) * workspace.type.bits / 8 : plan.workspace_bytes;
    check(launch(&args, call.stream()));
}

void forward(Arguments& call, Wanted wanted, TVMFFIAny* result) {
    Attention a;
    a.read_arrays(call);
    a.read_options(call);
    a.read_more_options(call);
    const Tensor max_score = call.tensor("max_score");
    expect_shape(max_score, {{"batch", a.args.batch}, {"nheads", a.args.nheads}});
    a.args.max_score = statistics(max_score);
    a.args.key_sums = a.per_row(call, "key_sums", a.keys());
    serve(call, wanted, result, a.args, &a.args, fa_attention_query, fa_attention_forward);
}

void backward(Arguments& call, Wanted wanted, TVMFFIAny* result) {
    Attention a;
    a.read_arrays(call);
    a.read_options(call);
    a.read_more_options(call);
    if (!call.find("lse")) refuse("TypeError", "backward needs the argument lse");
    fa_attention_backward_args args{};
    args.struct_size = sizeof args, args.forward = &a.args;
    const auto gradient = [&](const char* name, Axis rows, const char* heads_name, int32_t heads, const char* dim_name, int32_t dim) {
        const Tensor t = call.required(name);
        a.expect_rows(t, rows, heads_name, heads, dim_name, dim);
        expect_type(t, {a.q.type});
        return rows_of(t);
    };
    args.dout = gradient("dout", a.rows(), "nheads", a.args.nheads, "headdim_v", a.args.headdim_v);
    args.dq = gradient("dq", a.rows(), "nheads", a.args.nheads, "headdim", a.args.headdim);
    args.dk = gradient("dk", a.keys(), "nheads_k", a.args.nheads_k, "headdim", a.args.headdim);
    args.dv = gradient("dv", a.keys(), "nheads_k", a.args.nheads_k, "headdim_v", a.args.headdim_v);
    args.dlse = a.per_row(call, "dlse", a.rows());
    if (const Tensor dbias = call.tensor("dbias")) {
        if (!a.bias) refuse("ValueError", "dbias is given without a bias");
        if (dbias.rank != a.bias.rank || !std::equal(dbias.shape, dbias.shape + dbias.rank, a.bias.shape))
            refuse("ValueError", "dbias has shape %s: expected %s, the shape of bias", list(dbias, dbias.shape).get(),
                   list(a.bias, a.bias.shape).get());
        expect_type(dbias, {kFloat32});
        const fa_score_tensor place = a.scores(dbias);
        args.dbias = {reinterpret_cast<float*>(dbias.data), place.batch_stride, place.head_stride, place.row_stride};
    }
    const Tensor dsinks = call.tensor("dsinks");
    expect_shape(dsinks, {{"nheads", a.args.nheads}});
    args.dsinks = statistics(dsinks);
    args.accumulate = call.flag("accumulate");
    serve(call, wanted, result, args, &a.args, fa_attention_backward_query, fa_attention_backward);
}

// ---- caches ----

// The factors of an 8-bit cache: of heads (nheads_k,), of heads of entries (entries, 1, nheads_k), or of tokens (entries, rows, nheads_k).
fa_cache_scale cache_factors(Arguments& call, const char* name, const Tensor& cache) {
    const Tensor t = call.tensor(name);
    if (!t) return {};
    expect_type(t, {kFloat32});
    auto* const data = reinterpret_cast<float*>(t.data);
    if (t.rank == 1) {
        expect_shape(t, {{"nheads_k", cache.shape[2]}});
        return {data, 0, 0, t.strides[0]};
    }
    const bool of_entries = t.rank == 3 && t.shape[1] == 1 && cache.shape[1] != 1;
    expect_shape(t, {{"entries", cache.shape[0]}, {"rows", of_entries ? 1 : cache.shape[1]}, {"nheads_k", cache.shape[2]}});
    return {data, t.strides[0], of_entries ? 0 : cache.shape[1] == 1 ? 1 : t.strides[1], t.strides[2]};
}

void read_cache(Arguments& call, Attention* a) {
    a->k = call.required("k_cache"), a->v = call.required("v_cache");
    expect_shape(a->k, {{"entries", kAny}, {"rows", kAny}, {"nheads_k", kAny}, {"headdim", kAny}});
    expect_shape(a->v, {{"entries", a->k.shape[0]}, {"rows", a->k.shape[1]}, {"nheads_k", a->k.shape[2]}, {"headdim_v", kAny}});
    expect_type(a->v, {a->k.type});
}

const int32_t* per_sequence(Arguments& call, const char* name, int32_t batch) {
    const Tensor t = call.tensor(name);
    expect_shape(t, {{"batch", batch}});
    return integers(t);
}

// New keys and values, (batch, seqlen_new, nheads_k, .) like q.
void read_new(const Attention& a, const Tensor& k, const Tensor& v, fa_kvcache_args* args) {
    if (!k && !v) return;
    if (!k || !v) refuse("TypeError", "%s is given without %s", k ? k.name : v.name, k ? v.name : k.name);
    const fa_attention_args& f = a.args;
    expect_shape(k, {{"batch", f.batch}, {"seqlen_new", kAny}, {"nheads_k", f.nheads_k}, {"headdim", f.headdim}});
    expect_shape(v, {{"batch", f.batch}, {"seqlen_new", k.shape[1]}, {"nheads_k", f.nheads_k}, {"headdim_v", f.headdim_v}});
    expect_type(k, {a.q.type}), expect_type(v, {a.q.type});
    args->seqlen_new = narrow(k, 1);
    if (args->seqlen_new) args->k_new = rows_of(k), args->v_new = rows_of(v);
}

void kvcache(Arguments& call, Wanted wanted, TVMFFIAny* result) {
    Attention a;
    fa_attention_args& f = a.args;
    f.struct_size = sizeof f;
    a.q = call.required("q"), a.out = call.required("out");
    read_cache(call, &a);
    expect_shape(a.q, {{"batch", kAny}, {"seqlen_q", kAny}, {"nheads", kAny}, {"headdim", a.k.shape[3]}});
    f.batch = narrow(a.q, 0), f.seqlen_q = a.q.shape[1], f.seqlen_k = a.k.shape[1];
    a.read_sizes(call);
    expect_type(a.k, {a.q.type, kFloat8, kInt8});
    a.expect_rows(a.out, a.rows(), "nheads", f.nheads, "headdim_v", f.headdim_v);
    expect_type(a.out, {a.q.type});
    f.out = rows_of(a.out);
    f.lse = a.per_row(call, "lse", a.rows());
    a.read_options(call);

    fa_kvcache_args args{};
    args.struct_size = sizeof args, args.attention = &f;
    args.cache_dtype = dtype_of(a.k), args.cache_batch = narrow(a.k, 0);
    if (const Tensor table = call.tensor("block_table")) {
        expect_shape(table, {{"batch", f.batch}, {"pages", kAny}});
        expect_type(table, {kInt32});
        expect_last_axis_contiguous(table);
        args.block_table = reinterpret_cast<const int32_t*>(table.data), args.block_table_stride = table.strides[0];
        args.page_size = narrow(a.k, 1);
        if (!args.page_size) refuse("ValueError", "k_cache has shape %s: a page has at least one row", list(a.k, a.k.shape).get());
        f.seqlen_k = table.shape[1] * args.page_size;
    }
    args.cache_batch_idx = per_sequence(call, "cache_batch_idx", f.batch);
    args.cache_leftpad = per_sequence(call, "cache_leftpad", f.batch);
    read_new(a, call.tensor("k_new"), call.tensor("v_new"), &args);
    if (const TVMFFIAny* const lengths = call.find("cache_seqlens"); lengths && lengths->type_index == kTVMFFIInt)
        f.seqlen_k = call.integer("cache_seqlens", 0, 0, f.seqlen_k - args.seqlen_new) + args.seqlen_new;  // one length for all sequences
    else args.cache_seqlens = per_sequence(call, "cache_seqlens", f.batch);
    const Tensor cos = call.tensor("rotary_cos"), sin = call.tensor("rotary_sin");
    if (cos || sin) {
        if (!cos || !sin) refuse("TypeError", "%s is given without %s", cos ? cos.name : sin.name, cos ? sin.name : cos.name);
        expect_shape(cos, {{"positions", kAny}, {"rotary_dim / 2", kAny}});
        expect_shape(sin, {{"positions", cos.shape[0]}, {"rotary_dim / 2", cos.shape[1]}});
        expect_type(cos, {kFloat32, a.q.type}), expect_type(sin, {cos.type});
        expect_contiguous(cos), expect_contiguous(sin);
        args.rotary_cos = cos.data, args.rotary_sin = sin.data, args.rotary_dtype = dtype_of(cos);
        args.rotary_rows = narrow(cos, 0), args.rotary_dim = int32_t(std::min<int64_t>(cos.shape[1], INT32_MAX / 2) * 2);
    }
    args.rotary_interleaved = call.flag("rotary_interleaved");
    args.k_scale = cache_factors(call, "k_scale", a.k), args.v_scale = cache_factors(call, "v_scale", a.v);
    args.batch_invariant = call.flag("batch_invariant"), args.programmatic = call.flag("programmatic");
    args.shared_prefix = call.flag("shared_prefix");
    args.num_splits = call.integer32("num_splits", 0);
    args.tree_keys = call.integer32("tree_keys", 0);
    if (const Tensor tree = call.tensor("tree_mask")) {
        if (tree.rank == 2) expect_shape(tree, {{"batch", f.batch}, {"seqlen_q", f.seqlen_q}});
        else expect_shape(tree, {{"seqlen_q", f.seqlen_q}});
        expect_type(tree, {kUint64, kInt64});
        args.tree_mask = reinterpret_cast<const uint64_t*>(tree.data);
        args.tree_batch_stride = tree.rank == 2 ? tree.strides[0] : 0, args.tree_row_stride = tree.strides[tree.rank - 1];
        if (!args.tree_keys) args.tree_keys = int32_t(std::min<int64_t>(f.seqlen_q, INT32_MAX));
    }
    serve(call, wanted, result, args, &f, fa_kvcache_query, fa_kvcache_attention);
}

// Rounds all rows of k and v into an 8-bit cache with a factor for each token and head: a step that appends them and has no queries.
void quantize_kvcache(Arguments& call, Wanted wanted, TVMFFIAny* result) {
    Attention a;
    fa_attention_args& f = a.args;
    const Tensor k = call.required("k"), v = call.required("v");
    read_cache(call, &a);
    expect_shape(k, {{"entries", a.k.shape[0]}, {"rows", a.k.shape[1]}, {"nheads_k", a.k.shape[2]}, {"headdim", a.k.shape[3]}});
    expect_type(a.k, {kFloat8, kInt8});
    const bool nothing = !k.size() || !v.size();
    f.struct_size = sizeof f, f.device = call.fa_device_of_call(), f.dtype = dtype_of(k);
    a.q = k, a.out = a.v;  // without rows: never read or written
    f.batch = narrow(a.k, 0), f.seqlen_k = a.k.shape[1];
    f.nheads = f.nheads_k = narrow(a.k, 2), f.headdim = narrow(a.k, 3), f.headdim_v = narrow(a.v, 3);
    f.q = rows_of(k), f.k = rows_of(a.k), f.v = rows_of(a.v), f.out = rows_of(a.v);
    f.num_threads = call.integer32("num_threads", 0);
    f.kernel = f.device == FA_CPU ? "cpu_naive" : "minimal";  // it takes every cache, and is not launched: there are no queries
    fa_kvcache_args args{};
    args.struct_size = sizeof args, args.attention = &f;
    args.cache_dtype = dtype_of(a.k), args.cache_batch = f.batch;
    read_new(a, k, v, &args);
    const struct {
        const char* name;
        const Tensor& cache;
        fa_cache_scale* place;
    } scales[] = {{"k_scale", a.k, &args.k_scale}, {"v_scale", a.v, &args.v_scale}};
    for (const auto& scale : scales) {
        expect_shape(call.required(scale.name), {{"entries", f.batch}, {"rows", f.seqlen_k}, {"nheads_k", f.nheads_k}});
        *scale.place = cache_factors(call, scale.name, scale.cache);
    }
    if (nothing) return call.finish();
    serve(call, wanted, result, args, &f, fa_kvcache_query, fa_kvcache_attention);
}

// ---- beside attention ----

void merge(Arguments& call, Wanted, TVMFFIAny*) {
    const Tensor out_a = call.required("out_a"), out_b = call.required("out_b"), out = call.required("out");
    const Tensor lse_a = call.required("lse_a"), lse_b = call.required("lse_b"), lse = call.required("lse");
    call.finish();
    expect_shape(out_a, {{"batch", kAny}, {"seqlen", kAny}, {"nheads", kAny}, {"headdim_v", kAny}});
    fa_merge_args args{};
    args.struct_size = sizeof args, args.device = call.fa_device_of_call(), args.dtype = dtype_of(out_a);
    args.batch = narrow(out_a, 0), args.seqlen = out_a.shape[1], args.nheads = narrow(out_a, 2), args.headdim_v = narrow(out_a, 3);
    for (const Tensor* t : {&out_b, &out}) {
        expect_shape(*t, {{"batch", args.batch}, {"seqlen", args.seqlen}, {"nheads", args.nheads}, {"headdim_v", args.headdim_v}});
        expect_type(*t, {out_a.type});
    }
    for (const Tensor* t : {&lse_a, &lse_b, &lse})
        expect_shape(*t, {{"batch", args.batch}, {"nheads", args.nheads}, {"seqlen", args.seqlen}});
    args.out_a = rows_of(out_a), args.out_b = rows_of(out_b), args.out = rows_of(out);
    args.lse_a = statistics(lse_a), args.lse_b = statistics(lse_b), args.lse = statistics(lse);
    check(fa_attention_merge(&args, call.stream()));
}

void quantize_fp8(Arguments& call, Wanted, TVMFFIAny*) {
    const Tensor x = call.required("x"), out = call.required("out"), descale = call.required("descale");
    fa_quantize_args args{};
    args.hadamard = call.flag("hadamard"), args.seed = uint64_t(call.integer("seed", 0));
    call.finish();
    expect_shape(x, {{"batch", kAny}, {"seqlen", kAny}, {"nheads", kAny}, {"headdim", kAny}});
    args.struct_size = sizeof args, args.device = call.fa_device_of_call(), args.dtype = dtype_of(x);
    args.batch = narrow(x, 0), args.seqlen = x.shape[1], args.nheads = narrow(x, 2), args.headdim = narrow(x, 3);
    expect_shape(out, {{"batch", args.batch}, {"seqlen", args.seqlen}, {"nheads", args.nheads}, {"headdim", args.headdim}});
    expect_type(out, {kFloat8});
    expect_shape(descale, {{"batch", args.batch}, {"nheads", args.nheads}});
    args.x = rows_of(x), args.out = rows_of(out), args.descale = statistics(descale);
    check(fa_quantize_fp8(&args, call.stream()));
}

// ---- the border ----

struct Function {
    const char* name;
    void (*run)(Arguments&, Wanted, TVMFFIAny*);
    Wanted wanted = Wanted::kResult;
};
constexpr Function kFunctions[] = {
    {"forward", forward},
    {"backward", backward},
    {"kvcache", kvcache},
    {"quantize_kvcache", quantize_kvcache},
    {"merge", merge},
    {"quantize_fp8", quantize_fp8},
    {"forward_workspace", forward, Wanted::kWorkspaceBytes},
    {"backward_workspace", backward, Wanted::kWorkspaceBytes},
    {"kvcache_workspace", kvcache, Wanted::kWorkspaceBytes},
};

constexpr const Function& find_function(std::string_view name) {
    const Function* found = kFunctions;
    while (found->name != name) ++found;  // a name that is missing does not compile
    return *found;
}

template <typename Body>
int guarded(Body body) {
    try {
        body();
        return 0;
    } catch (const Refusal& refusal) {
        TVMFFIErrorSetRaisedFromCStr(refusal.kind, refusal.text);
    } catch (const std::bad_alloc&) {
        TVMFFIErrorSetRaisedFromCStr("MemoryError", "no host memory left");
    } catch (const AlreadyRaised&) {
    }
    return -1;
}

int call_by_name(const Function& function, const TVMFFIAny* values, int32_t count, TVMFFIAny* result) {
    return guarded([&] {
        std::string_view text;
        if (count < 1 || !read_text(values[0], &text))
            refuse("TypeError", "%s takes the names of its arguments first, as one text: %s(\"q k\", q, k)", function.name, function.name);
        const Names names(function.name, text);
        Arguments call(function.name, names, values + 1, count - 1);
        function.run(call, function.wanted, result);
    });
}

// A function whose arguments have been named.
struct Bound {
    const Function& function;
    const std::string text;
    const Names names{function.name, text};

    static int call(void* self, const TVMFFIAny* values, int32_t count, TVMFFIAny* result) {
        const Bound& bound = *static_cast<const Bound*>(self);
        return guarded([&] {
            Arguments call(bound.function.name, bound.names, values, count);
            bound.function.run(call, bound.function.wanted, result);
        });
    }
    static void destroy(void* self) { delete static_cast<Bound*>(self); }
};

int bind(const TVMFFIAny* values, int32_t count, TVMFFIAny* result) {
    return guarded([&] {
        std::string_view name, text;
        if (count != 2 || !read_text(values[0], &name) || !read_text(values[1], &text))
            refuse("TypeError", "bind takes two texts, a function and the names of its arguments: bind(\"forward\", \"q k v out\")");
        const auto* const found =
            std::find_if(std::begin(kFunctions), std::end(kFunctions), [&](const Function& f) { return name == f.name; });
        if (found == std::end(kFunctions)) refuse("ValueError", "bind: there is no function %.*s", int(name.size()), name.data());
        std::unique_ptr<Bound> bound(new Bound{*found, std::string(text)});  // made in place: the names point into its text
        TVMFFIObjectHandle made;
        if (TVMFFIFunctionCreate(bound.get(), Bound::call, Bound::destroy, &made) != 0) throw AlreadyRaised{};
        bound.release();
        result->type_index = kTVMFFIFunction, result->zero_padding = 0, result->v_obj = static_cast<TVMFFIObject*>(made);
    });
}

int give_text(const char* text, TVMFFIAny* result) {
    const TVMFFIByteArray bytes{text, std::strlen(text)};
    return TVMFFIStringFromByteArray(&bytes, result);
}

}  // namespace

#define FA_EXPORT_CALL(name)                                                                                   \
    extern "C" FA_API int __tvm_ffi_##name(void*, const TVMFFIAny* values, int32_t count, TVMFFIAny* result) { \
        static constexpr const Function& function = find_function(#name);                                      \
        return call_by_name(function, values, count, result);                                                  \
    }
#define FA_EXPORT(name, doc) \
    FA_EXPORT_CALL(name)     \
    extern "C" FA_API int __tvm_ffi__doc_##name(void*, const TVMFFIAny*, int32_t, TVMFFIAny* result) { return give_text(doc, result); }

#define FA_OPTIONS                                                                                                              \
    "softmax_scale softcap causal top_left window_left window_right attention_chunk alibi_slopes sinks allow_tf32 num_threads " \
    "kernel workspace"
#define FA_MORE_OPTIONS                                                                                                             \
    "bias mask startend_row_indices block_mask dropout_p dropout_seed dropout_offset deterministic fast_accum q_descale k_descale " \
    "v_descale"
#define FA_PACKED "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k"

// Each text is: what the function does. Needed: names. Optional: names.
FA_EXPORT(forward,
          "out = attention of q over k and v; with cu_seqlens_q, of packed sequences. Needed: q k v out. Optional: lse max_score "
          "key_sums " FA_PACKED " " FA_OPTIONS " " FA_MORE_OPTIONS)
FA_EXPORT(backward,
          "dq, dk and dv of a forward call. Needed: q k v out lse dout dq dk dv. Optional: dlse dbias dsinks accumulate " FA_PACKED
          " " FA_OPTIONS " " FA_MORE_OPTIONS)
FA_EXPORT(kvcache,
          "Appends k_new and v_new to a cache, then out = attention of q over the cache. Needed: q k_cache v_cache out. Optional: "
          "lse k_new v_new cache_seqlens cache_batch_idx cache_leftpad block_table rotary_cos rotary_sin rotary_interleaved k_scale "
          "v_scale batch_invariant num_splits programmatic shared_prefix tree_mask tree_keys " FA_OPTIONS)
FA_EXPORT(quantize_kvcache,
          "Rounds k and v to an 8-bit cache with a factor for each token and head. Needed: k v k_cache v_cache k_scale "
          "v_scale. Optional: num_threads workspace")
FA_EXPORT(merge, "out and lse over the keys of both sides. Needed: out_a lse_a out_b lse_b out lse. Optional:")
FA_EXPORT(quantize_fp8, "out = x / descale in float8_e4m3fn, with a factor for each head. Needed: x out descale. Optional: hadamard seed")

// The bytes that the same call needs as its workspace; nothing is launched. A call without a workspace allocates one.
FA_EXPORT_CALL(forward_workspace)
FA_EXPORT_CALL(backward_workspace)
FA_EXPORT_CALL(kvcache_workspace)

extern "C" FA_API int __tvm_ffi_bind(void*, const TVMFFIAny* values, int32_t count, TVMFFIAny* result) {
    return bind(values, count, result);
}
