#include "tools/doctor.hpp"

#include <sys/resource.h>
#include <sys/statvfs.h>

#include <boost/json/array.hpp>
#include <boost/json/object.hpp>
#include <boost/json/serialize.hpp>
#include <fstream>
#include <string_view>
#include <vector>

#include "base/error.hpp"
#include "base/thread_pool.hpp"
#include "base/units.hpp"
#include "device/device.hpp"
#include "ops/measure.hpp"

namespace prl::tools {
namespace fs = std::filesystem;
namespace {

struct Finding {
  std::string subject;
  std::string found;
  std::string meaning;
  bool is_ok = true;
};

std::uint64_t read_number(const fs::path& path) {
  std::ifstream file(path);
  std::uint64_t value = 0;
  return file >> value ? value : 0;
}

double meminfo_gib(std::string_view key) {
  std::ifstream file("/proc/meminfo");
  std::string name;
  double kib = 0;
  std::string unit;
  while (file >> name >> kib && std::getline(file, unit))
    if (name == std::string(key) + ":") return kib * 1024.0 / kGiB;
  return 0;
}

/// What the portable kernels are compiled to: all that a CPU has which has none of the sets with kernels of their own.
#if defined(__aarch64__)
constexpr std::string_view kPortableSet = "NEON";
#else
constexpr std::string_view kPortableSet = "SSE2 alone";
#endif

Finding cpu_finding() {
  const CpuFeatures& cpu = cpu_features();
  std::string sets;
  for (const auto& [has, name] :
       {std::pair{cpu.amx_bf16, "AMX-BF16"}, {cpu.avx512_bf16, "AVX512-BF16"}, {cpu.avx512, "AVX-512"}, {cpu.avx2, "AVX2"}})
    if (has) sets += (sets.empty() ? "" : ", ") + std::string(name);
  const bool has_bf16 = cpu.amx_bf16 || cpu.avx512_bf16;
  return {"cpu",
          fmt::format("{}, {} cores usable, {}", cpu.name.empty() ? "unknown" : cpu.name, num_available_cores(),
                      sets.empty() ? kPortableSet : sets),
          has_bf16 ? "computes in bfloat16 by default" : "computes in float32 by default; bfloat16 works but is emulated", true};
}

Finding peak_finding() {
  ops::OpSession session(make_cpu_runtime(), 0);
  const ops::MachinePeak peak = ops::measure_machine(session.context());
  return {"speed",
          fmt::format("float32 {:.0f} GFLOP/s, bfloat16 {:.0f} GFLOP/s, memory {:.1f} GB/s read (measured just now)", peak.f32_flops / 1e9,
                      peak.bf16_flops / 1e9, peak.read_bytes_per_second / 1e9),
          "MFU is reported against these; decoding one sequence cannot be faster than memory / weight bytes", true};
}

Finding memory_finding() {
  const double total = meminfo_gib("MemTotal"), available = meminfo_gib("MemAvailable");
  const std::uint64_t limit = read_number("/sys/fs/cgroup/memory.max");
  std::string found = fmt::format("{:.1f} GiB, {:.1f} GiB available", total, available);
  if (limit) found += fmt::format(", container limit {:.1f} GiB", static_cast<double>(limit) / kGiB);
  // Master, gradient and two moments in fp32 plus packed weights on both sides: about 22 bytes a parameter.
  const double parameters = available * kGiB * 0.7 / 22.0;
  return {"memory", found, fmt::format("trains models up to about {:.1f} B parameters with AdamW", parameters / 1e9), available > 2};
}

Finding gpu_finding() {
  const CudaDevices cuda = list_cuda_devices();
  if (cuda.devices.empty()) {
    // The kernel's driver may be there although this process cannot use it.
    std::error_code error;
    const bool has_driver = fs::exists("/proc/driver/nvidia/version", error);
    return {"gpu", "none usable: " + cuda.missing, "everything runs on the CPU", !has_driver};
  }
  const auto free_bytes = [](int index) {
    try {
      return make_cuda_runtime(index)->bytes_available();
    } catch (const Error&) {  // another process has it all
      return std::size_t{0};
    }
  };
  std::string list;
  for (const CudaDeviceInfo& d : cuda.devices)
    list += fmt::format("{}{} {} (compute {}.{}, {} multiprocessors, {:.1f} of {:.1f} GiB free)", list.empty() ? "" : "; ", d.index, d.name,
                        d.compute_major, d.compute_minor, d.num_multiprocessors, static_cast<double>(free_bytes(d.index)) / kGiB,
                        static_cast<double>(d.total_bytes) / kGiB);
  try {
    ops::OpSession session(make_cuda_runtime(cuda.devices.front().index), 1);
    const ops::MachinePeak peak = ops::measure_machine(session.context());
    return {"gpu", fmt::format("{}; {}", list, cuda.versions),
            fmt::format("roles compute on GPU 0 unless compute.device = \"cpu\"; bfloat16 {:.0f} TFLOP/s, memory {:.2f} TB/s (measured)",
                        peak.bf16_flops / 1e12, peak.read_bytes_per_second / 1e12),
            true};
  } catch (const Error& error) {
    return {"gpu", fmt::format("{}; {}", list, cuda.versions), error.what(), false};
  }
}

Finding files_finding() {
  rlimit limit{};
  getrlimit(RLIMIT_NOFILE, &limit);
  const bool is_ok = limit.rlim_max >= 4096;
  return {"open files", fmt::format("soft limit {}, hard limit {}", limit.rlim_cur, limit.rlim_max),
          is_ok ? "the soft limit is raised at start as needed" : "too few for 1,000 connections: raise it with `ulimit -n 32000`", is_ok};
}

Finding disk_finding(const fs::path& output_dir) {
  fs::path probe = fs::absolute(output_dir);
  while (!fs::exists(probe) && probe.has_parent_path() && probe != probe.parent_path()) probe = probe.parent_path();
  struct statvfs info {};
  if (statvfs(probe.c_str(), &info) != 0)
    return {"disk", fmt::format("{} cannot be read", probe.string()), "choose another --output-dir", false};
  const double free_gib = static_cast<double>(info.f_bavail) * static_cast<double>(info.f_frsize) / kGiB;
  return {"disk", fmt::format("{:.1f} GiB free at {}", free_gib, probe.string()),
          free_gib > 5 ? fmt::format("a checkpoint takes about 12 bytes a parameter: room for {:.0f} of a 0.6 B model", free_gib / 7.2)
                       : "little room for checkpoints: use --ckpt.keep-last or another --output-dir",
          free_gib > 1};
}

}  // namespace

std::string doctor_report(const DoctorOptions& options) {
  const std::vector<Finding> findings = {cpu_finding(), peak_finding(),  memory_finding(),
                                         gpu_finding(), files_finding(), disk_finding(options.output_dir)};
  if (options.json) {
    boost::json::array list;
    for (const Finding& f : findings)
      list.push_back(boost::json::object{{"subject", f.subject}, {"found", f.found}, {"meaning", f.meaning}, {"ok", f.is_ok}});
    return boost::json::serialize(list) + "\n";
  }
  std::string text;
  for (const Finding& f : findings)
    text += fmt::format("{} {:<11} {}\n{:14}{}\n", f.is_ok ? "ok  " : "LOOK", f.subject, f.found, "", f.meaning);
  return text;
}

}  // namespace prl::tools
