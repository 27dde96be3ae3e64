// bench.h: checks every answer, times the calls, and prints the conditions of the measurement. "flash" is the kernel that the query
// chooses. "standard" is standard attention in three steps, with S in memory.
#pragma once

#include <chrono>
#include <ctime>
#include <fstream>
#include <sstream>

#include "launch.h"
#include "reference.h"

namespace bench {

struct Timing {
    double us = 0, spread = 0;  // the median; (largest - smallest) of the middle half over the median
    int repetitions = 0;
};

inline Timing summarize(std::vector<double> us) {
    std::sort(us.begin(), us.end());
    const size_t n = us.size();
    return {us[n / 2], (us[n - 1 - n / 4] - us[n / 4]) / us[n / 2], int(n)};
}

constexpr double kAtLeastUs = 20000;  // measured time per row

using Clock = std::chrono::steady_clock;
inline double us_since(Clock::time_point start) { return std::chrono::duration<double, std::micro>(Clock::now() - start).count(); }

inline Timing time_cpu(const fa_attention_args& args) {
    std::vector<double> us;
    double total = 0;
    while (us.size() < 200 && (us.size() < 3 || total < 5 * kAtLeastUs)) {
        const Clock::time_point start = Clock::now();
        expect_ok(fa_attention_forward(&args, nullptr), "fa_attention_forward");
        us.push_back(us_since(start));
        total += us.back();
        if (us.size() == 1 && total > 1e6) break;  // a slow kernel: one call is enough
    }
    return summarize(us);
}

#if FA_WITH_CUDA
// Times each call with events. Before each call a memset larger than the L2 cache evicts the inputs from it.
inline Timing time_cuda(const fa_attention_args& args, const Buffer& flush) {
    struct Event {
        cudaEvent_t event = nullptr;
        Event() { CUDA(cudaEventCreate(&event)); }
        ~Event() { cudaEventDestroy(event); }
    } start, stop;
    std::vector<double> us;
    double total = 0;
    expect_ok(fa_attention_forward(&args, nullptr), "warm-up");
    while (us.size() < 200 && (us.size() < 5 || total < kAtLeastUs)) {
        CUDA(cudaMemsetAsync(flush.data(), 0, flush.size(), nullptr));
        CUDA(cudaEventRecord(start.event, nullptr));
        expect_ok(fa_attention_forward(&args, nullptr), "fa_attention_forward");
        CUDA(cudaEventRecord(stop.event, nullptr));
        CUDA(cudaEventSynchronize(stop.event));
        float ms = 0;
        CUDA(cudaEventElapsedTime(&ms, start.event, stop.event));
        us.push_back(1000 * double(ms));
        total += us.back();
        if (us.size() == 2 && total > 5e5) break;
    }
    return summarize(us);
}
#endif

// ---- the machine ----

inline std::string first_value(const char* file, const char* key) {
    std::ifstream in(file);
    for (std::string line; std::getline(in, line);)
        if (line.rfind(key, 0) == 0 && line.find(": ") != std::string::npos) return line.substr(line.find(": ") + 2);
    return "";
}

struct Machine {
    std::string name, cuda, driver, host;
    int sm_clock_mhz = 0;
};

inline Machine machine(fa_device device) {
    Machine m;
    m.host = first_value("/proc/cpuinfo", "model name");
    if (m.host.empty()) m.host = "CPU";
    m.host += format(", %u threads", std::thread::hardware_concurrency());
    m.name = m.host;
#if FA_WITH_CUDA
    if (device == FA_CUDA) {
        cudaDeviceProp properties;
        int index = 0, driver = 0, runtime = 0, khz = 0;
        CUDA(cudaGetDevice(&index));
        CUDA(cudaGetDeviceProperties(&properties, index));
        CUDA(cudaDriverGetVersion(&driver));
        CUDA(cudaRuntimeGetVersion(&runtime));
        CUDA(cudaDeviceGetAttribute(&khz, cudaDevAttrClockRate, index));
        m.name = properties.name, m.sm_clock_mhz = khz / 1000;
        m.driver = format("%d.%d", driver / 1000, driver % 1000 / 10), m.cuda = format("%d.%d", runtime / 1000, runtime % 1000 / 10);
    }
#else
    (void)device;
#endif
    return m;
}

// ---- JSON ----

inline std::string quoted(const std::string& text) {
    std::string out = "\"";
    for (const char ch : text)
        if (ch == '"' || ch == '\\') out += '\\', out += ch;
        else if (static_cast<unsigned char>(ch) < 32) out += format("\\u%04x", ch);
        else out += ch;
    return out + "\"";
}
// JSON has no infinity and no NaN.
inline std::string number(double x) { return std::isfinite(x) ? format("%.6g", x) : "null"; }

struct Row {
    Case c;
    std::string system, kernel;
    Timing timing;
    double tflops, max_err, err_budget;
    size_t workspace_bytes;
};

inline std::string json(const Machine& m, const std::string& command, const std::vector<Row>& rows) {
    const std::time_t now = std::time(nullptr);
    char date[32];
    std::strftime(date, sizeof date, "%Y-%m-%dT%H:%M:%SZ", std::gmtime(&now));
    const char* commit = std::getenv("FLASH_ATTN_COMMIT");
    std::ostringstream o;
    o << "{\"machine\": {\"gpu\": " << (m.cuda.empty() ? "null" : quoted(m.name))
      << ", \"driver\": " << (m.driver.empty() ? "null" : quoted(m.driver)) << ", \"cuda\": " << (m.cuda.empty() ? "null" : quoted(m.cuda))
      << ", \"sm_clock_mhz\": " << (m.sm_clock_mhz ? std::to_string(m.sm_clock_mhz) : "null")
      << ", \"power_w\": null, \"host\": " << quoted(m.host) << "},\n \"date\": " << quoted(date)
      << ", \"commit\": " << (commit ? quoted(commit) : "null") << ", \"command\": " << quoted(command) << ",\n \"rows\": [";
    for (size_t i = 0; i < rows.size(); ++i) {
        const Row& r = rows[i];
        o << (i ? ",\n  " : "\n  ") << "{\"suite\": \"forward\", \"system\": " << quoted(r.system) << ", \"kernel\": " << quoted(r.kernel)
          << ", \"pass\": \"fwd\", \"dtype\": " << quoted(dtype_name(r.c.dtype)) << ", \"headdim\": " << r.c.headdim
          << ", \"headdim_v\": " << r.c.dim_v() << ", \"causal\": " << (r.c.causal ? "true" : "false") << ", \"seqlen_q\": " << r.c.seqlen_q
          << ", \"seqlen_k\": " << r.c.seqlen_k << ", \"batch\": " << r.c.batch << ", \"nheads\": " << r.c.nheads
          << ", \"nheads_k\": " << r.c.nheads_k << ", \"us\": " << number(r.timing.us) << ", \"us_spread\": " << number(r.timing.spread)
          << ", \"tflops\": " << number(r.tflops) << ", \"max_err\": " << number(r.max_err) << ", \"err_budget\": " << number(r.err_budget)
          << ", \"workspace_bytes\": " << r.workspace_bytes << "}";
    }
    o << "\n ]}\n";
    return o.str();
}

// ---- the table ----

inline std::string bytes_text(size_t bytes) {
    return bytes == 0          ? "0"
           : bytes < 10240     ? format("%zu B", bytes)
           : bytes < 10u << 20 ? format("%.1f KiB", double(bytes) / 1024)
                               : format("%.1f MiB", double(bytes) / 1048576);
}

inline std::vector<Case> shapes(const Context& context) {
    std::vector<Case> all;
    const bool gpu = context.device == FA_CUDA;
    const std::vector<int64_t> lengths =
        gpu ? (context.quick ? std::vector<int64_t>{512, 2048} : std::vector<int64_t>{512, 1024, 2048, 4096, 8192, 16384})
            : (context.quick ? std::vector<int64_t>{128, 256} : std::vector<int64_t>{128, 256, 512, 1024});
    for (const int32_t dtype : kTwoDtypes)
        for (const int32_t dim : {64, 128})
            for (const bool causal : {false, true})
                for (const int64_t n : lengths) {
                    Case c = shape(n, n, dim, dtype);
                    c.causal = causal, c.outer_heads_only = true;
                    c.batch = gpu ? int32_t(16384 / n) : 1;  // every row of the GPU's table has the same number of tokens
                    c.nheads = c.nheads_k = gpu ? 2048 / dim : 512 / dim;
                    c.row_step = std::max<int64_t>(1, n / (gpu ? 13 : 61));
                    c.name = full_name("bench", c);
                    all.push_back(c);
                }
    return all;
}

#if FA_WITH_CUDA
void launch_nothing();  // empty_launch.cu
#endif

// Prints the host time of a tiny call (validation, choice of the kernel, launch) and, beside it, that of an empty launch.
inline void print_overhead(const Context& context) {
    Case c = shape(1, 1, context.device == FA_CUDA ? 64 : 8, context.device == FA_CUDA ? FA_BFLOAT16 : FA_FLOAT32);
    c.name = "overhead", c.batch = c.nheads = c.nheads_k = 1;
    Problem p(c, context.device, context.seed);
    p.num_threads = 1;
    fa_attention_args args = p.args();
    fa_attention_plan plan = query(args);
    const Workspace workspace(p.device, plan.workspace_bytes);
    workspace.attach(&args);
    const auto per_call = [&](auto call) {
        constexpr int kBurst = 64;  // far fewer launches than a GPU's queue holds, so the host never waits for the device
        std::vector<double> us;
        for (int round = 0; round < 100; ++round) {
            wait(context.device);
            const Clock::time_point start = Clock::now();
            for (int i = 0; i < kBurst; ++i) call();
            us.push_back(us_since(start) / kBurst);
        }
        wait(context.device);
        return summarize(us).us;
    };
    fa_status status = FA_OK;
    const auto forward = [&] {
        if (const fa_status s = fa_attention_forward(&args, nullptr); s != FA_OK) status = s;
    };
    const double asked = per_call([&] { fa_attention_query(&args, &plan); });
    const double called = per_call(forward);
    std::printf("host time of a tiny call through C (1 x 1, headdim %d, %s): %.2f us, of a query: %.2f us", c.headdim, plan.kernel, called,
                asked);
#if FA_WITH_CUDA
    if (context.device == FA_CUDA) {
        args.kernel = "minimal";
        std::printf("; kernel minimal: %.2f us", per_call(forward));
        std::printf("; an empty launch: %.2f us", per_call(launch_nothing));
    }
#endif
    std::printf("\n");
    expect_ok(status, "tiny call");
}

inline int run(const Context& context, const std::string& command, const std::string& json_file) {
    const Machine m = machine(context.device);
    const bool gpu = context.device == FA_CUDA;
    const std::string standard = gpu ? "naive" : "cpu_naive";
    size_t standard_limit = size_t(2) << 30;
#if FA_WITH_CUDA
    Buffer flush;
    if (gpu) {
        size_t free_bytes = 0, total = 0;
        CUDA(cudaMemGetInfo(&free_bytes, &total));
        standard_limit = free_bytes / 4;
        flush = Buffer(FA_CUDA, size_t(256) << 20);
    }
#endif
    std::printf("%s", m.name.c_str());
    if (gpu) std::printf(", CUDA %s, driver for %s; L2 flushed", m.cuda.c_str(), m.driver.c_str());
    std::printf("; answers checked first, then the median of many calls\n%s\n\n", fa_build_info());
    std::printf("flash = the kernel the library chooses; standard = %s, with S in memory\n", standard.c_str());
    std::printf("%7s %6s %6s %8s %6s %7s %11s %12s %9s %9s %10s  %-14s %12s %12s\n", "seqlen", "batch", "heads", "headdim", "dtype",
                "causal", "flash ms", "standard ms", "speed-up", gpu ? "TFLOP/s" : "GFLOP/s", "max error", "kernel", "flash mem",
                "standard mem");

    std::vector<Row> rows;
    bool failed = false;
    double standard_rate = 0;  // of the slowest row of standard attention so far, in FLOP per us
    for (const Case& c : shapes(context)) {
        Problem p(c, context.device, context.seed);
        p.num_threads = context.num_threads;
        const Answer answer = solve(p);
        const double flops = 4.0 * double(c.seqlen_q) * double(c.seqlen_k) * c.headdim * c.nheads * c.batch * (c.causal ? 0.5 : 1);
        const auto measure = [&](const char* system, const char* kernel) {
            fa_attention_args args = p.args();
            args.kernel = kernel;
            const fa_attention_plan plan = query(args);
            EXPECT(plan.status == FA_OK, "%s: %s", c.name.c_str(), fa_last_error());
            const Buffer workspace(context.device, plan.workspace_bytes);
            args.workspace = workspace.data(), args.workspace_bytes = plan.workspace_bytes;
            p.reset();
            expect_ok(fa_attention_forward(&args, nullptr), plan.kernel);
            wait(context.device);
            const Verdict verdict = judge(p, answer);
            if (!verdict.complaint.empty())
                failed = true, std::printf("%s, %s: WRONG ANSWER: %s\n", c.name.c_str(), plan.kernel, verdict.complaint.c_str());
#if FA_WITH_CUDA
            const Timing timing = gpu ? time_cuda(args, flush) : time_cpu(args);
#else
            const Timing timing = time_cpu(args);
#endif
            rows.push_back(
                {c, system, plan.kernel, timing, flops / timing.us * 1e-6, verdict.out_error, answer.out_budget, plan.workspace_bytes});
            return rows.back();
        };
        const Row flash = measure("ours", context.kernels.size() == 1 ? context.kernels.front().c_str() : nullptr);

        fa_attention_args args = p.args();
        args.kernel = standard.c_str();
        const fa_attention_plan plan = query(args);
        std::string standard_ms = "-", speedup = "-";
        const bool quick_enough = standard_rate == 0 || flops / standard_rate < 2.5e6;
        if (plan.status == FA_OK && plan.workspace_bytes <= standard_limit && quick_enough) {
            const Row row = measure("standard", standard.c_str());
            const double rate = flops / row.timing.us;
            standard_rate = standard_rate == 0 ? rate : std::min(standard_rate, rate);
            standard_ms = format("%.3f", row.timing.us / 1000), speedup = format("%.1fx", row.timing.us / flash.timing.us);
        }
        std::printf("%7lld %6d %6d %8d %6s %7s %11.3f %12s %9s %9.1f %10.1e  %-14s %12s %12s\n", (long long)c.seqlen_q, c.batch, c.nheads,
                    c.headdim, dtype_name(c.dtype), c.causal ? "yes" : "no", flash.timing.us / 1000, standard_ms.c_str(), speedup.c_str(),
                    flash.tflops * (gpu ? 1 : 1000), flash.max_err, flash.kernel.c_str(), bytes_text(flash.workspace_bytes).c_str(),
                    bytes_text(plan.workspace_bytes).c_str());
        std::fflush(stdout);
    }
    std::printf("\n");
    print_overhead(context);
    if (!json_file.empty()) {
        std::ofstream out(json_file);
        out << json(m, command, rows);
        out.close();
        if (!out) {
            std::fprintf(stderr, "--json: cannot write %s\n", json_file.c_str());
            return 1;
        }
    }
    return failed ? 1 : 0;
}

}  // namespace bench
