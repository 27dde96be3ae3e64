// test_flash_attn.cu: the native tests and the benchmark. They use only the C ABI (flash_attn.h), and the CUDA runtime for memory.
//
// Every case of tests/native/cases.h is computed in float64, then by each kernel of the device that serves it. The error of the forward
// results and of the gradients must be within what their precision allows. api_tests.h, backward_tests.h and kvcache_tests.h test the rest
// of the contract. The file is C++17; the program's only kernel is in tests/native/empty_launch.cu.
#include <unistd.h>

#include <cctype>
#include <cerrno>
#include <chrono>
#include <map>

#include "flash_attn.h"
#include "native/api_tests.h"
#include "native/backward_tests.h"
#include "native/bench.h"
#include "native/cases.h"
#include "native/kvcache_tests.h"
#include "native/launch.h"
#include "native/reference.h"

namespace {

constexpr int kExitFailed = 1, kExitUsage = 2, kExitSkipped = 77;  // 77: CTest's SKIP_RETURN_CODE

const char kHelp[] =
    "test_flash_attn: native tests and benchmark of flash-attn-minimal\n"
    "  --list               names of the tests, one a line\n"
    "  --filter TEXT        only tests whose name contains TEXT; may be repeated\n"
    "  --device cpu|cuda    default: cuda if there is a GPU; cuda without a GPU exits with 77\n"
    "  --kernel NAME        only this kernel, of either pass\n"
    "  --quick              fewer cases, or a shorter table\n"
    "  --seed N             seed of all random numbers and of the fuzz cases (default 1)\n"
    "  --threads N          CPU threads, 0 = one per core\n"
    "  --verbose            a line for every test and kernel\n"
    "  --bench              the table of times instead of the tests\n"
    "  --json FILE          with --bench: the rows as JSON\n"
    "  --help               this text\n";

struct Options {
    bool list = false, bench = false, quick = false, verbose = false, help = false;
    std::vector<std::string> filters;
    std::string device, kernel, json;
    uint64_t seed = 1;
    int32_t threads = 0;
};

struct UsageError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

Options parse(int argc, char** argv) {
    Options o;
    for (int i = 1; i < argc; ++i) {
        std::string name = argv[i], value;
        const size_t equals = name.find('=');
        const bool attached = equals != std::string::npos;
        if (attached) value = name.substr(equals + 1), name.resize(equals);
        const auto argument = [&] {
            if (attached) return value;
            if (i + 1 >= argc) throw UsageError("option " + name + " needs a value");
            return std::string(argv[++i]);
        };
        const auto count = [&](uint64_t largest) {
            const std::string text = argument();
            char* end = nullptr;
            errno = 0;
            const uint64_t n = std::strtoull(text.c_str(), &end, 10);
            if (text.empty() || !std::isdigit(static_cast<unsigned char>(text[0])) || *end || errno || n > largest)
                throw UsageError("option " + name + ": '" + text + "' is not a number from 0 to " + std::to_string(largest));
            return n;
        };
        const std::map<std::string, bool*> flags = {{"--list", &o.list},       {"--bench", &o.bench}, {"--quick", &o.quick},
                                                    {"--verbose", &o.verbose}, {"--help", &o.help},   {"-h", &o.help}};
        if (const auto flag = flags.find(name); flag != flags.end() && !attached) *flag->second = true;
        else if (name == "--filter") o.filters.push_back(argument());
        else if (name == "--device") o.device = argument();
        else if (name == "--kernel") o.kernel = argument();
        else if (name == "--json") o.json = argument();
        else if (name == "--seed") o.seed = count(UINT64_MAX);
        else if (name == "--threads") o.threads = int32_t(count(4096));
        else throw UsageError("unknown option " + std::string(argv[i]));
    }
    if (!o.device.empty() && o.device != "cpu" && o.device != "cuda")
        throw UsageError("option --device: '" + o.device + "' is neither cpu nor cuda");
    if (!o.json.empty() && !o.bench) throw UsageError("option --json needs --bench");
    return o;
}

double seconds_since(std::chrono::steady_clock::time_point start) {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// The results of one kernel over the whole run.
struct Score {
    int served = 0, not_served = 0, too_slow = 0, wrong = 0;
    double worst_out = 0, worst_lse = 0, seconds = 0;  // the worst errors are fractions of the budget
    std::string where_out, where_lse;
};

class Runner {
public:
    Runner(const Options& options, const Context& context) : options_(options), context_(context) {
        for (const Case& c : correctness_cases(options.seed, options.quick))
            tests_.push_back({c.name, [this, c](const Context&) { answer(c); }});
        for (Test& test : api_tests()) tests_.push_back(std::move(test));
        for (Test& test : backward_tests(options.seed, options.quick)) tests_.push_back(std::move(test));
        for (Test& test : kvcache::tests()) tests_.push_back(std::move(test));
        std::map<std::string, int> seen;
        for (const Test& test : tests_)
            if (seen[test.name]++) throw std::logic_error("two tests are called " + test.name);
        const auto chosen = [&](const Test& test) {
            const auto inside = [&](const std::string& text) { return test.name.find(text) != std::string::npos; };
            return options.filters.empty() || std::any_of(options.filters.begin(), options.filters.end(), inside);
        };
        tests_.erase(std::remove_if(tests_.begin(), tests_.end(), [&](const Test& test) { return !chosen(test); }), tests_.end());
    }

    void list() const {
        for (const Test& test : tests_) std::printf("%s\n", test.name.c_str());
    }

    int run() {
        if (tests_.empty()) throw UsageError("no test's name contains what --filter asks for (--list shows them)");
        const auto start = std::chrono::steady_clock::now();
        const bool show_progress = !options_.verbose && isatty(STDOUT_FILENO);
        int passed = 0, failed = 0;
        std::map<std::string, std::vector<std::string>> skipped;  // by reason
        for (size_t i = 0; i < tests_.size(); ++i) {
            const Test& test = tests_[i];
            if (show_progress) std::printf("\r[%zu/%zu] %-70.70s", i + 1, tests_.size(), test.name.c_str()), std::fflush(stdout);
            std::string outcome = "ok";
            try {
                test.run(context_);
                ++passed;
            } catch (const Skip& skip) {
                skipped[skip.what()].push_back(test.name);
                outcome = std::string("skipped: ") + skip.what();
            } catch (const std::exception& failure) {
                ++failed;
                std::printf("%sFAILED %s: %s\n", show_progress ? "\r" : "", test.name.c_str(), failure.what());
                outcome = "FAILED";
            }
            if (options_.verbose) std::printf("%-60s %s\n", test.name.c_str(), outcome.c_str());
            if (options_.verbose || outcome == "FAILED") std::fflush(stdout);
        }
        if (show_progress) std::printf("\r%-90s\r", "");
        summarize(seconds_since(start));
        int skips = 0;
        for (const auto& [reason, names] : skipped) {
            std::printf("skipped: %s (%s%s)\n", reason.c_str(), names.front().c_str(),
                        names.size() > 1 ? format(" and %zu more", names.size() - 1).c_str() : "");
            skips += int(names.size());
        }
        std::printf("%d passed, %d failed, %d skipped\n", passed, failed, skips);
        return failed ? kExitFailed : 0;
    }

private:
    // Runs one case on every kernel that serves it.
    void answer(const Case& c) {
        Problem p(c, context_.device, context_.seed);
        p.num_threads = context_.num_threads;
        const Answer answer = solve(p);
        int answered = 0;
        std::string complaints, refusal;
        for (const std::string& name : context_.kernels) {
            Score& score = scores_[name];
            fa_attention_args args = p.args();
            args.kernel = name.c_str();
            const fa_attention_plan plan = query(args);
            p.reset();
            if (plan.status == FA_UNSUPPORTED) {  // the launch must say the same and leave the outputs alone
                refusal = fa_last_error();
                const fa_status status = fa_attention_forward(&args, nullptr);
                wait(p.device);
                EXPECT(status == FA_UNSUPPORTED && refusal == fa_last_error() && untouched(p),
                       "%s: the query refuses (%s), the launch returns %s and %s its outputs", name.c_str(), refusal.c_str(),
                       fa_status_name(status), untouched(p) ? "leaves alone" : "writes");
                ++score.not_served;
                continue;
            }
            if (slow(name) && c.pairs() > kSlowLimit && context_.kernels.size() > 1) {
                ++score.too_slow;
                continue;
            }
            const auto start = std::chrono::steady_clock::now();
            const fa_attention_plan ran = launch(p, args);
            score.seconds += seconds_since(start);
            EXPECT(name == ran.kernel, "asked for %s, the query names %s", name.c_str(), ran.kernel);
            ++answered, ++score.served;
            const Verdict verdict = judge(p, answer);
            if (verdict.out_ratio > score.worst_out) score.worst_out = verdict.out_ratio, score.where_out = c.name;
            if (verdict.lse_ratio > score.worst_lse) score.worst_lse = verdict.lse_ratio, score.where_lse = c.name;
            if (options_.verbose)
                std::printf("  %-14s out error %.1e (%.2f of the budget), lse error %.1e (%.2f)\n", name.c_str(), verdict.out_error,
                            verdict.out_ratio, verdict.lse_error, verdict.lse_ratio);
            if (verdict.complaint.empty()) continue;
            ++score.wrong;
            complaints += format("%s%s: %s", complaints.empty() ? "" : "; ", name.c_str(), verdict.complaint.c_str());
        }
        EXPECT(complaints.empty(), "%s", complaints.c_str());
        if (answered > 0) return;
        if (c.dtype == FA_FLOAT8_E4M3) throw Skip("no kernel of this device takes float8_e4m3");
        if (options_.kernel.empty()) throw Failure("no kernel serves this case: " + refusal);
        throw Skip("kernel " + options_.kernel + " does not serve this case");
    }

    // cpu_naive reads element by element: its large cases would take most of the run.
    static constexpr double kSlowLimit = double(1 << 26);
    static bool slow(const std::string& kernel) { return kernel == "cpu_naive"; }

    void summarize(double seconds) const {
        std::printf("%s, seed %llu, %.1f s; flash-attn-minimal %s (%s)\n", context_.device == FA_CUDA ? "cuda" : "cpu",
                    (unsigned long long)options_.seed, seconds, fa_version(), fa_build_info());
        if (scores_.empty()) return;
        std::printf("\n%-14s %7s %10s %9s %6s %8s   %s\n", "kernel", "cases", "not served", "too slow", "wrong", "seconds",
                    "worst error / budget: out, lse");
        for (const std::string& name : context_.kernels) {
            const auto found = scores_.find(name);
            if (found == scores_.end()) continue;
            const Score& s = found->second;
            std::printf("%-14s %7d %10d %9d %6d %8.2f   ", name.c_str(), s.served, s.not_served, s.too_slow, s.wrong, s.seconds);
            if (s.served) std::printf("%.2f %s, %.2f %s", s.worst_out, s.where_out.c_str(), s.worst_lse, s.where_lse.c_str());
            std::printf("\n");
        }
        std::printf("\n");
    }

    const Options& options_;
    const Context context_;
    std::vector<Test> tests_;
    std::map<std::string, Score> scores_;
};

int run(int argc, char** argv) {
    const Options options = parse(argc, argv);
    if (options.help) {
        std::fputs(kHelp, stdout);
        return 0;
    }
    const bool gpu = fa_cuda_device_count() > 0;
    Context context;
    context.device = options.device == "cuda" || (options.device.empty() && gpu) ? FA_CUDA : FA_CPU;
    context.seed = options.seed, context.num_threads = options.threads, context.quick = options.quick;
    context.kernels = kernels_of(context.device);
    context.backward_kernels = backward_kernels_of(context.device);
    if (!options.kernel.empty()) {
        const auto keep = [&](std::vector<std::string>* names) {
            names->erase(std::remove_if(names->begin(), names->end(), [&](const std::string& name) { return name != options.kernel; }),
                         names->end());
        };
        keep(&context.kernels), keep(&context.backward_kernels);
        if (context.kernels.empty() && context.backward_kernels.empty())
            throw UsageError("option --kernel: '" + options.kernel + "' is not a kernel of this build on " +
                             (context.device == FA_CUDA ? "cuda" : "cpu") + " (" + fa_build_info() + ")");
    }
    if (options.list) {
        Runner(options, context).list();
        return 0;
    }
    if (context.device == FA_CUDA && !gpu) {
        std::printf("skipped: --device cuda, but %s\n",
                    FA_WITH_CUDA ? "this machine has no GPU or no driver" : "this build has the CPU backend only");
        return kExitSkipped;
    }
    if (options.bench) {
        std::string command = "test_flash_attn";
        for (int i = 1; i < argc; ++i) command += std::string(" ") + argv[i];
        return bench::run(context, command, options.json);
    }
    return Runner(options, context).run();
}

}  // namespace

int main(int argc, char** argv) {
    try {
        return run(argc, argv);
    } catch (const UsageError& error) {
        std::fprintf(stderr, "test_flash_attn: %s (--help lists the options)\n", error.what());
        return kExitUsage;
    } catch (const std::exception& error) {
        std::fprintf(stderr, "test_flash_attn: %s\n", error.what());
        return kExitFailed;
    }
}
