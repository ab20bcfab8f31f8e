#include <fstream>
#include <string>

#include "device/device.hpp"

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace prl {
namespace {

/// x86's cpuinfo has a name; arm64's has numbers alone, of the core's designer and its design.
std::string cpu_name() {
  std::ifstream file("/proc/cpuinfo");
  std::string line, implementer;
  while (std::getline(file, line)) {
    const auto colon = line.find(':');
    if (colon == std::string::npos || colon + 2 > line.size()) continue;
    const std::string value = line.substr(colon + 2);
    if (line.starts_with("model name")) return value;
    if (line.starts_with("CPU implementer")) implementer = value;
    if (line.starts_with("CPU part")) return "arm64 core " + value + " of implementer " + implementer;
  }
  return "unknown CPU";
}

#if defined(__x86_64__)

std::uint64_t enabled_state_components() {
  std::uint32_t low = 0, high = 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (static_cast<std::uint64_t>(high) << 32) | low;
}

/// Asks the kernel for the tile data registers, which Linux grants per process (arch_prctl(2), ARCH_REQ_XCOMP_PERM).
bool request_tile_permission() {
  constexpr long kRequestPermission = 0x1023;
  constexpr long kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

CpuFeatures detect() {
  CpuFeatures f;
  f.name = cpu_name();
  std::uint32_t a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid(1, &a, &b, &c, &d) == 0) return f;
  const bool osxsave = (c >> 27) & 1u;
  const bool fma = (c >> 12) & 1u;
  const bool f16c = (c >> 29) & 1u;
  if (!osxsave) return f;
  const std::uint64_t state = enabled_state_components();
  const bool ymm = (state & 0x6) == 0x6;
  const bool zmm = (state & 0xe6) == 0xe6;
  const bool tiles = (state & 0x60000) == 0x60000;
  std::uint32_t b7 = 0, c7 = 0, d7 = 0, a71 = 0;
  if (__get_cpuid_count(7, 0, &a, &b7, &c7, &d7) == 0) return f;
  f.avx2 = ymm && fma && f16c && ((b7 >> 5) & 1u);
  const bool avx512f = (b7 >> 16) & 1u, avx512dq = (b7 >> 17) & 1u, avx512bw = (b7 >> 30) & 1u, avx512vl = (b7 >> 31) & 1u;
  f.avx512 = f.avx2 && zmm && avx512f && avx512dq && avx512bw && avx512vl;
  if (a >= 1 && __get_cpuid_count(7, 1, &a71, &b, &c, &d) != 0) f.avx512_bf16 = f.avx512 && ((a71 >> 5) & 1u);
  const bool amx_bf16 = ((d7 >> 22) & 1u) && ((d7 >> 24) & 1u);
  f.amx_bf16 = f.avx512_bf16 && amx_bf16 && tiles && request_tile_permission();
  return f;
}

#else

CpuFeatures detect() {
  CpuFeatures f;
  f.name = cpu_name();
  return f;
}

#endif

}  // namespace

const CpuFeatures& cpu_features() {
  static const CpuFeatures features = detect();
  return features;
}

}  // namespace prl
